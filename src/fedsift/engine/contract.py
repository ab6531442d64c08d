"""What an engine receives and returns."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from fedsift.algorithms.method import Memory, Phase
from fedsift.codec.update import Update
from fedsift.task import Weights
from fedsift.vector import State


@dataclass(frozen=True)
class Job:
    """The local training of one round: the method's phase, the start and the cohort.

    ``weights`` decides the clients' weights in the mean.
    """

    round: int
    phase: Phase
    state: State
    cohort: tuple[int, ...]
    memory: Mapping[int, Memory]
    weights: Weights


@dataclass(frozen=True)
class ClientResult:
    """A client's update, its new memory, and its mean loss over the local steps.

    ``size`` is the size in bytes of the encoded update, if the engine knows it.
    """

    client: int
    update: Update
    memory: Memory
    loss: float
    size: int | None = None


@dataclass(frozen=True)
class Results:
    """The results of several clients that trained together, with their tensors stacked."""

    clients: tuple[int, ...]
    update: Update
    memory: Memory
    losses: tuple[float, ...]
    sizes: tuple[int, ...]

    def __iter__(self) -> Iterator[ClientResult]:
        columns = zip(self.clients, self.losses, self.sizes, strict=True)
        for row, (client, loss, size) in enumerate(columns):
            memory = {key: x[row : row + 1] for key, x in self.memory.items()}
            yield ClientResult(client, self.update.client(row), memory, loss, size)

    def without(self, absent: Collection[int]) -> Results:
        """Return the results without those of the given clients."""
        rows = [row for row, client in enumerate(self.clients) if client not in absent]
        if len(rows) == len(self.clients):
            return self
        return Results(
            tuple(self.clients[row] for row in rows),
            self.update.rows(rows),
            {key: x[rows] for key, x in self.memory.items()},
            tuple(self.losses[row] for row in rows),
            tuple(self.sizes[row] for row in rows),
        )


@dataclass(frozen=True)
class Received:
    """A frame from a remote client, not yet checked.

    The client keeps its own memory, identified by the ``receipt`` of this upload.
    """

    client: int
    frame: bytes
    receipt: bytes
    loss: float


@dataclass(frozen=True)
class Missing:
    """A client that sent nothing, and the reason."""

    client: int
    reason: str


class Engine(Protocol):
    """Trains a cohort and evaluates a model.

    Single results are in the cohort's order, regardless of where the clients were trained.
    """

    def train(self, job: Job) -> Iterator[ClientResult | Results | Received | Missing]:
        """Yield the results of the cohort, one by one or several at once."""
        ...

    def evaluate(self, w: Tensor) -> tuple[float | None, float | None]:
        """Return accuracy and mean loss of weights w on the test set; None where undefined."""
        ...
