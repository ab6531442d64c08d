"""Accuracy against uplink: the measured curve, and a power law that extrapolates it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

MIN_POWER = 1e-3
"""A smaller power means that the error does not fall measurably, so there is no forecast."""
MAX_LOG = 700.0
"""The logarithm of the largest number that is computed; ``exp`` overflows soon after."""
MAX_MIBIT = 1e9
"""The largest uplink per client, in Mibit, that is turned into a number of rounds."""
MAX_FACTOR = 100
"""There is no forecast beyond this multiple of the uplink that was measured."""


@dataclass(frozen=True)
class Point:
    """A run after one round: uplink so far in Mibit, loss and accuracy on held-out data."""

    mibit: float
    loss: float
    accuracy: float


Curve = list[Point]


@dataclass(frozen=True)
class Forecast:
    """The error on held-out data as a power of the uplink: error = c · Mibit^(−p)."""

    log_c: float
    power: float

    @classmethod
    def fit(cls, curve: Curve) -> Forecast | None:
        """Fit the last two thirds of a curve by least squares; None if the error hardly falls.

        >>> curve = [Point(x, 1.0, 1 - 0.4 * x**-0.5) for x in (1.0, 2.0, 3.0, 4.0)]
        >>> round(Forecast.fit(curve).power, 6)
        0.5
        """
        points = [p for p in curve[len(curve) // 3 :] if p.accuracy < 1]
        if len(points) < 2:
            return None
        x, y = np.log([p.mibit for p in points]), np.log([1 - p.accuracy for p in points])
        slope, level = np.polyfit(x, y, 1)
        return cls(float(level), float(-slope)) if slope < -MIN_POWER else None

    def accuracy(self, mibit: float) -> float:
        """Return the accuracy after this many Mibit.

        >>> Forecast(0.0, 1.0).accuracy(10.0)
        0.9
        """
        return 1 - math.exp(self.log_c - self.power * math.log(mibit))

    def mibit(self, accuracy: float) -> float:
        """Return the Mibit to an accuracy below 1; infinity if the number overflows.

        >>> round(Forecast(0.0, 1.0).mibit(0.9), 6)
        10.0
        """
        log_mibit = (self.log_c - math.log(1 - accuracy)) / self.power
        return math.exp(log_mibit) if log_mibit < MAX_LOG else math.inf

    def mibit_until_flat(self, gain: float) -> float:
        """Return the Mibit beyond which doubling the uplink adds less than ``gain`` of accuracy.

        >>> round(Forecast(0.0, 1.0).mibit_until_flat(0.01), 6)  # from 98 to 99 %
        50.0
        """
        error = gain / -math.expm1(-self.power * math.log(2))
        return self.mibit(1 - error)


def best_accuracy(curve: Curve) -> float:
    """Return the highest accuracy of a curve."""
    return max(point.accuracy for point in curve)


def interpolated_mibit(curve: Curve, accuracy: float) -> float:
    """Return the Mibit at which a curve first reaches an accuracy, interpolated between rounds.

    The result is infinity if the curve does not reach it.

    >>> curve = [Point(1.0, 2.0, 0.25), Point(2.0, 1.0, 0.75)]
    >>> interpolated_mibit(curve, 0.5), interpolated_mibit(curve, 0.9)
    (1.5, inf)
    """
    before = None
    for point in curve:
        if point.accuracy >= accuracy:
            if before is None:
                return point.mibit
            share = (accuracy - before.accuracy) / (point.accuracy - before.accuracy)
            return before.mibit + share * (point.mibit - before.mibit)
        before = point
    return math.inf


def predicted_mibit(curve: Curve, accuracy: float) -> float | None:
    """Return the Mibit to an accuracy: measured if the curve reaches it, otherwise forecast.

    The result is None if there is no forecast or the accuracy is out of reach.

    >>> predicted_mibit([Point(1.0, 1.0, 0.5), Point(2.0, 0.5, 0.8)], 0.7)
    2.0
    """
    for point in curve:
        if point.accuracy >= accuracy:
            return point.mibit
    forecast = Forecast.fit(curve)
    if forecast is None or accuracy >= 1:
        return None
    mibit = forecast.mibit(accuracy)
    return mibit if mibit < MAX_FACTOR * curve[-1].mibit else None
