"""The learning task: a model, a loss, and the clients' data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedsift.seeding import stream
from fedsift.vector import Layout

Loss = Callable[[Tensor, Tensor], Tensor]
Data = tuple[Tensor, Tensor]


class RemoteClients(Sequence[Data]):
    """The data of a fixed number of clients, most of which is on other machines.

    >>> len(RemoteClients(3, {}))
    3
    """

    def __init__(self, number: int, local: Mapping[int, Data]) -> None:
        self.number, self.local = number, local

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, client: int) -> Data:  # type: ignore[override]
        """Return a client's data, which must be on this machine."""
        return self.local[client]


@dataclass(frozen=True)
class Task:
    """A model, a loss and the clients' data, independent of the method that trains it."""

    model: nn.Module
    loss: Loss
    clients: Sequence[Data]
    test: Data | None
    batch_size: int | None
    seed: int
    layout: Layout

    def weight(self, client: int) -> int:
        """Return the client's mini-batch size |D̃ₙ|, its weight in the mean."""
        size = len(self.clients[client][0])
        return size if self.batch_size is None else min(self.batch_size, size)

    def batches(self, round: int, client: int, steps: int) -> NDArray[np.int64] | None:
        """Return a random sample of rows for each step; None if each batch is the whole set."""
        size, batch = len(self.clients[client][0]), self.weight(client)
        if batch == size:
            return None
        return sample_without_replacement(self.batch_uniforms(round, client, steps), size)

    def batch_uniforms(self, round: int, client: int, steps: int) -> NDArray[np.float64]:
        """Return the uniform random numbers ``(steps, batch)`` that choose the client's batches."""
        generator = stream(self.seed, "batches", round, client)
        return generator.random((steps, self.weight(client)))


def sample_without_replacement(
    uniforms: NDArray[np.float64], size: int | NDArray[np.int64]
) -> NDArray[np.int64]:
    """Turn uniform numbers in [0, 1) into distinct integers below ``size`` along the last axis.

    Every set of integers is equally likely. This is Floyd's method: the i-th of n integers is drawn
    from the first size - n + i + 1, and replaced by the last of these if it was drawn before.
    ``size`` may be an array, one size per sample.

    >>> sample_without_replacement(np.array([[0.0, 0.0, 0.9], [0.5, 0.5, 0.99]]), 5).tolist()
    [[0, 3, 4], [1, 2, 4]]
    """
    number = uniforms.shape[-1]
    last = np.asarray(size)[..., None] - number + np.arange(number)
    drawn = np.ascontiguousarray(np.moveaxis(uniforms * (last + 1), -1, 0)).astype(np.int64)
    if number > MAX_COMPARED:
        return _replace_duplicates(np.moveaxis(drawn, 0, -1), np.broadcast_to(last, uniforms.shape))
    for place in range(1, number):
        is_duplicate = (drawn[:place] == drawn[place]).any(0)
        np.copyto(drawn[place], last[..., place], where=is_duplicate)
    return np.moveaxis(drawn, 0, -1)


MAX_COMPARED = 512
"""The largest sample in which comparing all pairs is faster than looking up integers in a set."""


def _replace_duplicates(drawn: NDArray[np.int64], last: NDArray[np.int64]) -> NDArray[np.int64]:
    """Replace duplicates in each sample, one sample after another."""
    result = np.empty_like(drawn)
    for place in np.ndindex(drawn.shape[:-1]):
        seen: dict[int, None] = {}
        for number, replacement in zip(drawn[place].tolist(), last[place].tolist(), strict=True):
            seen[replacement if number in seen else number] = None
        result[place] = list(seen)
    return result


def all_finite(*tensors: Tensor) -> bool:
    """Whether all elements of the tensors are finite.

    >>> all_finite(torch.tensor([1.0, float("inf")]))
    False
    """
    return bool(torch.stack([torch.isfinite(x).all() for x in tensors]).all())


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks, which may observe or change what it computes.

    >>> layer = nn.Linear(1, 1)
    >>> handle = layer.register_forward_hook(lambda module, x, y: 2 * y)
    >>> has_hooks(layer), has_hooks(nn.Linear(1, 1))
    (True, False)
    """
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, kind) for kind in kinds)
