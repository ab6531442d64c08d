"""Time series by subject: recognize activities, and measure for whom the model works.

Twelve people wear a sensor while they rest, walk or run. Each has another gait and wears the sensor
in another way, so that its signal has another offset and scale. With ``buffers="local"`` (FedBN)
each person keeps the BatchNorm layers; ``client_tests`` measures the accuracy of each person's
model on new recordings. ``python examples/time_series.py`` draws ``time_series.png``.
"""

import sys

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn

import fedsift
from fedsift import algorithms

PEOPLE, SAMPLES = 12, 64


def recordings(person, number, seed):
    """Return recordings of one person at 20 Hz, and the activities: rest, walk, run."""
    about, draw = np.random.default_rng(person), np.random.default_rng((person, seed))
    pace, offset, scale = about.uniform(0.9, 1.1), about.normal(0, 3), about.lognormal(0, 1)
    y = draw.integers(3, size=number)
    hertz = pace * np.array([0.3, 1.5, 2.5])[y, None]
    phase = 2 * np.pi * (hertz * np.arange(SAMPLES) / 20 + draw.random((number, 1)))
    strength = np.array([0.3, 0.8, 1.2])[y, None]
    signal = strength * np.sin(phase) + draw.normal(size=phase.shape)
    return (offset + scale * signal)[:, None], y


def network():
    """Return a convolutional network over time. Its first layer normalizes the signal."""
    return nn.Sequential(
        nn.BatchNorm1d(1), nn.Conv1d(1, 16, 7, padding=3), nn.BatchNorm1d(16), nn.ReLU(),
        nn.MaxPool1d(2), nn.Conv1d(16, 16, 7, padding=3), nn.BatchNorm1d(16), nn.ReLU(),
        nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(16, 3),
    )  # fmt: skip


def train(rounds=15):
    """Train with averaged and with local BatchNorm layers, from the same initial weights."""
    clients = [recordings(person, 60, seed=0) for person in range(PEOPLE)]
    tests = [recordings(person, 100, seed=1) for person in range(PEOPLE)]
    torch.manual_seed(0)
    model = network()
    method = algorithms.fedadam_ssm(density=0.2, local_steps=10, lr=3e-3)
    return {
        buffers: fedsift.simulate(
            model, clients, None, method, rounds, batch_size=30, buffers=buffers, client_tests=tests
        )
        for buffers in ("average", "local")
    }


def draw(results, path):
    """Draw each person's accuracy."""
    figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
    for place, (buffers, result) in enumerate(results.items()):
        each = 100 * np.array(result.history[-1]["client_accuracy"])
        label = f'buffers="{buffers}": worst {each.min():.0f} %, mean {each.mean():.0f} %'
        axes.bar(np.arange(1, PEOPLE + 1) + 0.4 * (place - 0.5), each, width=0.4, label=label)
    axes.set(xlabel="person", ylabel="accuracy (%)", xticks=range(1, PEOPLE + 1), ylim=(0, 130))
    axes.legend(frameon=False)
    figure.savefig(path, dpi=100)
    plt.close(figure)


if __name__ == "__main__":
    draw(train(), sys.argv[1] if len(sys.argv) > 1 else "time_series.png")
