"""Read run folders, and summarize each line of a table or figure as CSV and JSON."""

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

from fedsift.reproduce.experiments import Experiment, read_pinned
from fedsift.reproduce.plan import PlannedRun, Selection, plan
from fedsift.reproduce.runner import DIVERGED, require_same_settings
from fedsift.reproduce.updates import UPDATES
from fedsift.runs.compare import (
    CLIENT_COLUMNS,
    OF_LANGUAGE,
    Row,
    both_ways,
    megabytes,
    mibit,
    row_of,
)
from fedsift.runs.disk import replace_file
from fedsift.runs.folder import RunFolder, column
from fedsift.simulation import Record

POINTS = 150
"""Maximum number of points of a curve; longer runs are thinned out."""


@dataclass(frozen=True)
class Outcome:
    """What was recorded of a planned run, which may be unfinished."""

    run: PlannedRun
    history: Sequence[Record]
    environment: Mapping[str, str]
    diverged: bool
    parameters: int = 0

    @property
    def initial_model(self) -> float:
        """The size of the initial model's values in megabytes."""
        return 4 * self.parameters / 1e6

    @property
    def row(self) -> Row:
        """The run's row of Table 1."""
        return row_of(self.run.label, self.history, self.run.target)


def read_lines(experiment: Experiment, selection: Selection, out: Path) -> list[list[Outcome]]:
    """Return every line of an experiment that has runs in ``out``, each as a list of seeds."""
    names = (path.name.removeprefix("seed-") for path in out.glob("*/*/*/seed-*"))
    seeds = [int(name) for name in names if name.isdecimal()]
    every_run = Selection(
        seeds=max(seeds, default=0) + 1, rounds=selection.rounds, quick=selection.quick
    )
    lines: dict[Path, list[Outcome]] = {}
    for run in plan(experiment, every_run):
        outcome = read_outcome(run, out)
        if column(outcome.history, "accuracy"):
            lines.setdefault(run.path.parent, []).append(outcome)
    return list(lines.values())


def read_outcome(run: PlannedRun, out: Path) -> Outcome:
    """Read a run's folder, up to the planned number of rounds."""
    folder = RunFolder(out / run.path)
    require_same_settings(run, folder)
    summary = folder.summary()
    # Results committed before round 0 was recorded lack it, so that no table or figure uses it.
    history = [r for r in folder.history() if 1 <= r["round"] <= run.config.rounds]
    diverged = len(history) < run.config.rounds and (folder.path / DIVERGED).exists()
    about = {**summary["environment"], "precision": summary.get("precision")} if summary else {}
    return Outcome(run, history, about, diverged, summary.get("parameters", 0))


def table_csv(lines: Iterable[Sequence[Outcome]]) -> str:
    """Return a CSV of all runs: the traffic to the target, and the environment of the run."""
    text = StringIO()
    others = ("algorithm", "ratio", *CLIENT_COLUMNS, *OF_LANGUAGE)
    names = [name for name in Row.__dataclass_fields__ if name not in others]
    places = ("device", "precision", "commit")
    head = ["task", "setting", "method", "seed", *names, "rounds", "diverged", *places]
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    for outcome in (outcome for line in lines for outcome in line):
        run, row = outcome.run, vars(outcome.row)
        about = [outcome.environment.get(key) for key in places]
        cells = [run.task, run.setting, run.label, run.config.seed, *(row[name] for name in names)]
        cells += [len(outcome.history), outcome.diverged, *about]
        writer.writerow("" if cell is None else cell for cell in cells)
    return text.getvalue()


def summarize_lines(lines: Sequence[Sequence[Outcome]]) -> list[dict[str, Any]]:
    """Return one object per line, with the ratio to FedAdam-SSM and the paper's numbers."""
    found = [summarize_line(line) for line in lines]
    ssm = {(s["task"], s["setting"]): s["mibit"] for s in found if s["method"] == "fedadam-ssm"}
    for summary in found:
        reference = ssm.get((summary["task"], summary["setting"]))
        mibit = summary["mibit"]
        summary["ratio"] = mibit / reference if mibit and reference else None
    return found


