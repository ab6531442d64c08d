"""What a method's local step knows besides the state and the gradient."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

from torch import Tensor

from fedsift.vector import State

if TYPE_CHECKING:
    from fedsift.algorithms.method import Memory


class StepContext:
    """What a local step knows besides the state and the gradient.

    All that a client knows of the server is the state that was broadcast: anything else would be
    traffic that is not counted. ``start`` is the state ``(clients, d)`` at the start of the round,
    ``memory`` the client's own memory, ``seed`` the seed of the run. ``round`` and ``step`` count
    from 1. They are tensors without axes, because one CUDA graph serves all rounds and steps.

    Each tensor is created when a step first reads it, so steps that need none cost nothing.
    """

    def __init__(
        self,
        seed: int,
        number: Callable[[int], Tensor],
        round: int,
        start: Callable[[], State],
        memory: Callable[[], Memory],
    ) -> None:
        self.seed = seed
        self._number, self._round, self._steps = number, round, 0
        self._start, self._memory = start, memory

    @cached_property
    def start(self) -> State:
        """The state at the start of the round."""
        return self._start()

    @cached_property
    def memory(self) -> Memory:
        """The client's memory."""
        return self._memory()

    @cached_property
    def round(self) -> Tensor:
        """The number of the round."""
        return self._number(self._round)

    @cached_property
    def step(self) -> Tensor:
        """The number of the step."""
        return self._number(self._steps)

    def advance(self) -> None:
        """Begin the next step."""
        self._steps += 1
        if "step" in self.__dict__:
            self.step.add_(1)

    def restart(self, round: int) -> None:
        """Return to the time before the first step of a round."""
        self._round, self._steps = round, 0
        for name, number in (("round", round), ("step", 0)):
            if self.was_read(name):
                getattr(self, name).fill_(number)

    def forget(self) -> None:
        """Create all tensors again when they are read next."""
        for name in ("start", "memory", "round", "step"):
            self.__dict__.pop(name, None)

    def was_read(self, name: str) -> bool:
        """Whether a step has read an attribute."""
        return name in self.__dict__
