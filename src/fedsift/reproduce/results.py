"""From run folders to results: what each line of a table or figure came to, as CSV and JSON."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from statistics import fmean
from typing import Any

from fedsift.reproduce.pins import Pin, Planned, Wanted, plan, read
from fedsift.reproduce.runner import DIVERGED, require_same
from fedsift.reproduce.updates import UPDATES
from fedsift.runs.compare import Row, megabytes, mibit, row_of
from fedsift.runs.disk import replace_file
from fedsift.runs.folder import RunFolder, column
from fedsift.simulation import Record

POINTS = 150
"""Rounds of a curve that are kept in its CSV: a longer one is thinned out."""


@dataclass(frozen=True)
class Outcome:
    """A run that is there, whole or in part."""

    run: Planned
    history: Sequence[Record]
    environment: Mapping[str, str]
    diverged: bool
    parameters: int = 0

    @property
    def row(self) -> Row:
        """Its row of Table 1."""
        return row_of(self.run.label, self.history, self.run.target)


def lines_of(pin: Pin, wanted: Wanted, out: Path) -> list[list[Outcome]]:
    """Every line of a table or figure that has runs, each with its seeds."""
    names = (path.name.removeprefix("seed-") for path in out.glob("*/*/*/seed-*"))
    seeds = [int(name) for name in names if name.isdecimal()]
    everything = Wanted(seeds=max(seeds, default=0) + 1, rounds=wanted.rounds, quick=wanted.quick)
    found: dict[Path, list[Outcome]] = {}
    for run in plan(pin, everything):
        outcome = outcome_of(run, out)
        if column(outcome.history, "accuracy"):
            found.setdefault(run.path.parent, []).append(outcome)
    return list(found.values())


def outcome_of(run: Planned, out: Path) -> Outcome:
    """What a run's folder holds of the planned rounds."""
    folder = RunFolder(out / run.path)
    require_same(run, folder)
    summary = folder.summary()
    history = folder.history()[: run.config.rounds]
    diverged = len(history) < run.config.rounds and (folder.path / DIVERGED).exists()
    about = {**summary["environment"], "precision": summary.get("precision")} if summary else {}
    return Outcome(run, history, about, diverged, summary.get("parameters", 0))


def table_csv(lines: Iterable[Sequence[Outcome]]) -> str:
    """Every run of every line: what it took to reach the target, and where it was made."""
    text = StringIO()
    names = [name for name in Row.__dataclass_fields__ if name not in ("algorithm", "ratio")]
    made = ("device", "precision", "commit")
    head = ["task", "setting", "method", "seed", *names, "rounds", "diverged", *made]
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    for outcome in (each for line in lines for each in line):
        run, row = outcome.run, vars(outcome.row)
        about = [outcome.environment.get(key) for key in made]
        cells = [run.task, run.setting, run.label, run.config.seed, *(row[name] for name in names)]
        cells += [len(outcome.history), outcome.diverged, *about]
        writer.writerow("" if cell is None else cell for cell in cells)
    return text.getvalue()


def summaries(lines: Sequence[Sequence[Outcome]]) -> list[dict[str, Any]]:
    """Each line in one object, with the paper's own figure beside it."""
    found = [summary_of(line) for line in lines]
    ours = {(s["task"], s["setting"]): s["mibit"] for s in found if s["method"] == "fedadam-ssm"}
    for each in found:
        best = ours.get((each["task"], each["setting"]))
        each["ratio"] = each["mibit"] / best if each["mibit"] and best else None
    return found


