"""Your own NumPy arrays and your own model: ten hospitals learn to recognize breast cancer.

Each client is a pair (x, y) of arrays. The hospitals have 8 to 96 patients, and no two have the
same share of malignant tumors. ``python examples/numpy_data.py`` draws ``numpy_data.png``. On the
command line, the same run is, in the folder ``examples``:

    fedsift run --data numpy_data:load --model numpy_data:network --local-steps 5 --rounds 30
"""

import sys

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import load_breast_cancer
from torch import nn

import fedsift
from fedsift import algorithms, data

METHODS = {
    "dense FedAdam": algorithms.fedadam(local_steps=5),
    "FedAdam-SSM, 5 %": algorithms.fedadam_ssm(density=0.05, local_steps=5),
    "sift": algorithms.sift(local_steps=5),
}


def load(seed=0, num_clients=10):
    """Return the data of each hospital, and a test set."""
    x, y = load_breast_cancer(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(x))
    x, y = (x[order] - x.mean(0)) / x.std(0), y[order]
    test, x, y = (x[:140], y[:140]), x[140:], y[140:]
    hospitals = data.dirichlet(y, num_clients, seed=seed, theta=1.0)
    return [(x[rows], y[rows]) for rows in hospitals], test


def network():
    """Return a network for 30 measurements and two classes."""
    return nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 2))


def train(rounds=30):
    """Train with each method, from the same initial weights."""
    clients, test = load()
    torch.manual_seed(0)
    model = network()
    return {
        name: fedsift.simulate(model, clients, test, method, rounds, batch_size=16)
        for name, method in METHODS.items()
    }


def draw(results, path):
    """Draw the accuracy against the traffic."""
    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    for name, result in results.items():
        history = result.history[1:]  # without the initial model, which nobody has sent
        kilobytes = [record["uplink_bytes"] / 1e3 for record in history]
        axes.plot(kilobytes, [100 * record["accuracy"] for record in history], label=name)
    axes.set(xscale="log", xlabel="kB sent per client", ylabel="test accuracy (%)")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=100)
    plt.close(figure)


if __name__ == "__main__":
    results = train()
    for name, result in results.items():
        print(f"{name}: {result}")
    draw(results, sys.argv[1] if len(sys.argv) > 1 else "numpy_data.png")
