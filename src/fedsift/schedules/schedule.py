"""The schedules, and how they are described in text."""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, ClassVar, Self

if TYPE_CHECKING:
    _Number = Any  # type checkers accept a schedule wherever a method declares a number
else:
    _Number = object


class Schedule(ABC, _Number):  # type: ignore[misc]
    """A function of the round, counted from 1. Its repr is what :func:`parse_schedule` reads."""

    OPTIONAL: ClassVar[tuple[str, ...]] = ()
    """The arguments that may be None."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None or name not in self.OPTIONAL:
                checked = ARGUMENTS[name](f"{name} of {type(self).__name__}", value)
                object.__setattr__(self, name, checked)

    @abstractmethod
    def __call__(self, round: int) -> float:
        """Return the value in a round."""

    def over(self, rounds: int) -> Self:
        """Return the schedule for a run with this many rounds, where it depends on them."""
        return self


@dataclass(frozen=True)
class constant(Schedule):  # noqa: N801
    """The same value in every round; useful as a part of :class:`join`.

    >>> constant(0.1)(7)
    0.1
    """

    value: float

    def __call__(self, round: int) -> float:
        """Return the value in a round."""
        return self.value


@dataclass(frozen=True)
class Decay(Schedule):
    """A schedule that goes from ``start`` to ``end`` over a number of rounds, then stays there.

    Without ``rounds``, it goes over all rounds of the run.
    """

    OPTIONAL = ("rounds",)

    start: float
    end: float = 0.0
    rounds: int | None = None

    def over(self, rounds: int) -> Self:
        """Return the schedule for a run with this many rounds, unless it has its own number."""
        return self if self.rounds else replace(self, rounds=rounds)

    def progress(self, round: int) -> float:
        """Return the share of the schedule that lies before a round: 0 in round 1, at most 1."""
        if round <= 1:
            return 0.0
        if self.rounds is None:
            raise ValueError(f"{self} needs its number of rounds: pass rounds=")
        return min((round - 1) / self.rounds, 1.0)


@dataclass(frozen=True)
class cosine(Decay):  # noqa: N801
    """Decay along half a period of a cosine.

    The value in round r is end + (start − end) (1 + cos(π t)) / 2 with t = (r − 1) / rounds, as in
    ``torch.optim.lr_scheduler.CosineAnnealingLR``: round 1 has ``start``, and all rounds after
    ``rounds`` have ``end``. Without ``rounds``, it decays over all rounds of the run.

    >>> [round(cosine(1.0, rounds=4)(r), 2) for r in (1, 2, 3, 4, 5)]
    [1.0, 0.85, 0.5, 0.15, 0.0]
    """

    def __call__(self, round: int) -> float:
        """Return the value in a round."""
        share = (1 + math.cos(math.pi * self.progress(round))) / 2
        return self.end + (self.start - self.end) * share


@dataclass(frozen=True)
class linear(Decay):  # noqa: N801
    """Go from ``start`` to ``end`` in equal steps.

    The value in round r is start + (end − start) (r − 1) / rounds. Without ``rounds``, it goes over
    all rounds of the run.

    >>> [linear(30, 10, rounds=4)(r) for r in (1, 2, 3, 4, 5, 6)]
    [30.0, 25.0, 20.0, 15.0, 10.0, 10.0]
    """

    def __call__(self, round: int) -> float:
        """Return the value in a round."""
        return self.start + (self.end - self.start) * self.progress(round)


@dataclass(frozen=True)
class linear_warmup(Schedule):  # noqa: N801
    """Rise to ``end`` in equal steps: round r has end · r / rounds, and later rounds have ``end``.

    >>> [linear_warmup(0.5, rounds=4)(r) for r in (1, 2, 3, 4, 5)]
    [0.125, 0.25, 0.375, 0.5, 0.5]
    """

    end: float
    rounds: int

    def __call__(self, round: int) -> float:
        """Return the value in a round."""
        return self.end * min(round / self.rounds, 1.0)


@dataclass(frozen=True)
class step(Schedule):  # noqa: N801
    """Multiply by ``factor`` after each of the rounds ``at``, as PyTorch's ``MultiStepLR``.

    >>> [step(0.1, at=(2, 4), factor=0.5)(r) for r in (1, 2, 3, 4, 5)]
    [0.1, 0.1, 0.05, 0.05, 0.025]
    """

    start: float
    at: int | tuple[int, ...]
    factor: float = 0.1

    def __call__(self, round: int) -> float:
        """Return the value in a round."""
        return float(self.start * self.factor ** sum(round > last for last in rounds_in(self.at)))


@dataclass(frozen=True, init=False, repr=False)
class join(Schedule):  # noqa: N801
    """One schedule after another: the next begins, with its own round 1, after each round ``at``.

    Without its own ``rounds``, a part goes over the rounds that it has in the join.

    >>> rising = join(linear_warmup(1.0, rounds=2), cosine(1.0, rounds=4), at=2)
    >>> [round(rising(r), 2) for r in (1, 2, 3, 4, 5, 6, 7)]
    [0.5, 1.0, 1.0, 0.85, 0.5, 0.15, 0.0]
    """

    schedules: tuple[Schedule, ...]
    at: int | tuple[int, ...]

    def __init__(self, *schedules: Schedule, at: int | tuple[int, ...]) -> None:
        object.__setattr__(self, "schedules", schedules)
        object.__setattr__(self, "at", at)
        self.__post_init__()
        if len(schedules) != len(self.ends) + 1:
            raise ValueError(
                f"join needs one schedule more than rounds in at, got {len(schedules)} schedules "
                f"and at={self.at!r}"
            )
        parts = zip(schedules, (0, *self.ends), self.ends, strict=False)
        bound = (part.over(end - begin) for part, begin, end in parts)
        object.__setattr__(self, "schedules", (*bound, schedules[-1]))

    @property
    def ends(self) -> tuple[int, ...]:
        """The last round of each schedule but the last one."""
        return rounds_in(self.at)

    def __call__(self, round: int) -> float:
        """Return the value in a round."""
        place = sum(round > end for end in self.ends)
        return self.schedules[place](round - (0, *self.ends)[place])

    def over(self, rounds: int) -> Self:
        """Return the schedule for a run with this many rounds."""
        *others, last = self.schedules
        return type(self)(*others, last.over(max(1, rounds - self.ends[-1])), at=self.at)

    def __repr__(self) -> str:
        return f"join({', '.join(map(repr, self.schedules))}, at={self.at!r})"


SCHEDULES: Mapping[str, Callable[..., Schedule]] = {
    each.__name__: each for each in (constant, cosine, linear, linear_warmup, step, join)
}
"""The schedules by name."""


def describe(schedule: Callable[[int], float]) -> str:
    """Return a schedule as text: a call such as ``cosine(...)``, or a function's module and name.

    >>> describe(constant(2)), describe(math.sqrt)
    ('constant(value=2.0)', 'math:sqrt')
    """
    if isinstance(schedule, Schedule):
        return repr(schedule)
    named = schedule if hasattr(schedule, "__qualname__") else type(schedule)
    return f"{named.__module__}:{named.__qualname__}"


def rounds_in(at: int | tuple[int, ...]) -> tuple[int, ...]:
    """Return rounds as a tuple, even if there is only one.

    >>> rounds_in(5)
    (5,)
    """
    return at if isinstance(at, tuple) else (at,)


def _number(name: str, x: Any) -> float:
    limit: Any = sys.float_info.max
    if not isinstance(x, Real) or isinstance(x, bool) or not -limit <= x <= limit:
        raise ValueError(f"{name} must be a finite number, got {x!r}")
    return float(x)


def _whole(name: str, x: Any) -> int:
    if not isinstance(x, Integral) or isinstance(x, bool) or x < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {x!r}")
    return int(x)


def _ascending(name: str, x: Any) -> int | tuple[int, ...]:
    if not isinstance(x, tuple | list):
        return _whole(name, x)
    rounds = tuple(_whole(name, each) for each in x)
    if not rounds or list(rounds) != sorted(set(rounds)):
        raise ValueError(f"{name} must be rounds in ascending order, got {x!r}")
    return rounds


def _schedules(name: str, x: tuple[Any, ...]) -> tuple[Schedule, ...]:
    for each in x:
        if not isinstance(each, Schedule):
            raise ValueError(
                f"join takes schedules, such as constant(0.1) and cosine(0.1), got {each!r}"
            )
    return x


ARGUMENTS: Mapping[str, Callable[[str, Any], Any]] = {
    "value": _number,
    "start": _number,
    "end": _number,
    "factor": _number,
    "rounds": _whole,
    "at": _ascending,
    "schedules": _schedules,
}
"""The check of each argument of a schedule, by its name."""
