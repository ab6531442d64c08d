"""The report's tables: text cells, and beside each what it is sorted by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fedsift.report.collect import Group, Shown, Spread, Task, all_settings, to_target, values_of
from fedsift.runs.compare import MIBIT, megabytes, mibit


@dataclass(frozen=True)
class Cell:
    """What a cell shows, by what it is sorted, and a word on it."""

    text: str
    sort: float | str = ""
    note: str = ""


@dataclass(frozen=True)
class Row:
    """A group's line in the comparison."""

    group: Group
    to_target: Sequence[Cell]
    results: Sequence[Cell]


TO_TARGET = ("Mibit", "ratio", "MB sent", "rounds")
"""Columns that depend on the target."""
OVERALL: dict[str, tuple[str, Callable[[float], float]]] = {
    "best_accuracy": ("best, %", lambda x: 100 * x),
    "final_accuracy": ("final, %", lambda x: 100 * x),
    "uplink_bits_paper": ("Mibit in all", lambda x: x / MIBIT),
    "uplink_bytes": ("MB up", lambda x: x / 1e6),
    "downlink_bytes": ("MB down", lambda x: x / 1e6),
    "seconds_per_round": ("s a round", lambda x: x),
}
"""A summary's results: the column's heading, and its unit."""


def comparison(task: Task, target: float | None) -> list[Row]:
    """The paper's Table 1: what each group needs to reach the target, and what it ends with."""
    spent = [to_target(g, target, mibit) if target else Spread(()) for g in task.groups]
    best = min((s.mean for s in spent if s.mean is not None), default=None)
    rows = []
    for group, bits in zip(task.groups, spent, strict=True):
        cells = target_cells(group, target, bits, best) if target else []
        rows.append(Row(group, cells, [result(group, key) for key in OVERALL]))
    return rows


def target_cells(group: Group, target: float, bits: Spread, best: float | None) -> list[Cell]:
    """What one group needs to reach the target."""
    found = len(bits.known)
    note = "" if found in (0, len(bits.values)) else f"{found} of {len(bits.values)} seeds reach it"
    ratio = bits.mean / best if bits.mean is not None and best else None
    sent = to_target(group, target, megabytes)
    rounds = to_target(group, target, lambda r: float(r["round"]))
    return [
        Cell(bits.text(), order_of(bits.mean), note),
        Cell("" if ratio is None else f"{ratio:.2f}×", order_of(ratio)),
        Cell(sent.text(missing="–"), order_of(sent.mean)),
        Cell(whole(rounds.text(missing="–")), order_of(rounds.mean)),
    ]


def whole(text: str) -> str:
    """A number without its decimals where they say nothing.

    >>> whole("3.00"), whole("3.00 ± 1.00")
    ('3', '3.00 ± 1.00')
    """
    return text if "±" in text else text.removesuffix(".00")


def result(group: Group, key: str) -> Cell:
    """One of a group's results."""
    unit = OVERALL[key][1]
    values = [run.summary.get(key) for run in group.runs]
    spread = Spread(tuple(None if x is None else unit(x) for x in values))
    return Cell(spread.text(missing="–"), order_of(spread.mean))


def order_of(x: float | None) -> float:
    """What a number is sorted by: what is missing comes last."""
    return 1e300 if x is None else x


def tiles(task: Task) -> list[tuple[str, str]]:
    """A single group's results in large figures."""
    (group,) = task.groups
    units = {"best_accuracy": "%", "final_accuracy": "%"}
    names = {
        "final_accuracy": "final accuracy",
        "best_accuracy": "best accuracy",
        "uplink_bytes": "MB sent by a client",
        "uplink_bits_paper": "Mibit by the paper's formula",
        "downlink_bytes": "MB received by a client",
        "seconds_per_round": "seconds a round",
    }
    return [(f"{result(group, key).text} {units.get(key, '')}".strip(), name)
            for key, name in names.items()]  # fmt: skip


def configuration(task: Task) -> tuple[list[tuple[str, str]], list[list[str]]]:
    """Settings that are the same for all groups, and a table of those that differ."""
    keys = [k for k in all_settings(task.groups) if k not in ("algorithm", "dataset", "model")]
    same, differing = [], []
    for key in keys:
        values = [str_of(group.first.setting(key)) for group in task.groups]
        name = key.replace("_", "-")
        if len(values_of(task.groups, key)) > 1:
            differing.append([name, *values])
        elif values[0]:
            same.append((name, values[0]))
    if len(task.runs) == 1:
        (run,) = task.runs
        same += [("seed", str_of(run.setting("seed"))), ("folder", run.folder)]
    return same, differing


def environments(runs: Sequence[Shown]) -> list[tuple[str, str]]:
    """Where the runs were made, each value once."""
    found: dict[str, dict[str, None]] = {}
    for run in runs:
        for key, value in (run.summary.get("environment") or {}).items():
            found.setdefault(key, {})[str(value) or "unknown"] = None
    return [(key, ", ".join(values)) for key, values in found.items()]


def every_run(task: Task) -> list[tuple[Group, list[Cell]]]:
    """A line a run: its seed, results and folder."""
    lines = []
    for group in task.groups:
        for run in group.runs:
            alone = Group([run])
            seed, rounds = run.setting("seed"), len(run.history)
            stopped = run.summary.get("stopped_after") and f" of {run.setting('rounds')}"
            cells = [
                Cell(str_of(seed), seed if isinstance(seed, int) else 0),
                Cell(f"{rounds}{stopped or ''}", rounds),
                *(result(alone, key) for key in OVERALL),
                Cell(run.folder, run.folder),
            ]
            lines.append((group, cells))
    return lines


def str_of(value: Any) -> str:
    """A setting as it is written.

    >>> str_of(None), str_of(0.001), str_of(1e-06), str_of(True)
    ('', '0.001', '1e-06', 'yes')
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)


def number_of(n: Any, thing: str) -> str:
    """Some things, in words.

    >>> number_of(1, "round"), number_of(1000, "client"), number_of("1", "seed")
    ('1 round', '1,000 clients', '1 seed')
    """
    return f"{str_of(n)} {thing}{'' if str_of(n) == '1' else 's'}"
