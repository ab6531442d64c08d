"""Measure what a client takes for the gradient of a mini-batch of 64, in seconds of one core.

    python reproduce/rivals/gradient_time.py

CPU time is measured, so other processes hardly matter. `rivals.toml` has the numbers, rounded.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

import torch
from torch.nn.functional import cross_entropy

from fedsift.models import build

SHAPES = {"cnn": (1, 28, 28), "vgg11": (3, 32, 32), "resnet18": (3, 32, 32)}
REPEATS = 7


def seconds_per_gradient(name: str) -> float:
    """Return the median CPU time of a forward and a backward pass in plain PyTorch."""
    model = build(name, SHAPES[name], seed=0)
    x, y = torch.randn(64, *SHAPES[name]), torch.arange(64) % 10
    found = []
    for _ in range(REPEATS):
        began = time.process_time()
        cross_entropy(model(x), y).backward()
        found.append(time.process_time() - began)
    return median(found)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in SHAPES:
        print(f"{name}: {seconds_per_gradient(name):.4f} s")