def summary_of(line: Sequence[Outcome]) -> dict[str, Any]:
    """A line's seeds as one: means, and the range of the traffic to the target.

    ``mibit`` is None unless every seed reached the target.
    """
    run, rows = line[0].run, [outcome.row for outcome in line]
    mibit = [row.mibit for row in rows if row.mibit is not None]
    reached = len(mibit) == len(rows)
    paper = paper_of(run)
    printed = paper.get(run.label, math.nan)
    return {
        "task": run.task,
        "setting": run.setting,
        "method": run.label,
        "target": run.target,
        "seeds": [outcome.run.config.seed for outcome in line],
        "reached": len(mibit),
        "mibit": fmean(mibit) if reached else None,
        "mibit_range": [min(mibit), max(mibit)] if mibit else None,
        "megabytes": fmean(row.megabytes or 0 for row in rows) if reached else None,
        "round": fmean(row.round or 0 for row in rows) if reached else None,
        "best_accuracy": fmean(row.best_accuracy or 0 for row in rows),
        "final_accuracy": fmean(row.final_accuracy or 0 for row in rows),
        "rounds": min(len(outcome.history) for outcome in line),
        "diverged": sum(outcome.diverged for outcome in line),
        "in_paper": not math.isnan(printed),
        "paper_mibit": printed if math.isfinite(printed) else None,
        "paper_ratio": printed / paper["fedadam-ssm"] if math.isfinite(printed) else None,
        "environment": environments(line),
    }


def paper_of(run: Planned) -> Mapping[str, float]:
    """The paper's Table 1 for the run's task, setting and target: infinity is not reached."""
    asked = read("tasks")["tasks"][run.task]["target"].get(run.setting)
    found: Mapping[str, float] = read("paper").get(run.task, {}).get(run.setting, {})
    return found if asked == run.target else {}


def environments(line: Iterable[Outcome]) -> list[Mapping[str, str]]:
    """The environments of a line's runs, each once."""
    return list({json.dumps(each.environment): each.environment for each in line}.values())


@dataclass(frozen=True)
class Curve:
    """A line's accuracy round by round: the mean over its seeds, and the range.

    ``mibit`` is the uplink by the paper's formula, ``megabytes`` what is really sent up.
    """

    line: Sequence[Outcome]
    rounds: Sequence[int]
    mibit: Sequence[float]
    megabytes: Sequence[float]
    accuracy: Sequence[float]
    lowest: Sequence[float]
    highest: Sequence[float]

    @classmethod
    def of(cls, line: Sequence[Outcome]) -> Curve:
        """As far as all seeds have come, in at most ``POINTS`` rounds."""
        length = min(len(outcome.history) for outcome in line)
        kept = range(0, length, math.ceil(length / POINTS))
        each = [[float(o.history[i]["accuracy"] or 0) for o in line] for i in kept]
        first = line[0].history
        return cls(
            line,
            [i + 1 for i in kept],
            [mibit(first[i]) for i in kept],
            [fmean(megabytes(o.history[i]) for o in line) for i in kept],
            [fmean(x) for x in each],
            [min(x) for x in each],
            [max(x) for x in each],
        )


def curves_csv(curves: Iterable[Curve]) -> str:
    """The curves of one picture."""
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    numbers = ("rounds", "mibit", "megabytes", "accuracy", "lowest", "highest")
    writer.writerow(["setting", "method", "round", *numbers[1:]])
    for curve in curves:
        run = curve.line[0].run
        for point in zip(*(getattr(curve, name) for name in numbers), strict=True):
            writer.writerow([run.setting, run.label, *(f"{x:.6g}" for x in point)])
    return text.getvalue()


def updates_of(pin: Pin, wanted: Wanted, out: Path) -> dict[str, list[dict[str, Any]]]:
    """What was measured for Fig. 1: by task, one object a seed."""
    found: dict[str, list[dict[str, Any]]] = {}
    for run in plan(pin, replace(wanted, task=None, setting=None, methods=())):
        file = out / run.path / UPDATES
        if file.exists():
            found.setdefault(run.task, []).append(json.loads(file.read_text(encoding="utf-8")))
    return found


def write(path: Path, content: str | Any) -> Path:
    """Text as it is, anything else as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = content if isinstance(content, str) else json.dumps(content, indent=2) + "\n"
    replace_file(path, text.encode())
    return path
