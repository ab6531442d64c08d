"""The runs of a report: found on disk, and ordered into tasks and groups of seeds."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from fedsift.algorithms import METHODS
from fedsift.errors import ConfigError
from fedsift.runs.compare import mibit, reached
from fedsift.runs.config import (
    read_values,
)
from fedsift.runs.folder import RunFolder
from fedsift.simulation import Record

NOT_A_METHOD = ("seed", "tensorboard")
"""Settings that runs of one group may differ in: all but the seed leave the results as they are."""
PALETTE = (
    "#0072b2", "#d55e00", "#00875f", "#c0629a", "#b07c00", "#45a3dc", "#16202a", "#7d8894",
)  # fmt: skip
"""The colors of a light page, ``--c0`` to ``--c7`` in page.css."""
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")


@dataclass(frozen=True)
class Shown:
    """One run as the report shows it; what a run has not recorded is empty."""

    summary: Mapping[str, Any]
    history: Sequence[Record]
    uploads: Sequence[Mapping[str, Any]] = ()
    labels: Sequence[Sequence[int]] = ()
    folder: str = ""

    @property
    def algorithm(self) -> str:
        """The method's name."""
        return str(self.summary.get("algorithm", "unnamed"))

    def setting(self, key: str) -> Any:
        """A setting; θ counts only where it does something."""
        if key == "theta" and self.summary.get("partition") != "dirichlet":
            return None
        return self.summary.get(key)


@dataclass
class Group:
    """Runs that differ in their seed alone."""

    runs: list[Shown]
    name: str = ""
    color: int = 0
    dash: str = "solid"

    @property
    def first(self) -> Shown:
        """The run that stands for all where one is enough."""
        return self.runs[0]

    @property
    def length(self) -> int:
        """Rounds that every run has."""
        return min(len(run.history) for run in self.runs)

    def means(self, value: Callable[[Record], float | None]) -> list[float | None]:
        """The mean over the runs in each round; None where one has no value."""
        return [
            fmean(x for x in column if x is not None) if None not in column else None
            for column in self.columns(value)
        ]

    def columns(self, value: Callable[[Record], float | None]) -> list[list[float | None]]:
        """Each round's values, one a run."""
        return [[value(run.history[n]) for run in self.runs] for n in range(self.length)]


@dataclass
class Task:
    """What can be compared: all runs on one data set with one model."""

    name: str
    groups: list[Group] = field(default_factory=list)

    @property
    def runs(self) -> list[Shown]:
        """Every run of the task."""
        return [run for group in self.groups for run in group.runs]


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """The folders of all runs in or below the given ones, each once, whatever it is called."""
    found: dict[Path, Path] = {}
    for path in paths:
        here = sorted(file.parent for file in path.rglob("config.toml"))
        runs = [folder for folder in here if RunFolder(folder).history()]
        if not runs:
            why = "no finished round in it" if here else "there is no run in it"
            raise ConfigError(f"{path} cannot be reported on: {why}")
        for folder in runs:
            found.setdefault(folder.resolve(), folder)
    return list(found.values())


def find_target(runs: Sequence[Path]) -> float | None:
    """The target of the first comparison that one of the runs belongs to."""
    for file in dict.fromkeys(run.parent / "compare.csv" for run in runs):
        if file.exists():
            try:
                with file.open(newline="", encoding="utf-8") as lines:
                    return next((float(row["target"]) for row in csv.DictReader(lines)), None)
            except (LookupError, TypeError, ValueError):
                raise ConfigError(f"{file} is damaged: it has no target") from None
    return None


def read_run(path: Path) -> Shown:
    """A run's folder, as much of it as there is."""
    folder = RunFolder(path)
    history, settings = folder.history(), read_values(folder.config_file)
    summary = folder.summary() or summary_so_far(settings, history)
    return Shown(summary, history, folder.uploads(), folder.labels(), str(path))


def summary_so_far(settings: Mapping[str, Any], history: Sequence[Record]) -> dict[str, Any]:
    """What summary.json would say of a run that has not ended."""
    seconds = float(history[-1]["seconds"])
    accuracies = [x for r in history if (x := r.get("accuracy")) is not None]
    return {
        **settings,
        "final_accuracy": accuracies[-1] if accuracies else None,
        "best_accuracy": max(accuracies, default=None),
        **{k: history[-1].get(k) for k in ("uplink_bits_paper", "uplink_bytes", "downlink_bytes")},
        "seconds": seconds,
        "seconds_per_round": seconds / len(history),
        "stopped_after": len(history),
    }


def order(runs: Sequence[Shown]) -> list[Task]:
    """The runs by task, and in it by group; groups have names that tell them apart."""
    tasks: dict[str, Task] = {}
    groups: dict[str, Group] = {}
    for run in runs:
        name, key = f"{run.setting('dataset')}, {run.setting('model')}", group_of(run)
        if key not in groups:
            groups[key] = Group([])
            tasks.setdefault(name, Task(name)).groups.append(groups[key])
        groups[key].runs.append(run)
    for task in tasks.values():
        name_groups(task.groups)
    return list(tasks.values())


