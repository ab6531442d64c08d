"""The work that every system is given: 20 clients, 30 Adam steps of 64 images, the paper's CNN."""

import functools
import gzip
import json
import os
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

CLIENTS, STEPS, BATCH, LR = 20, 30, 64, 1e-3


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 10, 5), nn.MaxPool2d(2), nn.ReLU(),
        nn.Conv2d(10, 20, 5), nn.MaxPool2d(2), nn.ReLU(),
        nn.Flatten(), nn.Linear(320, 50), nn.ReLU(), nn.Linear(50, 10),
    )  # fmt: skip


@functools.cache
def clients() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Fashion-MNIST's training images, dealt out evenly."""
    folder = Path(os.environ.get("FEDSIFT_DATA", Path.home() / ".cache/fedsift/data"))
    pixels = _read(folder / "fashion-mnist" / "train-images-idx3-ubyte.gz", 16)
    labels = _read(folder / "fashion-mnist" / "train-labels-idx1-ubyte.gz", 8)
    x = torch.from_numpy(pixels.reshape(-1, 1, 28, 28)).float().div_(255).sub_(0.286).div_(0.353)
    y = torch.from_numpy(labels.astype(np.int64))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return [(x[rows], y[rows]) for rows in order.chunk(CLIENTS)]


def _read(path: Path, header: int) -> np.ndarray:
    with gzip.open(path) as file:
        return np.frombuffer(bytearray(file.read()), np.uint8, offset=header)


def train(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    """One client's round as a user of PyTorch writes it."""
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    for _ in range(STEPS):
        rows = torch.randperm(len(x))[:BATCH]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()


class Clock:
    """Notes when each round ends."""

    def __init__(self) -> None:
        self.ticks = [time.perf_counter()]

    def tick(self) -> None:
        self.ticks.append(time.perf_counter())

    def write(self, path: str) -> None:
        rounds = [b - a for a, b in zip(self.ticks, self.ticks[1:], strict=False)]
        Path(path).write_text(json.dumps(rounds))
