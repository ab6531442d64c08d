"""The report's tables: the text and the sort key of each cell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fedsift.report.collect import (
    Comparison,
    ReportedRun,
    SeedGroup,
    Spread,
    all_settings,
    to_target,
    values_of,
)
from fedsift.runs.compare import MIBIT, megabytes, mibit, reached


@dataclass(frozen=True)
class Cell:
    """The text of a cell, its sort key, and an optional note below the text."""

    text: str
    sort: float | str = ""
    note: str = ""


@dataclass(frozen=True)
class ComparisonRow:
    """A group's row in the comparison."""

    group: SeedGroup
    to_target: Sequence[Cell]
    results: Sequence[Cell]


TO_TARGET = ("MB up", "vs dense", "rounds", "Mibit", "ratio")
"""Columns that depend on the target."""


def scaled(key: str, unit: float) -> Callable[[ReportedRun], float | None]:
    """Return a function that gives a value of a run's summary in a unit."""

    def value(run: ReportedRun) -> float | None:
        x = run.summary.get(key)
        return None if x is None else float(x / unit)

    return value


def percent_of(key: str) -> Callable[[ReportedRun], float | None]:
    """Return a function that gives a value of a run's summary in percent."""

    def value(run: ReportedRun) -> float | None:
        x = run.summary.get(key)
        return None if x is None else float(100 * x)

    return value


def fewer_than_dense(run: ReportedRun) -> float | None:
    """Return how many times fewer bytes a run sent than dense FedAdam in the same rounds."""
    dense, sent = run.dense_bytes(run.rounds), run.summary.get("uplink_bytes")
    return dense / sent if dense and sent else None


OVERALL: dict[str, Callable[[ReportedRun], float | None]] = {
    "best, %": percent_of("best_accuracy"),
    "final, %": percent_of("final_accuracy"),
    "total MB up": scaled("uplink_bytes", 1e6),
    "total MB down": scaled("downlink_bytes", 1e6),
    "total Mibit": scaled("uplink_bits_paper", MIBIT),
    "s/round": scaled("seconds_per_round", 1),
}
"""Results of a whole run: the heading of the column, and its value."""


def comparison_rows(comparison: Comparison, target: float | None) -> list[ComparisonRow]:
    """Return what each group needs to reach the target, and its results, as in Table 1."""
    spent = [to_target(g, target, mibit) if target else Spread(()) for g in comparison.groups]
    fewest = min((s.mean for s in spent if s.mean is not None), default=None)
    rows = []
    for group, bits in zip(comparison.groups, spent, strict=True):
        cells = target_cells(group, target, bits, fewest) if target else []
        rows.append(ComparisonRow(group, cells, [result(group, name) for name in OVERALL]))
    return rows


def target_cells(group: SeedGroup, target: float, bits: Spread, fewest: float | None) -> list[Cell]:
    """Return what a group needs to reach the target, in the order of ``TO_TARGET``."""
    count, seeds = len(bits.known), len(bits.values)
    note = "" if count in (0, seeds) else f"{count} of {seeds} seeds reach it"
    ratio = bits.mean / fewest if bits.mean is not None and fewest else None
    sent = to_target(group, target, megabytes)
    dense = Spread(tuple(fewer_than_dense_to(run, target) for run in group.runs)).mean
    rounds = to_target(group, target, lambda r: float(r["round"]))
    return [
        Cell(sent.text(), sort_key(sent.mean), note),
        Cell(times(dense), sort_key(dense)),
        Cell(whole(rounds.text(missing="–")), sort_key(rounds.mean)),
        Cell(bits.text(missing="–"), sort_key(bits.mean)),
        Cell("" if ratio is None else f"{ratio:.2f}×", sort_key(ratio)),
    ]


def fewer_than_dense_to(run: ReportedRun, target: float) -> float | None:
    """Return how many times fewer bytes than dense FedAdam a run sent up to the target."""
    record = reached(run.history, target)
    dense = None if record is None else run.dense_bytes(record["round"])
    if record is None or dense is None or not record["uplink_bytes"]:
        return None
    return dense / float(record["uplink_bytes"])


