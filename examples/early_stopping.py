"""A metric of your own, and a run that ends when it stops improving.

One in ten transactions is a fraud, so accuracy says little: a model that never warns has 90 %. The
run measures the F1 score every five rounds, and ends after three evaluations without a better one.
The model of the best round is kept. ``python examples/early_stopping.py`` draws
``early_stopping.png``.
"""

import sys

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import make_classification
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import fedsift
from fedsift import algorithms, data, schedules

PATIENCE = 3


def load():
    """Return the transactions of eight banks, and those that no bank has seen."""
    x, y = make_classification(4000, 20, n_informative=8, weights=[0.9], random_state=0)
    x, y = x.astype("float32"), y.astype("float32")[:, None]
    banks = data.dirichlet(y[:2000, 0], clients=8, seed=0, theta=1.0)
    return [(x[rows], y[rows]) for rows in banks], (x[2000:], y[2000:])


def f1(model, test):
    """Return the F1 score of a model, for the whole test set at once."""
    found, fraud = model(torch.from_numpy(test[0])) > 0, torch.from_numpy(test[1]) > 0.5
    right = int((found & fraud).sum())
    return 2 * right / max(1, int(found.sum()) + int(fraud.sum()))


class EarlyStopping:
    """Keeps the best model; True once the F1 score has stopped improving."""

    def __init__(self):
        self.best, self.round, self.model = -1.0, 0, None

    def __call__(self, record, model):  # noqa: D102
        score = record.get("f1", -1.0)  # rounds without evaluation have none
        if score > self.best:
            self.best, self.round, self.model = score, record["round"], model
        return record["round"] >= self.round + 5 * PATIENCE


def train(rounds=300):
    """Train until the F1 score stops improving."""
    clients, test = load()
    torch.manual_seed(0)
    stopping = EarlyStopping()
    result = fedsift.simulate(
        nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1)), clients, test,
        algorithms.fedadam_ssm(density=0.1, local_steps=5, lr=schedules.cosine(3e-3, 1e-3)),
        rounds, batch_size=32, loss=binary_cross_entropy_with_logits,
        evaluate=lambda model: {"f1": f1(model, test)}, evaluate_every=5, on_round=stopping,
    )  # fmt: skip
    return result, stopping


def draw(result, stopping, path):
    """Draw the metric, and the best round."""
    figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
    scores = {r["round"]: r["f1"] for r in result.history if "f1" in r}
    axes.plot(scores.keys(), scores.values(), marker=".")
    axes.axvline(stopping.round, color="gray", linestyle=":")
    axes.annotate(f" best: {stopping.best:.2f} in round {stopping.round}", (stopping.round, 0.02))
    axes.set(xlabel="round", ylabel="F1 score", ylim=(0, 1))
    figure.savefig(path, dpi=100)
    plt.close(figure)


if __name__ == "__main__":
    draw(*train(), sys.argv[1] if len(sys.argv) > 1 else "early_stopping.png")
