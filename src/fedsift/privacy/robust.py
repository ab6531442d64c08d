"""Robust aggregation: a mean that a minority of hostile clients cannot move far.

Yin, D., Chen, Y., Kannan, R., Bartlett, P.: Byzantine-Robust Distributed Learning: Towards Optimal
Statistical Rates. ICML 2018. For each coordinate, the median of the clients' values, or the mean of
those that are left after the smallest and the largest are removed. All clients count the same,
because a hostile one would claim the largest weight.

This needs values of every client for every coordinate: clients must send all coordinates, or the
same ones. With masks of their own, a coordinate may have a single sender, who would decide alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor, nn

from fedsift.algorithms.example_message import example_message, small_context
from fedsift.algorithms.method import Algorithm
from fedsift.codec.threads import Threads
from fedsift.codec.update import Parts, Role, Update, vector_for
from fedsift.errors import ConfigError, require_choice
from fedsift.vector import Layout, State

Aggregation = Literal["mean", "median", "trimmed"]
AGGREGATIONS: tuple[Aggregation, ...] = ("mean", "median", "trimmed")
TRIMMED_SHARE = 0.2
"""The share of values that a trimmed mean removes at each end, rounded up to whole clients."""
BLOCK_VALUES = 1 << 22
"""Values that are sorted at a time."""
PROBED_ROUNDS = tuple(2**n for n in range(16))
"""Rounds in which it is tried whether clients send the same coordinates."""


def num_trimmed(aggregation: Aggregation, clients: int) -> int:
    """Return how many values are removed at each end; at least one or two are left.

    >>> [num_trimmed("trimmed", n) for n in (1, 2, 3, 10, 20)]
    [0, 0, 1, 2, 4]
    >>> num_trimmed("median", 4), num_trimmed("median", 5)
    (1, 2)
    """
    most = (clients - 1) // 2
    return most if aggregation == "median" else min(most, math.ceil(TRIMMED_SHARE * clients))


def trimmed_mean(x: Tensor, trimmed: int) -> Tensor:
    """Return the mean over the rows of x, without the lowest and highest of each column.

    >>> trimmed_mean(torch.tensor([[1.0, 9.0], [2.0, -5.0], [300.0, 4.0]]), 1).tolist()
    [2.0, 4.0]
    """
    return x.sort(dim=0).values[trimmed : len(x) - trimmed].mean(0)


class RobustSum:
    """The updates of a round, and their median or trimmed mean.

    It stands in for a :class:`fedsift.codec.update.WeightedSum`, but has to hold all updates of
    a round until its end: as many values as the clients send, 4 bytes each in float32.

    >>> from fedsift.codec.update import dense
    >>> total = RobustSum(State.start(torch.zeros(2)), "median")
    >>> w = torch.tensor([[1.0, 2.0], [3.0, 2.5], [9e9, -9e9]])
    >>> total.add(Update(dense({"w": w}), (1.0, 1.0, 1.0)))
    >>> total.mean().w.tolist()
    [3.0, 2.0]
    """

    def __init__(self, like: State, aggregation: Aggregation) -> None:
        self.total, self.aggregation = like.map(torch.zeros_like), aggregation
        self.clients = 0
        self.indices: dict[tuple[int, Role], Tensor | None] = {}
        self.values: dict[tuple[int, Role], list[Tensor]] = {}

    def add(self, update: Update, threads: Threads | None = None) -> None:
        """Add the clients' updates, which must be of the same coordinates."""
        self.clients += len(update.weights)
        for number, part in enumerate(update.parts):
            for role, coded in part.values.items():
                key, rows = (number, role), part.indices
                first = self.indices.setdefault(key, None if rows is None else rows[0].clone())
                if not are_same(rows, first):
                    raise ConfigError(refusal(self.aggregation))
                self.values.setdefault(key, []).append(coded.restore())

    def mean(self) -> State:
        """Return the median or the trimmed mean; zero where nobody sent anything."""
        for (number, role), rows in self.values.items():
            if sum(map(len, rows)) != self.clients:
                raise ConfigError(refusal(self.aggregation))
            indices = self.indices[number, role]
            target = vector_for(role, self.total)
            for start, values in self._blocks(rows):
                end = start + len(values)
                place = slice(start, end) if indices is None else indices[start:end]
                target[place] += values
        return self.total

    def _blocks(self, rows: list[Tensor]) -> Iterator[tuple[int, Tensor]]:
        step = max(1, BLOCK_VALUES // self.clients)
        trimmed = num_trimmed(self.aggregation, self.clients)
        for start in range(0, rows[0].shape[-1], step):
            block = torch.cat([x[:, start : start + step] for x in rows])
            yield start, trimmed_mean(block, trimmed)


def are_same(rows: Tensor | None, first: Tensor | None) -> bool:
    """Whether all rows of coordinates are the same as the first; None stands for all coordinates.

    >>> are_same(torch.tensor([[0, 2], [0, 2]]), torch.tensor([0, 2])), are_same(None, None)
    (True, True)
    >>> are_same(torch.tensor([[0, 2], [1, 2]]), torch.tensor([0, 2]))
    False
    """
    if rows is None or first is None:
        return rows is None and first is None
    return rows.shape[-1] == len(first) and bool((rows == first).all())


def refusal(aggregation: str, name: str = "this method") -> str:
    """Return the error for clients that send different coordinates."""
    return (
        f"aggregation={aggregation!r} needs clients that send the same coordinates, but those of "
        f"{name} choose their own: use aggregation='mean', or a method that sends all coordinates"
    )


def check_aggregation(aggregation: str, algorithm: Algorithm) -> None:
    """Refuse an unknown aggregation, and a method that it does not fit.

    It is tried on a small model whether two clients with random updates send the same coordinates.

    >>> from fedsift.algorithms import fedadam_ssm
    >>> check_aggregation("median", fedadam_ssm())
    Traceback (most recent call last):
    ...
    fedsift.errors.ConfigError: aggregation='median' needs clients that send the same coordinates...
    """
    require_choice("aggregation", aggregation, AGGREGATIONS)
    if aggregation == "mean":
        return
    for round in PROBED_ROUNDS:
        try:
            sent = [parts_of_random_update(algorithm, round, client) for client in (0, 1)]
        except Exception:  # a user's method may need more; each round is checked, too
            return
        ours, theirs = ([part.indices for part in parts] for parts in sent)
        firsts = [None if rows is None else rows[0] for rows in theirs]
        if len(ours) != len(firsts) or not all(map(are_same, ours, firsts)):
            raise ConfigError(refusal(aggregation, algorithm.name))


def parts_of_random_update(algorithm: Algorithm, round: int, client: int) -> Parts:
    """Return what the server merges of a client's random update of a small model."""
    context = small_context(algorithm, Layout.of(nn.Linear(31, 32)), round, client)
    parts = example_message(algorithm, context, seed=client)
    return algorithm.phase(round).receive(context, context.state, parts)