def summarize_line(line: Sequence[Outcome]) -> dict[str, Any]:
    """Return the means over a line's seeds, and the range of the traffic to the target.

    ``mibit`` is None unless every seed reached the target.
    """
    run, rows = line[0].run, [outcome.row for outcome in line]
    mibit = [row.mibit for row in rows if row.mibit is not None]
    reached = len(mibit) == len(rows)
    paper = paper_values(run)
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


def paper_values(run: PlannedRun) -> Mapping[str, float]:
    """Return the paper's Table 1 for the run's task, setting and target; inf: not reached."""
    target = read_pinned("tasks")["tasks"][run.task]["target"].get(run.setting)
    paper: Mapping[str, float] = read_pinned("paper").get(run.task, {}).get(run.setting, {})
    return paper if target == run.target else {}


def environments(line: Iterable[Outcome]) -> list[Mapping[str, str]]:
    """Return the distinct environments of a line's runs."""
    unique = {json.dumps(outcome.environment): outcome.environment for outcome in line}
    return list(unique.values())


@dataclass(frozen=True)
class Curve:
    """A line's accuracy per round: the mean over its seeds, and the range.

    ``mibit`` is the uplink by the paper's formula; ``megabytes`` is the measured uplink, and
    ``both`` that with the downlink, without the initial model.
    """

    line: Sequence[Outcome]
    rounds: Sequence[int]
    mibit: Sequence[float]
    megabytes: Sequence[float]
    both: Sequence[float]
    accuracy: Sequence[float]
    lowest: Sequence[float]
    highest: Sequence[float]

    @classmethod
    def of(cls, line: Sequence[Outcome]) -> Curve:
        """Return the curve over the rounds that all seeds have, at most ``POINTS`` of them."""
        length = min(len(outcome.history) for outcome in line)
        shown = range(0, length, math.ceil(length / POINTS))
        accuracies = [[float(o.history[i]["accuracy"] or 0) for o in line] for i in shown]
        first = line[0].history
        return cls(
            line,
            [i + 1 for i in shown],
            [mibit(first[i]) for i in shown],
            [fmean(megabytes(o.history[i]) for o in line) for i in shown],
            [fmean(both_ways(o.history[i]) - o.initial_model for o in line) for i in shown],
            [fmean(x) for x in accuracies],
            [min(x) for x in accuracies],
            [max(x) for x in accuracies],
        )


def curves_csv(curves: Iterable[Curve]) -> str:
    """Return a CSV of the curves of one figure."""
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    numbers = ("rounds", "mibit", "megabytes", "accuracy", "lowest", "highest")
    writer.writerow(["setting", "method", "round", *numbers[1:]])
    for curve in curves:
        run = curve.line[0].run
        for point in zip(*(getattr(curve, name) for name in numbers), strict=True):
            writer.writerow([run.setting, run.label, *(f"{x:.6g}" for x in point)])
    return text.getvalue()


def read_updates(
    experiment: Experiment, selection: Selection, out: Path
) -> dict[str, list[dict[str, Any]]]:
    """Return the measured magnitudes for Fig. 1: by task, one object per seed."""
    measured: dict[str, list[dict[str, Any]]] = {}
    for run in plan(experiment, replace(selection, task=None, setting=None, methods=())):
        file = out / run.path / UPDATES
        if file.exists():
            measured.setdefault(run.task, []).append(json.loads(file.read_text(encoding="utf-8")))
    return measured


def write_file(path: Path, content: str | Any) -> Path:
    """Write text as it is, and anything else as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = content if isinstance(content, str) else json.dumps(content, indent=2) + "\n"
    replace_file(path, text.encode())
    return path
