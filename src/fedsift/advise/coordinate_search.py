"""A coordinate search for the settings that reach one accuracy with the least uplink.

The bounds of the paper cannot choose the settings: on every task measured here they exceed the
trivial bound by many orders of magnitude (docs/explanation/theory.md). The search therefore trains.
It starts from the paper's defaults, changes one setting at a time to its next candidate value, and
keeps the change if the accuracy is reached with less uplink. A run stops as soon as it has sent
more than the best settings needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from fedsift.advise.forecast import Curve, interpolated_mibit
from fedsift.advise.hyperparameters import CANDIDATES, Hyperparameters

SIFT_DENSITY = 0.01
"""The density of sift that is tried: its default."""
Train = Callable[[Hyperparameters, Callable[[Curve], bool]], Curve]
"""Trains with the settings until the function of the curve is true; returns the curve so far."""


@dataclass(frozen=True)
class Measurement:
    """The uplink with which settings reached the accuracy; infinity if they did not."""

    settings: Hyperparameters
    mibit: float
    rounds: int

    @property
    def mibit_or_none(self) -> float | None:
        """The uplink, or None if the accuracy was not reached."""
        return None if self.mibit == math.inf else self.mibit


@dataclass(frozen=True)
class PairwiseComparison:
    """Two candidates that differ in one setting: the best so far and its challenger."""

    name: str
    best: Hyperparameters
    challenger: Hyperparameters


@dataclass
class CoordinateSearch:
    """The uplink that settings need to reach one ``accuracy``, and the search for the least."""

    train: Train
    accuracy: float
    max_rounds: int
    is_allowed: Callable[[Hyperparameters], bool] = lambda settings: True
    measured: dict[Hyperparameters, Measurement] = field(default_factory=dict)
    comparisons: list[PairwiseComparison] = field(default_factory=list)

    def measure(self, settings: Hyperparameters, limit: float = math.inf) -> float:
        """Return the Mibit to the accuracy; infinity if more than ``limit`` was sent before."""
        if settings not in self.measured:
            curve = self.train(settings, lambda so_far: self._is_decided(so_far, limit))
            mibit = interpolated_mibit(curve, self.accuracy)
            self.measured[settings] = Measurement(settings, mibit, len(curve))
        return self.measured[settings].mibit

    def _is_decided(self, curve: Curve, limit: float) -> bool:
        is_reached = any(point.accuracy >= self.accuracy for point in curve)
        return is_reached or curve[-1].mibit > limit or len(curve) >= self.max_rounds

    def run(self, start: Hyperparameters) -> Hyperparameters:
        """Return the best settings, found by moving one setting at a time.

        The learning rate is searched first and once more at the end, as it depends on the others.

        >>> from fedsift.advise.forecast import Point
        >>> def train(settings, stop):  # uplink proportional to density / learning rate
        ...     return [Point(1e-3 / settings.lr * settings.density, 0.1, 0.9)]
        >>> CoordinateSearch(train, 0.9, 9, lambda x: x.density >= 0.01).run(Hyperparameters())
        Hyperparameters(local_steps=30, lr=0.01, density=0.01, algorithm='fedadam-ssm')
        """
        best = start
        for name in ("lr", "density", "local_steps", "lr"):
            for direction in (1, -1):
                moved = self._move(best, name, direction)
                if moved != best:
                    best = moved
                    break
        return best

    def compare_methods(self, best: Hyperparameters) -> Hyperparameters:
        """Return the best settings, or sift with the same L and learning rate if it needs less.

        >>> from fedsift.advise.forecast import Point
        >>> def train(settings, stop):  # the uplink is the density
        ...     return [Point(settings.density, 0.1, 0.9)]
        >>> CoordinateSearch(train, 0.9, 9).compare_methods(Hyperparameters()).algorithm
        'sift'
        """
        challenger = replace(best, algorithm="sift", density=SIFT_DENSITY)
        limit = self.measure(best)
        if not self.is_allowed(challenger):
            return best
        self.comparisons.append(PairwiseComparison("algorithm", best, challenger))
        return challenger if self.measure(challenger, limit) < limit else best

    def _move(self, best: Hyperparameters, name: str, direction: int) -> Hyperparameters:
        """Change one setting in one direction for as long as that saves uplink."""
        values = sorted(CANDIDATES[name])
        at = min(range(len(values)), key=lambda i: abs(values[i] - getattr(best, name)))
        if name == "density":
            direction = -direction  # try fewer coordinates first
        while 0 <= at + direction < len(values):
            at += direction
            change: dict[str, Any] = {name: values[at]}
            challenger = replace(best, **change)
            limit = self.measure(best)
            if not self.is_allowed(challenger):
                break
            self.comparisons.append(PairwiseComparison(name, best, challenger))
            if self.measure(challenger, limit) >= limit:
                break
            best = challenger
        return best