def distinct(runs: Iterable[Shown]) -> list[Shown]:
    """The runs, of each group and seed the longest: a copy of a run is no other seed."""
    found: dict[tuple[str, Any], Shown] = {}
    for run in runs:
        known = found.setdefault((group_of(run), run.setting("seed")), run)
        if len(run.history) > len(known.history):
            found[group_of(run), run.setting("seed")] = run
    return list(found.values())


def group_of(run: Shown) -> str:
    """All that runs must have in common to be one group."""
    return json.dumps({key: run.setting(key) for key in settings_of(run)}, default=str)


def settings_of(run: Shown) -> list[str]:
    """The settings that make a method's group."""
    results = {*RESULTS, "parameters", "environment", *NOT_A_METHOD}
    return sorted(key for key in run.summary if key not in results)


RESULTS = (
    "final_accuracy",
    "best_accuracy",
    "uplink_bits_paper",
    "uplink_bytes",
    "downlink_bytes",
    "rejected",
    "seconds",
    "seconds_per_round",
    "stopped_after",
)
"""Keys of a summary that are no settings."""


def name_groups(groups: Sequence[Group]) -> None:
    """Give each group a name, a color and a dash of its own; a method keeps its color."""
    by_method: dict[str, list[Group]] = {}
    for group in groups:
        by_method.setdefault(group.first.algorithm, []).append(group)
    for place, (method, variants) in enumerate(by_method.items()):
        differing = [k for k in all_settings(variants) if len(values_of(variants, k)) > 1]
        color, dash = style_of(method, place)
        for number, group in enumerate(variants):
            said = [
                f"{key.replace('_', '-')} {value}"
                for key in differing
                if (value := group.first.setting(key)) is not None
            ]
            group.name = " · ".join([method, *said])
            if len(by_method) == 1:  # variants of one method: told apart by color
                group.color = (color + number) % len(PALETTE)
            else:
                group.color = color
                group.dash = dash if len(variants) == 1 else DASHES[number % len(DASHES)]


def style_of(method: str, place: int) -> tuple[int, str]:
    """Return a method's place in the palette and its dash: the same in every report.

    A method without a color of its own gets one by its place among the methods of the report.

    >>> style_of("fedadam-ssm", 5), style_of("efficient-adam", 5), style_of("unknown", 5)
    ((0, 'solid'), (4, 'dash'), (5, 'longdash'))
    """
    known = METHODS.get(method)
    if known is None or known.color is None:
        return place % len(PALETTE), "longdash"
    return nearest_in_palette(known.color), "dash" if known.dashed else "solid"


def nearest_in_palette(color: str) -> int:
    """Return the place of the palette's color that is nearest to a given one.

    >>> nearest_in_palette("#d55e00"), nearest_in_palette("#ff0000")
    (1, 1)
    """
    wanted, *palette = (bytes.fromhex(c.removeprefix("#")) for c in (color, *PALETTE))
    distances = [math.dist(wanted, each) for each in palette]
    return distances.index(min(distances))


def all_settings(groups: Sequence[Group]) -> list[str]:
    """Every setting that some group has."""
    return list(dict.fromkeys(key for group in groups for key in settings_of(group.first)))


def values_of(groups: Sequence[Group], key: str) -> set[str]:
    """The values that a setting takes among the groups."""
    return {str(group.first.setting(key)) for group in groups}


@dataclass(frozen=True)
class Spread:
    """Some runs' values of one figure: their mean and their deviation.

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
        """The mean, with the deviation where the runs differ."""
        if self.mean is None:
            return missing
        places = decimals(self.mean)
        spread = f" ± {stdev(self.known):.{places}f}" if len(set(self.known)) > 1 else ""
        return f"{self.mean:.{places}f}{spread}"

    def __str__(self) -> str:
        return self.text()


def decimals(x: float) -> int:
    """How many of them to show: two, or four of a number that would have few digits left.

    >>> decimals(0.09), decimals(0.00494)
    (2, 4)
    """
    return 2 if abs(x) >= 0.05 or x == 0 else 4


def to_target(group: Group, target: float, value: Callable[[Record], float]) -> Spread:
    """What each run of a group had used when its accuracy first reached the target."""
    found = [reached(run.history, target) for run in group.runs]
    return Spread(tuple(None if record is None else value(record) for record in found))


def likely_target(task: Task) -> float | None:
    """A target worth comparing at: 95 % of the best accuracy, in whole percent."""
    best = max((run.summary.get("best_accuracy") or 0 for run in task.runs), default=0)
    return int(95 * best) / 100 if best else None


def best_first(task: Task, target: float | None) -> Task:
    """The groups by what they need to reach the target; then by their best accuracy."""

    def rank(group: Group) -> tuple[float, float]:
        bits = to_target(group, target, mibit).mean if target else None
        best = Spread(tuple(run.summary.get("best_accuracy") for run in group.runs)).mean
        return (math.inf if bits is None else bits), -(best or 0)

    return Task(task.name, sorted(task.groups, key=rank))
