"""The recommendation that follows from a calibration: settings, rounds, reasons and next steps."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from fedsift.advise.coordinate_search import CoordinateSearch, Measurement
from fedsift.advise.forecast import MAX_MIBIT, Curve, Forecast, best_accuracy, predicted_mibit
from fedsift.advise.hyperparameters import CANDIDATES, Hyperparameters

TARGET_MARGIN = 2
"""Rounds recommended for a target, as a multiple of the rounds that the calibration predicts.

With other seeds, runs needed up to 1.9 times as many (reproduce/theory/advise_command.csv).
"""
MIN_GAIN = 0.01
"""Without a target: more rounds must add this much accuracy each time their number doubles."""
MAX_EXTRAPOLATION = 5
"""Never recommend more than this multiple of the rounds measured with the settings."""


@dataclass(frozen=True)
class Advice:
    """The recommended settings and rounds, what to expect of them, and why.

    ``predicted`` and ``predicted_default`` are the Mibit per client to the target, with the
    recommended settings and with the paper's defaults; None where there is no forecast.
    ``measured`` is true if the calibration itself reached the target. ``tried`` has the uplink
    measured for all settings that were compared.
    """

    choice: Hyperparameters
    rounds: int
    target: float
    predicted: float | None
    predicted_default: float | None
    measured: bool
    accuracy_at_budget: float | None
    reasons: tuple[str, ...]
    next: tuple[str, ...]
    tried: tuple[Measurement, ...]

    def json(self) -> dict[str, Any]:
        """Return all fields as plain values; an uplink that was not measured is None."""
        tried = [
            {**asdict(x.settings), "rounds": x.rounds, "mibit": x.mibit_or_none} for x in self.tried
        ]
        return {**asdict(self), "choice": asdict(self.choice), "tried": tried}


def recommended_rounds(
    curve: Curve, target: float | None, mibit_per_round: float, budget: float
) -> tuple[int, str]:
    """Return how many rounds the measured curve justifies, and the reason.

    With a target, this is the number of rounds that reach it, measured or forecast, times a margin.
    Without a target, or if it is out of reach, it is the number after which doubling the rounds
    adds less than :data:`MIN_GAIN`. It is at most :data:`MAX_EXTRAPOLATION` times the number of
    rounds measured, and within the budget.

    >>> from fedsift.advise.forecast import Point
    >>> curve = [Point(float(n), 1.0, 1 - 0.5 / n) for n in range(1, 7)]  # error 1/(2n)
    >>> recommended_rounds(curve, 0.9, 1.0, 100.0)
    (10, 'rounds 10: 2 times the 5 that reach 90.0 %, as measured')
    >>> recommended_rounds(curve, None, 1.0, 100.0)
    (25, 'rounds 25: by the forecast, doubling them would add less than 1 percentage point')
    >>> recommended_rounds(curve, None, 1.0, 12.5)
    (12, 'rounds 12: all that the budget allows')
    """
    if target is None:
        rounds, reason = _rounds_until_flat(curve, mibit_per_round)
    else:
        rounds, reason = _rounds_to_target(curve, target, mibit_per_round)
    limits = {
        MAX_EXTRAPOLATION * len(curve): (
            f"{MAX_EXTRAPOLATION} times the {len(curve)} measured; the forecast is not trusted "
            "beyond"
        ),
        max(1, int(budget / mibit_per_round)): "all that the budget allows",
    }
    for limit, why in limits.items():
        if rounds > limit:
            rounds, reason = limit, why
    return rounds, f"rounds {rounds}: {reason}"


def _rounds_to_target(curve: Curve, target: float, mibit_per_round: float) -> tuple[int, str]:
    mibit = predicted_mibit(curve, target)
    if mibit is None:
        return _rounds_until_flat(curve, mibit_per_round)
    needed, how = _whole_rounds(mibit, mibit_per_round), "as measured"
    if best_accuracy(curve) < target:
        needed, how = max(needed, len(curve) + 1), "by the forecast"
    reason = f"{TARGET_MARGIN} times the {needed} that reach {100 * target:.1f} %, {how}"
    return TARGET_MARGIN * needed, reason


def _rounds_until_flat(curve: Curve, mibit_per_round: float) -> tuple[int, str]:
    forecast = Forecast.fit(curve)
    if forecast is None:
        return len(curve), "the number measured; the accuracy no longer rises"
    rounds = _whole_rounds(forecast.mibit_until_flat(MIN_GAIN), mibit_per_round)
    gain = f"{100 * MIN_GAIN:g} percentage point"
    reason = f"by the forecast, doubling them would add less than {gain}"
    return max(rounds, len(curve)), reason


def _whole_rounds(mibit: float, mibit_per_round: float) -> int:
    """The rounds that send this many Mibit; rounding errors do not add a round."""
    return math.ceil(min(mibit, MAX_MIBIT) / mibit_per_round * (1 - 1e-9))


def search_reasons(search: CoordinateSearch) -> list[str]:
    """Return one line per comparison: the uplink that two values of a setting needed."""
    lines = [
        f"settings are compared by their uplink per client to {100 * search.accuracy:.1f} % on "
        "held-out data; a run is stopped once it has sent more than the best one"
    ]
    for comparison in search.comparisons:
        name = comparison.name
        pair = " against ".join(
            _uplink_of(search.measured[settings], name)
            for settings in (comparison.challenger, comparison.best)
        )
        lines.append(f"{name.replace('_', '-')}: {pair}")
    return list(dict.fromkeys(lines))


def _uplink_of(measured: Measurement, name: str) -> str:
    uplink = "stopped" if measured.mibit_or_none is None else f"{measured.mibit:.3g} Mibit"
    value = getattr(measured.settings, name)
    return f"{value if isinstance(value, str) else f'{value:g}'} ({uplink})"


def next_steps(best: Hyperparameters, start: Hyperparameters) -> list[str]:
    """Return what the calibration leaves open.

    >>> next_steps(Hyperparameters(local_steps=10), Hyperparameters())
    ['density 0.05 is the largest value tried; try larger ones', 'local-steps 10 is the ...']
    """
    lines: list[str] = []
    for name in CANDIDATES:
        values, value = sorted(CANDIDATES[name]), getattr(best, name)
        if value in (values[0], values[-1]):
            end, side = ("smallest", "smaller") if value == values[0] else ("largest", "larger")
            flag = name.replace("_", "-")
            lines.append(f"{flag} {value:g} is the {end} value tried; try {side} ones")
    if best == start:
        lines.append(
            "nothing beat the initial settings in this short calibration; try "
            "--calibration-rounds 15"
        )
    return lines