def times(ratio: float | None) -> str:
    """Format a ratio with at most one decimal.

    >>> times(12.6316), times(4.0), times(123.4), times(None)
    ('12.6×', '4.0×', '123×', '')
    """
    return "" if ratio is None else f"{ratio:.{0 if ratio >= 100 else 1}f}×"


def whole(text: str) -> str:
    """Drop decimals that are zero.

    >>> whole("3.00"), whole("3.00 ± 1.00")
    ('3', '3.00 ± 1.00')
    """
    return text if "±" in text else text.removesuffix(".00")


def result(group: SeedGroup, name: str) -> Cell:
    """Return one of a group's results."""
    spread = Spread(tuple(OVERALL[name](run) for run in group.runs))
    return Cell(spread.text(missing="–"), sort_key(spread.mean))


def sort_key(x: float | None) -> float:
    """Return the sort key of a number; missing numbers come last."""
    return 1e300 if x is None else x


def tiles(comparison: Comparison) -> list[tuple[str, str]]:
    """Return the results of a single group, to show in large type."""
    (group,) = comparison.groups
    dense = Spread(tuple(fewer_than_dense(run) for run in group.runs)).mean
    names = {
        "final, %": "final accuracy, %",
        "best, %": "best accuracy, %",
        "total MB up": "MB sent per client",
        "total MB down": "MB received per client",
        "total Mibit": "Mibit by the paper's formula",
        "s/round": "seconds per round",
    }
    found = [(result(group, key).text, name) for key, name in names.items()]
    return [*found[:3], (times(dense) or "–", "fewer than dense FedAdam"), *found[3:]]


def configuration(comparison: Comparison) -> tuple[list[tuple[str, str]], list[list[str]]]:
    """Return the settings that all groups share, and a table of the others."""
    keys = [
        k for k in all_settings(comparison.groups) if k not in ("algorithm", "dataset", "model")
    ]
    same, differing = [], []
    for key in keys:
        values = [str_of(group.first.setting(key)) for group in comparison.groups]
        name = key.replace("_", "-")
        if len(values_of(comparison.groups, key)) > 1:
            differing.append([name, *values])
        elif values[0]:
            same.append((name, values[0]))
    if len(comparison.runs) == 1:
        (run,) = comparison.runs
        same += [("seed", str_of(run.setting("seed"))), ("folder", run.folder)]
    return same, differing


def environments(runs: Sequence[ReportedRun]) -> list[tuple[str, str]]:
    """Return the distinct values of each field of the runs' environments."""
    found: dict[str, dict[str, None]] = {}
    for run in runs:
        for key, value in (run.summary.get("environment") or {}).items():
            found.setdefault(key, {})[str(value) or "unknown"] = None
    return [(key, ", ".join(values)) for key, values in found.items()]


def every_run(comparison: Comparison) -> list[tuple[SeedGroup, list[Cell]]]:
    """Return a row per run: its seed, results and folder."""
    lines = []
    for group in comparison.groups:
        for run in group.runs:
            alone = SeedGroup([run])
            seed, rounds = run.setting("seed"), run.rounds
            stopped = run.summary.get("stopped_after") and f" of {run.setting('rounds')}"
            cells = [
                Cell(str_of(seed), seed if isinstance(seed, int) else 0),
                Cell(f"{rounds}{stopped or ''}", rounds),
                *(result(alone, name) for name in OVERALL),
                Cell(run.folder, run.folder),
            ]
            lines.append((group, cells))
    return lines


def str_of(value: Any) -> str:
    """Format a setting.

    >>> str_of(None), str_of(0.001), str_of(1e-06), str_of(True)
    ('', '0.001', '1e-06', 'yes')
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)


def number_of(n: Any, thing: str) -> str:
    """Format a count with its noun.

    >>> number_of(1, "round"), number_of(1000, "client"), number_of("1", "seed")
    ('1 round', '1,000 clients', '1 seed')
    """
    return f"{str_of(n)} {thing}{'' if str_of(n) == '1' else 's'}"
