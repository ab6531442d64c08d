"""The report's tables: the text and the sort key of each cell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fedsift.report.clients import measured
from fedsift.report.collect import ReportedRun
from fedsift.report.comparisons import Comparison
from fedsift.report.groups import SeedGroup, Spread, all_settings, to_target, values_of
from fedsift.report.quantities import ACCURACY, PERPLEXITY, quantities_of
from fedsift.runs.compare import MIBIT, megabytes, mibit, reached


@dataclass(frozen=True)
class Cell:
    """The text of a cell, its sort key, and an optional note below the text."""

    text: str
    sort: float | str = ""
    note: str = ""


@dataclass(frozen=True)
class TableColumn:
    """A column's heading, and what it holds: numbers, numbers to the target, or paths."""

    name: str
    kind: str = "number"


@dataclass(frozen=True)
class TableRow:
    """A row's name, its other cells, and the group that it belongs to."""

    name: str
    cells: Sequence[Cell]
    group: SeedGroup | None = None


@dataclass(frozen=True)
class Table:
    """A table: the name of its file, its heading and note, the heading of the rows, its columns."""

    file_name: str
    title: str
    note: str
    corner: str
    columns: Sequence[TableColumn]
    rows: Sequence[TableRow]


TO_TARGET = ("MB up", "vs dense", "rounds", "Mibit", "ratio")
"""Columns that depend on the target."""
RunValue = Callable[[ReportedRun], float | None]
LITTLE_TRAFFIC = 1e5
"""Fewer bytes than this are shown in kB, as during the run."""


def scaled(key: str, unit: float) -> RunValue:
    """Return a function that gives a value of a run's summary in a unit."""

    def value(run: ReportedRun) -> float | None:
        x = run.summary.get(key)
        return None if x is None else float(x / unit)

    return value


def last_value(key: str, unit: float = 1) -> RunValue:
    """Return a function that gives the last known value of a column of the metrics in a unit."""

    def value(run: ReportedRun) -> float | None:
        known = [x for r in run.history if (x := r.get(key)) is not None]
        return known[-1] / unit if known else None

    return value


def fewer_than_dense(run: ReportedRun) -> float | None:
    """Return how many times fewer bytes a run sent than dense FedAdam in the same rounds."""
    dense, sent = run.dense_bytes(run.rounds), run.summary.get("uplink_bytes")
    return dense / sent if dense and sent else None


def results_of(comparison: Comparison) -> dict[str, RunValue]:
    """Return the results of whole runs: the heading of the column, and its value."""
    own = [q for q in quantities_of(comparison.runs) if q != ACCURACY]
    has_accuracy = any(run.summary.get("best_accuracy") is not None for run in comparison.runs)
    if has_accuracy:
        own = [q for q in own if q.key != "loss"]
    accuracies = {
        "best, %": scaled("best_accuracy", 0.01),
        "final, %": scaled("final_accuracy", 0.01),
    }
    perplexities = {"best test perplexity": scaled("best_perplexity", 1)}
    return {
        **(accuracies if has_accuracy else {}),
        **(perplexities if PERPLEXITY in own else {}),
        **{f"final {q.title}": last_value(q.key) for q in own},
        "total MB up": scaled("uplink_bytes", 1e6),
        "total MB down": scaled("downlink_bytes", 1e6),
        "total Mibit": scaled("uplink_bits_paper", MIBIT),
        "s/round": scaled("seconds_per_round", 1),
    }


def comparison_table(comparison: Comparison, target: float | None) -> Table:
    """Return what each group needs to reach the target, and its results, as in Table 1."""
    spent = [to_target(g, target, mibit) if target else Spread(()) for g in comparison.groups]
    fewest = min((s.mean for s in spent if s.mean is not None), default=None)
    results = {} if len(comparison.groups) == 1 else results_of(comparison)
    seeds = most_seeds(comparison) > 1
    rows = []
    for group, bits in zip(comparison.groups, spent, strict=True):
        cells = [Cell(str(len(group.runs)), len(group.runs))] if seeds else []
        cells += target_cells(group, target, bits, fewest) if target else []
        cells += [result(group, value) for value in results.values()]
        rows.append(TableRow(group.name, cells, group))
    columns = [TableColumn("seeds")] if seeds else []
    columns += [TableColumn(name, "number to-target") for name in TO_TARGET] if target else []
    columns += [TableColumn(name) for name in results]
    return Table("results", "Results", "", "method", columns, rows)


def most_seeds(comparison: Comparison) -> int:
    """Return the largest number of seeds of a group."""
    return max(len(group.runs) for group in comparison.groups)


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
        Cell(times_text(dense), sort_key(dense)),
        Cell(without_zero_decimals(rounds.text(missing="–")), sort_key(rounds.mean)),
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


def times_text(ratio: float | None) -> str:
    """Format a ratio with at most one decimal.

    >>> times_text(12.6316), times_text(4.0), times_text(123.4), times_text(None)
    ('12.6×', '4.0×', '123×', '')
    """
    return "" if ratio is None else f"{ratio:.{0 if ratio >= 100 else 1}f}×"


