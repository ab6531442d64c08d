"""Handwritten digits, split across the clients by a Dirichlet distribution."""

import torch

from fedsift import data


def load_share(partition: int, partitions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one client's images and labels."""
    x, y = data.load("digits").train
    rows = data.dirichlet(y.numpy(), clients=partitions, seed=0, theta=1.0)[partition]
    return x[rows], y[rows]


def load_test() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the images and labels on which the server evaluates the model."""
    return data.load("digits").test
