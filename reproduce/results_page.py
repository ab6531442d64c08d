"""Write the tables of docs/explanation/results.md: `python reproduce/results_page.py`.

Reads table1.json, rivals.json and rivals.csv in reproduce/results, which ``fedsift reproduce``
writes, and copies the figures of rivals into the documentation.
"""

from __future__ import annotations

import csv
import json
import math
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from doc_tables import ROOT, amount, between, listed, name_of, percent, table, times, unit_of, whole

sys.path.insert(0, str(ROOT / "src"))

from fedsift.algorithms import find
from fedsift.reproduce.experiments import Experiment
from fedsift.reproduce.plan import Selection
from fedsift.reproduce.rival_results import whole_groups

RESULTS = ROOT / "reproduce" / "results"
PAGE = ROOT / "docs" / "explanation" / "results.md"
IMAGES = ROOT / "docs" / "images"
TARGETS = {"task": "the target", "fedadam-ssm": "FedAdam-SSM's best", "fedadam": "FedAdam's best"}
Row = dict[str, Any]


def filled(page: str) -> str:
    """The page with its tables between the marks."""
    rows, runs = read_json("rivals"), read_runs()
    pieces = {
        "table1": table_1(read_json("table1")),
        "rivals": by_task(rows, rivals),
        "budgets": by_task(rows, budgets),
        "times": by_task(rows, seconds),
        "grids": by_task(runs, grid),
        "open": open_rows(rows, runs),
    }
    for mark, found in pieces.items():
        page = between(page, mark, found)
    return page


def read_json(name: str) -> list[Row]:
    """The rows of a result; none if there is no such file."""
    path = RESULTS / f"{name}.json"
    found: list[Row] = json.loads(path.read_text("utf-8")) if path.exists() else []
    return found


def read_runs() -> list[Row]:
    """The runs of rivals; none if there is no such file."""
    path = RESULTS / "rivals.csv"
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def by_task(rows: Iterable[Row], make: Callable[[Sequence[Row]], Iterator[str]]) -> Iterator[str]:
    """Yield the pieces of each task and setting."""
    for _, group in groupby(rows, lambda row: (row["task"], row["setting"])):
        yield from make(list(group))


def table_1(rows: Sequence[Row]) -> Iterator[str]:
    """Yield Table 1: our Mibit and, in parentheses, the paper's."""
    columns = list(dict.fromkeys((row["task"], row["setting"]) for row in rows))
    cells = {(row["task"], row["setting"], row["method"]): row for row in rows}
    head = ("method", *(name_of(*column) for column in columns))
    methods = dict.fromkeys(row["method"] for row in rows)
    body = [
        (f"`{name}`", *(mibit_cell(cells.get((*column, name))) for column in columns))
        for name in methods
    ]
    if columns:
        yield table([head, *body])


def mibit_cell(row: Row | None) -> str:
    """One cell of Table 1."""
    if row is None:
        return "open"
    ours = number(row["mibit"]) if row["mibit"] else f"∞ ({row['reached']} of {len(row['seeds'])})"
    if row["mibit"] and len(row["seeds"]) > 1:
        ours += f" ({number(row['mibit_range'][0])} to {number(row['mibit_range'][1])})"
    paper = number(row["paper_mibit"]) if row["paper_mibit"] else "∞"
    return f"{ours}; {paper}" if row["in_paper"] else ours


def number(x: float) -> str:
    """A number with three digits.

    >>> number(1.2649), number(25889.0)
    ('1.26', '25,889')
    """
    return f"{x:,.0f}" if x >= 100 else f"{x:#.3g}"


def method_name(row: Row) -> str:
    """The name of a row's method; the others are tuned."""
    return find(row["method"]).label + ("" if row["tuned"] else ", not tuned")