def without_zero_decimals(text: str) -> str:
    """Drop decimals that are zero.

    >>> without_zero_decimals("3.00"), without_zero_decimals("3.00 ± 1.00")
    ('3', '3.00 ± 1.00')
    """
    return text if "±" in text else text.removesuffix(".00")


def result(group: SeedGroup, value: RunValue) -> Cell:
    """Return one of a group's results."""
    spread = Spread(tuple(value(run) for run in group.runs))
    return Cell(spread.text(missing="–"), sort_key(spread.mean))


def sort_key(x: float | None) -> float:
    """Return the sort key of a number; missing numbers come last."""
    return 1e300 if x is None else x


def tiles(comparison: Comparison) -> list[tuple[str, str]]:
    """Return the results of a single group, to show in large type."""
    (group,) = comparison.groups
    dense = Spread(tuple(fewer_than_dense(run) for run in group.runs)).mean
    special = {
        "total MB up": [
            traffic_tile(group, "uplink_bytes", "sent"),
            (times_text(dense) or "–", "fewer than dense FedAdam"),
        ],
        "total MB down": [traffic_tile(group, "downlink_bytes", "received")],
    }
    names = {
        "final, %": "final accuracy, %",
        "best, %": "best accuracy, %",
        "total Mibit": "Mibit by the paper's formula",
        "s/round": "seconds per round",
    }
    found = []
    for heading, value in results_of(comparison).items():
        tile = result(group, value).text, names.get(heading, heading)
        found += special.get(heading, [tile])
    return found


def traffic_tile(group: SeedGroup, key: str, verb: str) -> tuple[str, str]:
    """Return a group's traffic in MB, or in kB if it is small."""
    mean = Spread(tuple(run.summary.get(key) for run in group.runs)).mean
    unit, size = ("kB", 1e3) if mean is not None and mean < LITTLE_TRAFFIC else ("MB", 1e6)
    return result(group, scaled(key, size)).text, f"{unit} {verb} per client"


def fairness_table(comparison: Comparison) -> Table | None:
    """Return the summaries of what was measured on the clients; None if nothing was."""
    measure = measured(comparison)
    if measure is None:
        return None
    unit = 0.01 if measure.is_share else 1
    worst = last_value(measure.worst.key)
    groups = [g for g in comparison.groups if any(worst(run) is not None for run in g.runs)]
    units = {"deviation": ", points"} if measure.is_share else {}
    default = ", %" if measure.is_share else ""
    columns = [TableColumn(name + units.get(name, default)) for name in measure.summaries]
    values = [last_value(quantity.key, unit) for quantity in measure.summaries.values()]
    rows = [TableRow(g.name, [result(g, value) for value in values], g) for g in groups]
    return Table("fairness", "Fairness between clients", measure.note, "method", columns, rows)


def settings(comparison: Comparison) -> tuple[list[tuple[str, str]], Table | None]:
    """Return the settings that all groups share, and a table of the others, if there are any."""
    groups, same, rows = comparison.groups, [], []
    for key in all_settings(groups):
        if key in ("algorithm", "dataset", "model"):
            continue
        values = [str_of(group.first.setting(key)) for group in groups]
        name = key.replace("_", "-")
        if len(values_of(groups, key)) > 1:
            rows.append(TableRow(name, [Cell(value or "–", value) for value in values]))
        elif values[0]:
            same.append((name, values[0]))
    if len(comparison.runs) == 1:
        (run,) = comparison.runs
        same += [("seed", str_of(run.setting("seed"))), ("folder", run.folder)]
    columns = [TableColumn(group.name) for group in groups]
    table = Table("settings", "Settings that differ", "", "setting", columns, rows)
    return [pair for pair in same if pair[1]], table if rows else None


def environments(runs: Sequence[ReportedRun]) -> list[tuple[str, str]]:
    """Return the distinct values of each field of the runs' environments."""
    found: dict[str, dict[str, None]] = {}
    for run in runs:
        for key, value in (run.summary.get("environment") or {}).items():
            found.setdefault(key, {})[str(value) or "unknown"] = None
    return [(key, ", ".join(values)) for key, values in found.items()]


def every_run(comparison: Comparison) -> Table | None:
    """Return a row per run: its seed, rounds, results and folder; None if there is only one."""
    if len(comparison.runs) == 1:
        return None
    results = results_of(comparison)
    rows = []
    for group in comparison.groups:
        for run in group.runs:
            seed, alone = run.setting("seed"), SeedGroup([run])
            cells = [
                Cell(str_of(seed), seed if isinstance(seed, int) else 0),
                Cell(rounds_text(run), run.rounds),
                *(result(alone, value) for value in results.values()),
                Cell(run.folder, run.folder),
            ]
            rows.append(TableRow(group.name, cells, group))
    columns = [TableColumn(name) for name in ("seed", "rounds", *results)]
    columns.append(TableColumn("folder", "folder"))
    return Table("runs", "Every run", "", "method", columns, rows)


def rounds_text(run: ReportedRun) -> str:
    """Return a run's number of rounds, and of how many if it ended early."""
    planned = run.setting("rounds")
    is_short = isinstance(planned, int) and run.rounds < planned
    return f"{run.rounds:,} of {planned:,}" if is_short else f"{run.rounds:,}"


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
