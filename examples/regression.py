"""Federated regression: four clinics predict the progression of diabetes.

Each clinic has patients of another age, and too few to learn from alone. The targets are numbers,
so the loss is the mean squared error, and the metrics are the mean absolute error and R².
``python examples/regression.py`` draws ``regression.png``.
"""

import sys

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import load_diabetes
from torch import nn
from torch.nn.functional import mse_loss

import fedsift
from fedsift import algorithms, schedules


def load():
    """Return the patients of each clinic, by age, and a test set of all ages."""
    x, y = load_diabetes(return_X_y=True)
    x, y = x / x.std(0), ((y - y.mean()) / y.std())[:, None]  # a column, as the model's output
    order = np.random.default_rng(0).permutation(len(x))
    test, rest = order[:200], order[200:]
    by_age = rest[np.argsort(x[rest, 0], kind="stable")]
    return [(x[rows], y[rows]) for rows in np.array_split(by_age, 4)], (x[test], y[test])


def absolute_error(output, y):
    """Return the mean absolute error."""
    return (output - y).abs().mean()


def r_squared(output, y):
    """Return the share of the variance that is explained."""
    return 1 - ((output - y) ** 2).mean() / y.var()


def train(rounds=60):
    """Train the clinics together, and each alone, from the same initial weights."""
    clients, test = load()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 1))
    method = algorithms.fedadam(local_steps=5, lr=schedules.cosine(5e-3))
    groups = {"together": clients} | {f"clinic {n} alone": [clients[n]] for n in range(4)}
    return {
        name: fedsift.simulate(
            model, group, test, method, rounds, batch_size=16, loss=mse_loss,
            metrics={"absolute error": absolute_error, "R²": r_squared}, progress=False,
        )
        for name, group in groups.items()
    }  # fmt: skip


def draw(results, path):
    """Draw the explained variance over the rounds."""
    figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
    for name, result in results.items():
        is_alone = name != "together"
        values = [record["R²"] for record in result.history]
        axes.plot(values, label=name, linewidth=1 if is_alone else 2.5, alpha=0.7)
    axes.set(xlabel="round", ylabel="R² on patients of all ages", ylim=(-0.2, 0.6))
    axes.legend(frameon=False, fontsize="small")
    figure.savefig(path, dpi=100)
    plt.close(figure)


if __name__ == "__main__":
    results = train()
    for name, result in results.items():
        last = result.history[-1]
        print(f"{name}: absolute error {last['absolute error']:.2f}, R² {last['R²']:.2f}")
    draw(results, sys.argv[1] if len(sys.argv) > 1 else "regression.png")