def rivals(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a heading, a table of the traffic to three targets, its origin, and the figure."""
    first = rows[0]
    yield f"### {name_of(first['task'], first['setting'])}"
    to_task = {key(row): row for row in rows if row["target"] == "task"}
    if all(map(is_open, to_task.values())):
        yield "No configuration has been tested yet."
        return
    unit = unit_of(1e6 * (row["up"] or math.inf) for row in to_task.values())
    yield (
        f"Target {percent(first['accuracy'])}. {unit} per client, means over the seeds, in "
        "parentheses the smallest and the largest. The initial model is not counted."
    )
    yield table(
        [
            (
                "method", "seeds", "rounds", "up", "both ways", "FedAdam-SSM's up / up",
                "up to FedAdam-SSM's best", "up to FedAdam's best", "final accuracy",
            ),
            *(rival_cells(row, rows, unit) for row in to_task.values()),
        ]
    )  # fmt: skip
    yield origins(rows)
    name = f"rivals-{first['task']}-{first['setting']}"
    if (RESULTS / f"{name}.png").exists():
        title = name_of(first["task"], first["setting"])
        yield f"![Accuracy against bytes up and both ways, {title}](../images/{name}.png)"


def key(row: Row) -> tuple[str, bool]:
    """What a row of a task is about."""
    return row["method"], row["tuned"]


def rival_cells(row: Row, rows: Sequence[Row], unit: str) -> tuple[str, ...]:
    """The cells of one method."""
    if is_open(row):
        return method_name(row), "open", *("",) * 7
    harder = {other["target"]: other for other in rows if key(other) == key(row)}
    return (
        method_name(row),
        f"{row['reached']} of {len(row['seeds'])}",
        whole(row["round"]),
        spread(row, "up", unit),
        spread(row, "both", unit),
        times(row["ratio"]),
        *(to_harder(harder[name], unit) for name in ("fedadam-ssm", "fedadam")),
        percent(row["final_accuracy"]),
    )


def spread(row: Row, name: str, unit: str) -> str:
    """A mean with its range, if there is more than one seed."""
    if row[name] is None:
        return "–"
    mean, (low, high) = 1e6 * row[name], (1e6 * x for x in row[f"{name}_range"])
    if len(row["seeds"]) == 1:
        return amount(mean, unit)
    return f"{amount(mean, unit)} ({amount(low, unit)} to {amount(high, unit)})"


def to_harder(row: Row, unit: str) -> str:
    """The uplink to a harder target; open if the settings or the target are not known."""
    if row["line"] is None or not row["seeds"]:
        return "open"
    return amount(row["up"] and 1e6 * row["up"], unit)


def origins(rows: Sequence[Row]) -> str:
    """The seeds, devices and commits of a table's test runs."""
    places = {
        f"{place['device']}, {place['precision']}, commit {place['commit']}"
        for row in rows
        for place in row["environment"]
    }
    seeds = sorted({str(seed) for row in rows for seed in row["seeds"]})
    return (
        f"{listed('Test seed', seeds)}; {'; '.join(sorted(places))}." if seeds else "No test runs."
    )


def budgets(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the accuracy within budgets of uplink; the best of each is bold."""
    shown = [row for row in rows if row["within"]]
    if not shown:
        return
    yield f"**{name_of(shown[0]['task'], shown[0]['setting'])}**"
    limits = list(shown[0]["within"])
    best = {
        limit: max((x for row in shown if (x := row["within"][limit])), default=None)
        for limit in limits
    }
    body = [
        (method_name(row), *(share(row["within"][limit], best[limit]) for limit in limits))
        for row in shown
    ]
    yield table([("method", *(budget_name(float(limit)) for limit in limits)), *body])


def budget_name(megabytes: float) -> str:
    """The name of a budget.

    >>> budget_name(0.003), budget_name(10.0)
    ('3 kB', '10 MB')
    """
    return f"{megabytes:g} MB" if megabytes >= 1 else f"{1e3 * megabytes:g} kB"


def share(x: float | None, best: float | None) -> str:
    """An accuracy; bold if it is the best."""
    text = "–" if x is None else f"{100 * x:.1f} %"
    return f"**{text}**" if x is not None and x == best else text


def seconds(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the time to the target on slow links."""
    shown = [row for row in rows if row["target"] == "task" and row["seeds"]]
    if not shown:
        return
    yield f"**{name_of(shown[0]['task'], shown[0]['setting'])}**"
    links = [name for name in shown[0] if name.startswith("seconds_")]
    head = [f"{name.split('_')[1]} Mbit/s" for name in links]
    body = [(method_name(row), *(duration(row[name]) for name in links)) for row in shown]
    yield table([("method", *head), *body])


def duration(x: float | None) -> str:
    """A time in the unit in which it has few digits.

    >>> duration(12.34), duration(600.0), duration(36000.0), duration(None)
    ('12.3 s', '10.0 min', '10.0 h', '–')
    """
    if x is None:
        return "–"
    return f"{x:.1f} s" if x < 120 else f"{x / 60:.1f} min" if x < 7200 else f"{x / 3600:.1f} h"


def grid(runs: Sequence[Row]) -> Iterator[str]:
    """Yield all configurations on validation data."""
    shown = [run for run in runs if run["data"] == "validation"]
    yield f"**{name_of(shown[0]['task'], shown[0]['setting'])}**"
    unit = unit_of(1e6 * float(run["task_up"] or math.inf) for run in shown)
    head = ("configuration", "rounds to the target", f"up, {unit}", "rounds run", "best accuracy",
            "chosen for")  # fmt: skip
    yield table([head, *(grid_cells(run, unit) for run in shown)])


def grid_cells(run: Row, unit: str) -> tuple[str, ...]:
    """The cells of one configuration."""
    chosen = [TARGETS[name] for name in run["chosen_for"].split()]
    ended = "" if run["is_complete"] == "True" else ", ended early"
    return (
        f"`{run['line']}`",
        run["task_round"] or "–",
        amount(1e6 * float(run["task_up"]) if run["task_up"] else None, unit),
        run["rounds"] + ended,
        percent(float(run["best_accuracy"])),
        ", ".join(chosen) or "–",
    )


def open_rows(rows: Sequence[Row], runs: Sequence[Row]) -> Iterator[str]:
    """Yield a table of what has not been run: methods by task, and what is missing of them."""
    found = {(row["task"], row["setting"], *key(row), row["target"]): row for row in rows}
    seen = {(run["task"], run["setting"]) for run in runs}
    body = []
    for group in whole_groups(Experiment.load("rivals"), Selection()):
        place = group.task, group.setting
        if place not in seen:
            body.append((name_of(*place), "all", "all"))
            continue
        for target, text in TARGETS.items():
            names = [
                f"`{name}`"
                for name in group.methods
                if is_open(found.get((*place, name, True, target)))
            ]
            if names:
                body.append((name_of(*place), ", ".join(names), text))
    if body:
        yield table([("task", "methods", "open for"), *body])


def is_open(row: Row | None) -> bool:
    """Whether a method has no test run with settings chosen for a target."""
    return row is None or row["line"] is None or not row["seeds"]


def copy_figures() -> None:
    """Copy the figures into the documentation."""
    for path in RESULTS.glob("rivals-*.png"):
        shutil.copyfile(path, IMAGES / path.name)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text("utf-8")), encoding="utf-8")
    copy_figures()
