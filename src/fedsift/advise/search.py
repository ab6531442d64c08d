"""Advice on L, the learning rate and the density: a race to one accuracy, measured in bits.

The bounds cannot choose: on every task here they exceed what is trivially true by many orders of
magnitude (docs/explanation/theory.md). So the advice is measured. The paper's defaults train on
four fifths of the training data, to the target or for a few rounds; the accuracy that they reach on
the other fifth is the line to cross. Then one setting at a time moves along a ladder for as long as
that crosses the line with fewer bits. The test set is never looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fedsift.algorithms.fedadam_ssm import shared_mask_bits
from fedsift.runs.compare import MIBIT


@dataclass(frozen=True, order=True)
class Choice:
    """What is advised on; the defaults are the paper's."""

    local_steps: int = 30
    lr: float = 1e-3
    density: float = 0.05

    def __str__(self) -> str:
        """For the eye.

        >>> print(Choice())
        L = 30, lr 0.001, density 0.05
        """
        return f"L = {self.local_steps}, lr {self.lr:g}, density {self.density:g}"

    def mibit(self, d: int) -> float:
        """Uplink of a client and round in Mibit, by the paper's formula.

        >>> round(Choice().mibit(21_840), 3)
        0.115
        """
        return shared_mask_bits(self.density, d) / MIBIT


LADDERS: Mapping[str, tuple[float, ...]] = {
    "lr": (3e-4, 1e-3, 3e-3, 1e-2),
    "density": (0.05, 0.01, 0.002),
    "local_steps": (30, 10, 90),
}
"""The rungs of each setting."""


@dataclass(frozen=True)
class Point:
    """Where a run stands after a round: uplink so far, and loss and accuracy on held-out data."""

    mibit: float
    loss: float
    accuracy: float


Curve = list[Point]
Run = Callable[[Choice, Callable[[Curve], bool]], Curve]
"""Trains with a choice until told to stop; gives the curve so far."""


@dataclass(frozen=True)
class Tried:
    """A choice and what it needed to cross the line; infinite if it was overtaken first."""

    choice: Choice
    mibit: float
    rounds: int

    @property
    def finite(self) -> float | None:
        """The Mibit it needed, None if it was overtaken."""
        return None if self.mibit == math.inf else self.mibit


@dataclass
class Race:
    """Choices that run for the same accuracy ``line``, each for as long as it can still win.

    ``duels`` keeps what was varied, the best choice until then, and the one that challenged it.
    """

    run: Run
    line: float
    max_rounds: int
    tried: dict[Choice, Tried] = field(default_factory=dict)
    duels: list[tuple[str, Choice, Choice]] = field(default_factory=list)

    def enter(self, choice: Choice, limit: float = math.inf) -> float:
        """Mibit to the line; infinity once more than ``limit`` was spent."""
        if choice not in self.tried:
            curve = self.run(choice, lambda so_far: self._over(so_far, limit))
            self.tried[choice] = Tried(choice, crossing(curve, self.line), len(curve))
        return self.tried[choice].mibit

    def _over(self, curve: Curve, limit: float) -> bool:
        crossed = any(point.accuracy >= self.line for point in curve)
        return crossed or curve[-1].mibit > limit or len(curve) >= self.max_rounds


def crossing(curve: Curve, line: float) -> float:
    """The Mibit at which a curve first reaches an accuracy, between rounds by interpolation.

    >>> curve = [Point(1.0, 2.0, 0.25), Point(2.0, 1.0, 0.75)]
    >>> crossing(curve, 0.5), crossing(curve, 0.9)
    (1.5, inf)
    """
    before = None
    for point in curve:
        if point.accuracy >= line:
            if before is None:
                return point.mibit
            share = (line - before.accuracy) / (point.accuracy - before.accuracy)
            return before.mibit + share * (point.mibit - before.mibit)
        before = point
    return math.inf


def climb(race: Race, start: Choice, allowed: Callable[[Choice], bool]) -> Choice:
    """Move one setting at a time along its ladder, for as long as the line is crossed earlier.

    The learning rate goes first and, as it depends on the others, once more at the end.

    >>> def run(choice, stop):  # ten times the learning rate, a tenth of the bits
    ...     return [Point(1e-3 / choice.lr * choice.density, 0.1, 0.9)]
    >>> climb(Race(run, line=0.9, max_rounds=9), Choice(), lambda choice: choice.density >= 0.01)
    Choice(local_steps=30, lr=0.01, density=0.01)
    """
    best = start
    for name in ("lr", "density", "local_steps", "lr"):
        for direction in (1, -1):
            moved = _walk(race, best, name, direction, allowed)
            if moved != best:
                best = moved
                break
    return best


def _walk(
    race: Race, best: Choice, name: str, direction: int, allowed: Callable[[Choice], bool]
) -> Choice:
    ladder = sorted(LADDERS[name])
    rung = min(range(len(ladder)), key=lambda i: abs(ladder[i] - getattr(best, name)))
    if name == "density":
        direction = -direction  # fewer coordinates first
    while 0 <= rung + direction < len(ladder):
        rung += direction
        change: dict[str, Any] = {name: ladder[rung]}
        other = replace(best, **change)
        limit = race.enter(best)
        if not allowed(other):
            break
        race.duels.append((name, best, other))
        if race.enter(other, limit) >= limit:
            break
        best = other
    return best


FLAT = 1e-3
"""A power of the bits below which an error stands still, as far as anybody can tell."""
LARGEST = 700.0
"""Of which exp is still a number."""


@dataclass(frozen=True)
class Forecast:
    """Error on held-out data as a power of the bits spent: error = c · Mibit^(−p)."""

    log_c: float
    power: float

    @classmethod
    def of(cls, curve: Curve) -> Forecast | None:
        """Least squares on the last two thirds of a curve; None if it hardly falls.

        >>> curve = [Point(x, 1.0, 1 - 0.4 * x**-0.5) for x in (1.0, 2.0, 3.0, 4.0)]
        >>> round(Forecast.of(curve).power, 6)
        0.5
        """
        points = [p for p in curve[len(curve) // 3 :] if p.accuracy < 1]
        if len(points) < 2:
            return None
        x, y = np.log([p.mibit for p in points]), np.log([1 - p.accuracy for p in points])
        slope, level = np.polyfit(x, y, 1)
        return cls(float(level), float(-slope)) if slope < -FLAT else None

    def accuracy(self, mibit: float) -> float:
        """Accuracy after so many Mibit.

        >>> Forecast(0.0, 1.0).accuracy(10.0)
        0.9
        """
        return 1 - math.exp(self.log_c - self.power * math.log(mibit))

    def mibit(self, accuracy: float) -> float:
        """Mibit to an accuracy below 1; infinite if there is no number for it.

        >>> round(Forecast(0.0, 1.0).mibit(0.9), 6)
        10.0
        """
        log_mibit = (self.log_c - math.log(1 - accuracy)) / self.power
        return math.exp(log_mibit) if log_mibit < LARGEST else math.inf
