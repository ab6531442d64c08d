"""Handwritten digits, dealt to the clients by a Dirichlet distribution."""

import torch

from fedsift import data


def load_share(partition: int, partitions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One client's images and labels."""
    x, y = data.load("digits").train
    rows = data.dirichlet(y.numpy(), clients=partitions, seed=0, theta=1.0)[partition]
    return x[rows], y[rows]


def load_test() -> tuple[torch.Tensor, torch.Tensor]:
    """The images on which the server tests the model."""
    return data.load("digits").test
