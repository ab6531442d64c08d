"""The report of one or more runs: one HTML file that needs nothing else, not even a network."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import fedsift
from fedsift.report import tables
from fedsift.report.charts import Block
from fedsift.report.collect import (
    Shown,
    Task,
    best_first,
    distinct,
    find_runs,
    find_target,
    likely_target,
    order,
    read_run,
)
from fedsift.report.curves import accuracy_by_traffic, by_rounds
from fedsift.report.sent import bytes_by_part, labels, magnitudes, overlap, pairs
from fedsift.runs.compare import megabytes, mibit
from fedsift.runs.disk import replace_file

HERE = Path(__file__).parent


def report_on(paths: Sequence[Path], out: Path) -> list[Shown]:
    """Write the report of every run in or below the given folders, and give the runs in it.

    Of runs with the same settings and the same seed, it has the longest.
    """
    found = find_runs(paths)
    runs = distinct(read_run(path) for path in found)
    methods = list(dict.fromkeys(run.algorithm for run in runs))
    sets = list(dict.fromkeys(str(run.setting("dataset")) for run in runs))
    named = ", ".join(methods) if len(methods) <= 3 else f"{len(methods)} methods"
    write_report(runs, out, f"{named} on {', '.join(sets)}", find_target(found))
    return runs


def write_report(
    runs: Sequence[Shown], path: Path, title: str, target: float | None = None
) -> None:
    """Write the report of the given runs; without a target it chooses one to begin with."""
    from plotly.offline import get_plotlyjs

    sections = [section(task, n, target) for n, task in enumerate(order(runs))]
    page = template().render(
        title=title,
        sections=sections,
        data=data_of(sections),
        environment=tables.environments(runs),
        version=fedsift.__version__,
        heads={"target": tables.TO_TARGET, "overall": [h for h, _ in tables.OVERALL.values()]},
        css=(HERE / "page.css").read_text(encoding="utf-8"),
        script=(HERE / "page.js").read_text(encoding="utf-8"),
        plotly=get_plotlyjs(),
    )
    replace_file(path, page.encode())


def template() -> Any:
    """The page, in which everything from a run is escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(HERE)
    pages = Environment(
        loader=loader,
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return pages.get_template("page.html")


FIGURES = (accuracy_by_traffic, by_rounds, bytes_by_part, overlap, magnitudes, pairs, labels)
"""What makes each figure, in the page's order; one without a view is left out."""


def section(task: Task, number: int, target: float | None) -> dict[str, Any]:
    """What the page shows of one task."""
    chosen = target or likely_target(task)
    task = best_first(task, chosen)
    same, differing = tables.configuration(task)
    return {
        "id": f"task{number}",
        "task": task,
        "about": about(task),
        "target": chosen,
        "rows": tables.comparison(task, chosen),
        "tiles": tables.tiles(task) if len(task.groups) == 1 else [],
        "blocks": [block for make in FIGURES if (block := make(task)).views],
        "same": same,
        "differing": differing,
        "runs": tables.every_run(task),
        "seeds": max(len(group.runs) for group in task.groups),
    }


def about(task: Task) -> str:
    """A task in one line, from what its runs have in common."""
    same = dict(tables.configuration(task)[0])
    words = [task.name.replace(", ", " · ")]
    counts = {d for run in task.runs if (d := run.summary.get("parameters"))}
    if len(counts) == 1:
        words[0] += f" ({counts.pop():,} parameters)"
    if "clients" in same:
        words.append(tables.number_of(same["clients"], "client"))
    if "partition" in same:
        theta = f" (θ = {same['theta']})" if "theta" in same else ""
        words.append(f"data {same['partition']}{theta}")
    if "rounds" in same:
        words.append(tables.number_of(same["rounds"], "round"))
    return " · ".join(words)


def data_of(sections: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the page's script works with: the charts, and the curves for other targets."""
    return {
        "blocks": {
            f"{s['id']}-{n}": views_of(block)
            for s in sections
            for n, block in enumerate(s["blocks"])
        },
        "tasks": {
            s["id"]: {"target": s["target"], "groups": curves_of(s["task"])} for s in sections
        },
    }


def views_of(block: Block) -> list[dict[str, Any]]:
    """A block's views, with numbers as short as they can be seen."""
    views = [asdict(view) for view in block.views]
    shortened: list[dict[str, Any]] = json.loads(json.dumps(views), parse_float=shorter)
    return shortened


def shorter(text: str) -> float:
    """A number to six digits.

    >>> shorter("0.123456789")
    0.123457
    """
    return float(f"{float(text):.6g}")


def curves_of(task: Task) -> list[dict[str, Any]]:
    """Each group's runs, for the table at any target."""
    return [
        {
            "name": group.name,
            "runs": [
                {
                    "accuracy": [r.get("accuracy") for r in run.history],
                    "mibit": [mibit(r) for r in run.history],
                    "megabytes": [megabytes(r) for r in run.history],
                }
                for run in group.runs
            ],
        }
        for group in task.groups
    ]
