"""Runs that can be compared, and the order of their groups."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fedsift.report.collect import ReportedRun
from fedsift.report.groups import SeedGroup, Spread, group_key, to_target
from fedsift.report.styles import name_groups
from fedsift.runs.compare import megabytes


@dataclass
class Comparison:
    """Runs that can be compared: on one data set and partition, with one model."""

    name: str
    partition: str = ""
    groups: list[SeedGroup] = field(default_factory=list)

    @property
    def runs(self) -> list[ReportedRun]:
        """All runs of the comparison."""
        return [run for group in self.groups for run in group.runs]


def arrange(runs: Sequence[ReportedRun]) -> list[Comparison]:
    """Return the comparisons of a report, with named groups of seeds.

    Runs on different data sets, partitions or models are never compared.
    """
    comparisons: dict[tuple[str, str], Comparison] = {}
    groups: dict[str, SeedGroup] = {}
    for run in runs:
        key = group_key(run)
        if key not in groups:
            groups[key] = SeedGroup([])
            name = f"{run.setting('dataset')}, {run.setting('model')}"
            comparison = comparisons.setdefault(
                (name, run.partition), Comparison(name, run.partition)
            )
            comparison.groups.append(groups[key])
        groups[key].runs.append(run)
    for comparison in comparisons.values():
        name_groups(comparison.groups)
    return list(comparisons.values())


def longest_runs(runs: Iterable[ReportedRun]) -> list[ReportedRun]:
    """Return the longest run of each group and seed: copies of a run count once."""
    found: dict[tuple[str, Any], ReportedRun] = {}
    for run in runs:
        key = group_key(run), run.setting("seed")
        known = found.setdefault(key, run)
        if run.rounds > known.rounds:
            found[key] = run
    return list(found.values())


def likely_target(comparison: Comparison) -> float | None:
    """Return 95 % of the best accuracy, in whole percent, as a target to compare at."""
    best = max((run.summary.get("best_accuracy") or 0 for run in comparison.runs), default=0)
    return int(95 * best) / 100 if best else None


def ranked(comparison: Comparison, target: float | None) -> Comparison:
    """Return the groups in order of their MB to the target, then of their best result."""

    def rank(group: SeedGroup) -> tuple[float, float]:
        sent = to_target(group, target, megabytes).mean if target else None
        best = Spread(tuple(run.summary.get("best_accuracy") for run in group.runs)).mean
        lowest = Spread(tuple(run.summary.get("best_perplexity") for run in group.runs)).mean
        return (math.inf if sent is None else sent), (lowest or 0) - (best or 0)

    return replace(comparison, groups=sorted(comparison.groups, key=rank))
