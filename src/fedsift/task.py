"""What is trained, apart from how: a model, a loss, and the clients' data."""

from __future__ import annotations

import copy
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
    """The data of so many clients, most of it on their own machines.

    >>> len(RemoteClients(3, {}))
    3
    """

    def __init__(self, number: int, here: Mapping[int, Data]) -> None:
        self.number, self.here = number, here

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, client: int) -> Data:  # type: ignore[override]
        """The data of a client that is here."""
        return self.here[client]


@dataclass(frozen=True)
class Task:
    """A model, a loss and the clients' data: what is trained, apart from how."""

    model: nn.Module
    loss: Loss
    clients: Sequence[Data]
    test: Data | None
    batch_size: int | None
    seed: int
    layout: Layout

    def weight(self, client: int) -> int:
        """The client's mini-batch size |D̃ₙ|, its weight in the mean."""
        size = len(self.clients[client][0])
        return size if self.batch_size is None else min(self.batch_size, size)

    def batches(self, round: int, client: int, steps: int) -> NDArray[np.int64] | None:
        """Rows of the local set for each step, drawn afresh; None: the whole set every step."""
        size, batch = len(self.clients[client][0]), self.weight(client)
        if batch == size:
            return None
        return distinct(self.chances(round, client, steps), size)

    def chances(self, round: int, client: int, steps: int) -> NDArray[np.float64]:
        """The random numbers ``(steps, batch)`` in [0, 1) that choose the client's batches."""
        draw = stream(self.seed, "batches", round, client)
        return draw.random((steps, self.weight(client)))


def distinct(chances: NDArray[np.float64], size: int | NDArray[np.int64]) -> NDArray[np.int64]:
    """Different numbers below ``size`` along the last axis, every set of them equally likely.

    Floyd's method: the i-th of n is drawn from the first size - n + i + 1; if it is taken already,
    the last of these is not. ``size`` may be an array, for many draws at once.

    >>> distinct(np.array([[0.0, 0.0, 0.9], [0.5, 0.5, 0.99]]), 5).tolist()
    [[0, 3, 4], [1, 2, 4]]
    """
    last = np.asarray(size)[..., None] - chances.shape[-1] + np.arange(chances.shape[-1])
    drawn = np.ascontiguousarray(np.moveaxis(chances * (last + 1), -1, 0)).astype(np.int64)
    if len(drawn) > MANY:
        return _distinct_one_by_one(np.moveaxis(drawn, 0, -1), np.broadcast_to(last, chances.shape))
    for place in range(1, len(drawn)):
        taken = (drawn[:place] == drawn[place]).any(0)
        np.copyto(drawn[place], last[..., place], where=taken)
    return np.moveaxis(drawn, 0, -1)


MANY = 512
"""Numbers from which on looking each up in a set beats comparing it with all before it."""


def _distinct_one_by_one(drawn: NDArray[np.int64], last: NDArray[np.int64]) -> NDArray[np.int64]:
    """The same, each set of numbers by itself."""
    found = np.empty_like(drawn)
    for place in np.ndindex(drawn.shape[:-1]):
        seen: dict[int, None] = {}
        for number, otherwise in zip(drawn[place].tolist(), last[place].tolist(), strict=True):
            seen[otherwise if number in seen else number] = None
        found[place] = list(seen)
    return found


def finite(*tensors: Tensor) -> bool:
    """Whether every number is finite.

    >>> finite(torch.tensor([1.0, float("inf")]))
    False
    """
    return bool(torch.stack([torch.isfinite(x).all() for x in tensors]).all())


def check_model(model: nn.Module, sample: Tensor | None = None) -> None:
    """Refuse a model that cannot be trained by averaging; with a sample, by trying it.

    >>> check_model(nn.Sequential(nn.BatchNorm1d(2)))
    Traceback (most recent call last):
    ...
    ValueError: layer '0' keeps running statistics, which do not average over clients: ...
    """
    for name, module in model.named_modules():
        if getattr(module, "track_running_stats", False):
            raise ValueError(
                f"layer {name!r} keeps running statistics, which do not average over clients: "
                "use GroupNorm, or track_running_stats=False"
            )
    if sample is None or not any(True for _ in model.buffers()):
        return
    tried = copy.deepcopy(model).train()
    with torch.random.fork_rng(), torch.no_grad():
        tried(sample)
    before = dict(model.named_buffers())
    for name, buffer in tried.named_buffers():
        if not torch.equal(buffer, before[name]):
            raise ValueError(
                f"training changes {name!r}, which is no parameter: it would stay on the client "
                "and not average"
            )


def has_hooks(module: nn.Module) -> bool:
    """Whether somebody wants to be told of what a module does, or to change it.

    >>> layer = nn.Linear(1, 1)
    >>> handle = layer.register_forward_hook(lambda module, x, y: 2 * y)
    >>> has_hooks(layer), has_hooks(nn.Linear(1, 1))
    (True, False)
    """
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, kind) for kind in kinds)
