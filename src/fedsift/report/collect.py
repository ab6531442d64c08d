"""Find the runs of a report, and arrange them into comparisons and groups of seeds."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from fedsift.algorithms import METHODS
from fedsift.errors import ConfigError
from fedsift.report.validation import METRICS, SUMMARY, UPLOADS, check_fields, check_lines
from fedsift.runs.compare import dense_fedadam_bytes, megabytes, reached
from fedsift.runs.config import read_values
from fedsift.runs.folder import RunFolder, column
from fedsift.runs.records import last_round, trained_rounds
from fedsift.simulation import Record

NOT_A_METHOD = ("seed", "tensorboard", "keep_checkpoints")
"""Settings in which the runs of one group may differ."""
PALETTE = (
    "#0072b2", "#d55e00", "#00875f", "#c0629a", "#b07c00", "#45a3dc", "#16202a", "#7d8894",
    "#7a4b2a", "#6a3d9a", "#a3123f",
)  # fmt: skip
"""The colors of a light page, ``--c0`` to ``--c10`` in page.css."""
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")


@dataclass(frozen=True)
class ReportedRun:
    """A run in a report. What the run did not record is empty."""

    summary: Mapping[str, Any]
    history: Sequence[Record]
    uploads: Sequence[Mapping[str, Any]] = ()
    labels: Sequence[Sequence[int]] = ()
    folder: str = ""

    @property
    def rounds(self) -> int:
        """Number of finished rounds."""
        return last_round(self.history)

    @property
    def algorithm(self) -> str:
        """The method's name."""
        return str(self.summary.get("algorithm", "unnamed"))

    @property
    def partition(self) -> str:
        """The partition of the data, with θ where it applies."""
        theta = self.setting("theta")
        name = str(self.setting("partition"))
        return name if theta is None else f"{name} (θ = {theta})"

    def setting(self, key: str) -> Any:
        """Return a setting; θ only if the partition uses it."""
        if key == "theta" and self.summary.get("partition") != "dirichlet":
            return None
        return self.summary.get(key)

    def dense_bytes(self, rounds: int) -> float | None:
        """Return what dense FedAdam would send per client in this many rounds, if known."""
        keys = ("parameters", "clients", "participation")
        parameters, clients, participation = (self.summary.get(key) for key in keys)
        if parameters is None or clients is None:
            return None
        return dense_fedadam_bytes(parameters, rounds, clients, participation or 1.0)


@dataclass
class SeedGroup:
    """Runs that differ only in their seed."""

    runs: list[ReportedRun]
    name: str = ""
    color: int = 0
    dash: str = "solid"

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


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Return the folders of all runs in or below the given folders, each once."""
    found: dict[Path, Path] = {}
    for path in paths:
        candidates = sorted(file.parent for file in path.rglob("config.toml"))
        runs = [folder for folder in candidates if last_round(RunFolder(folder).history())]
        if not runs:
            reason = "it has no finished round" if candidates else "it contains no run"
            raise ConfigError(f"cannot report on {path}: {reason}")
        for folder in runs:
            found.setdefault(folder.resolve(), folder)
    return list(found.values())


def find_target(runs: Sequence[Path]) -> float | None:
    """Return the target of the first ``fedsift compare`` that one of the runs belongs to."""
    for file in dict.fromkeys(run.parent / "compare.csv" for run in runs):
        if file.exists():
            try:
                with file.open(newline="", encoding="utf-8") as lines:
                    return next((float(row["target"]) for row in csv.DictReader(lines)), None)
            except (LookupError, TypeError, ValueError):
                raise ConfigError(f"{file} is damaged: it has no target") from None
    return None


def read_run(path: Path) -> ReportedRun:
    """Read a run's folder, and refuse one with damaged files."""
    folder = RunFolder(path)
    history, settings, uploads = folder.history(), read_values(folder.config_file), folder.uploads()
    check_lines(history, METRICS, folder.metrics_file)
    check_lines(uploads, UPLOADS, folder.uploads_file)
    stored = folder.summary()
    check_fields({**settings, **stored}, SUMMARY, str(folder.summary_file if stored else path))
    summary = stored or partial_summary(settings, history)
    return ReportedRun(summary, history, uploads, folder.labels(), str(path))


def partial_summary(settings: Mapping[str, Any], history: Sequence[Record]) -> dict[str, Any]:
    """Return the summary of an unfinished run."""
    seconds = float(history[-1]["seconds"])
    accuracies = column(trained_rounds(history), "accuracy")
    return {
        **settings,
        "final_accuracy": accuracies[-1] if accuracies else None,
        "best_accuracy": max(accuracies, default=None),
        **{k: history[-1].get(k) for k in ("uplink_bits_paper", "uplink_bytes", "downlink_bytes")},
        "seconds": seconds,
        "seconds_per_round": seconds / max(1, last_round(history)),
        "stopped_after": last_round(history),
    }


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


def group_key(run: ReportedRun) -> str:
    """Return the settings that all runs of a group have in common."""
    return json.dumps({key: run.setting(key) for key in settings_of(run)}, default=str)


def settings_of(run: ReportedRun) -> list[str]:
    """Return the names of the settings that define a group."""
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
"""Keys of a summary that are not settings."""


def name_groups(groups: Sequence[SeedGroup]) -> None:
    """Give each group a name, a color and a dash that differ from the others'."""
    by_method: dict[str, list[SeedGroup]] = {}
    for group in groups:
        by_method.setdefault(group.first.algorithm, []).append(group)
    for place, (method, variants) in enumerate(by_method.items()):
        differing = [k for k in all_settings(variants) if len(values_of(variants, k)) > 1]
        color, dash = style_of(method, place)
        for number, group in enumerate(variants):
            settings = [
                f"{key.replace('_', '-')} {value}"
                for key in differing
                if (value := group.first.setting(key)) is not None
            ]
            group.name = " · ".join([method, *settings])
            if len(by_method) == 1:  # variants of one method differ in color
                group.color = (color + number) % len(PALETTE)
            else:
                group.color = color
                group.dash = dash if len(variants) == 1 else DASHES[number % len(DASHES)]


def style_of(method: str, place: int) -> tuple[int, str]:
    """Return a method's place in the palette and its dash: the same in every report.

    A method without its own color gets one by its position among the methods of the report.

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
        """Return the mean, with the standard deviation if the runs differ."""
        if self.mean is None:
            return missing
        places = decimals(self.mean)
        spread = f" ± {stdev(self.known):.{places}f}" if len(set(self.known)) > 1 else ""
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


def likely_target(comparison: Comparison) -> float | None:
    """Return 95 % of the best accuracy, in whole percent, as a target to compare at."""
    best = max((run.summary.get("best_accuracy") or 0 for run in comparison.runs), default=0)
    return int(95 * best) / 100 if best else None


def ranked(comparison: Comparison, target: float | None) -> Comparison:
    """Return the groups in order of their MB to the target, then of their best accuracy."""

    def rank(group: SeedGroup) -> tuple[float, float]:
        sent = to_target(group, target, megabytes).mean if target else None
        best = Spread(tuple(run.summary.get("best_accuracy") for run in group.runs)).mean
        return (math.inf if sent is None else sent), -(best or 0)

    return replace(comparison, groups=sorted(comparison.groups, key=rank))
