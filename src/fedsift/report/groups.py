"""Groups of runs that differ only in their seed, and their means and deviations."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from fedsift.report.collect import ReportedRun
from fedsift.runs.compare import reached
from fedsift.simulation import Record

NOT_A_METHOD = ("seed", "tensorboard", "keep_checkpoints", "client_tests", "num_workers")
"""Settings in which the runs of one group may differ."""


RESULTS = (
    "final_accuracy",
    "best_accuracy",
    "final_perplexity",
    "best_perplexity",
    "uplink_bits_paper",
    "uplink_bytes",
    "downlink_bytes",
    "rejected",
    "seconds",
    "seconds_per_round",
    "stopped_after",
)
"""Keys of a summary that are not settings."""


@dataclass
class SeedGroup:
    """Runs that differ only in their seed."""

    runs: list[ReportedRun]
    name: str = ""
    color: int = 0
    dash: str = "solid"
    marker: str = "circle"

    @property
    def first(self) -> ReportedRun:
        """The first run, which represents the group where one is enough."""
        return self.runs[0]

    @property
    def histories(self) -> list[Sequence[Record]]:
        """The records of the rounds that all runs have, one list per run."""
        first = max(run.history[0]["round"] for run in self.runs)
        last = min(run.rounds for run in self.runs)
        return [[r for r in run.history if first <= r["round"] <= last] for run in self.runs]

    def means(self, value: Callable[[Record], float | None]) -> list[float | None]:
        """Return the mean over the runs in each round; None if a run has no value."""
        return [
            fmean(x for x in column if x is not None) if None not in column else None
            for column in self.columns(value)
        ]

    def columns(self, value: Callable[[Record], float | None]) -> list[list[float | None]]:
        """Return the values of each round, one per run."""
        return [list(map(value, records)) for records in zip(*self.histories, strict=True)]


def group_key(run: ReportedRun) -> str:
    """Return the settings that all runs of a group have in common."""
    return json.dumps({key: run.setting(key) for key in settings_of(run)}, default=str)


def settings_of(run: ReportedRun) -> list[str]:
    """Return the names of the settings that define a group."""
    results = {*RESULTS, "parameters", "environment", *NOT_A_METHOD}
    return sorted(key for key in run.summary if key not in results)


def all_settings(groups: Sequence[SeedGroup]) -> list[str]:
    """Return every setting that a group has."""
    return list(dict.fromkeys(key for group in groups for key in settings_of(group.first)))


def values_of(groups: Sequence[SeedGroup], key: str) -> set[str]:
    """Return the values of a setting in all groups."""
    return {str(group.first.setting(key)) for group in groups}


@dataclass(frozen=True)
class Spread:
    """The values of one quantity over the runs of a group.

    >>> str(Spread((1.0, 2.0, 3.0))), str(Spread((1.0,))), str(Spread((1.0, None)))
    ('2.00 ± 1.00', '1.00', '∞')
    """

    values: tuple[float | None, ...]

    @property
    def mean(self) -> float | None:
        """The mean; None if a run has no value."""
        known = self.known
        return fmean(known) if known and len(known) == len(self.values) else None

    @property
    def known(self) -> list[float]:
        """The values of the runs that have one."""
        return [x for x in self.values if x is not None]

    def text(self, missing: str = "∞") -> str:
        """Return the mean, with the standard deviation unless it rounds to zero."""
        if self.mean is None:
            return missing
        places = decimals(self.mean)
        deviation = f"{stdev(self.known):.{places}f}" if len(set(self.known)) > 1 else ""
        spread = f" ± {deviation}" if deviation.strip("0.") else ""
        return f"{self.mean:.{places}f}{spread}"

    def __str__(self) -> str:
        return self.text()


def decimals(x: float) -> int:
    """Return the number of decimals to show: two, or four for small numbers.

    >>> decimals(0.09), decimals(0.00494)
    (2, 4)
    """
    return 2 if abs(x) >= 0.05 or x == 0 else 4


def to_target(group: SeedGroup, target: float, value: Callable[[Record], float]) -> Spread:
    """Return a quantity of each run in the round that first reached the target."""
    found = [reached(run.history, target) for run in group.runs]
    return Spread(tuple(None if record is None else value(record) for record in found))
