"""Write the report of one or more runs as a self-contained HTML file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import fedsift
from fedsift.report import tables
from fedsift.report.charts import FigureBlock
from fedsift.report.collect import (
    Comparison,
    ReportedRun,
    arrange,
    find_runs,
    find_target,
    likely_target,
    longest_runs,
    ranked,
    read_run,
)
from fedsift.report.curves import accuracy_by_traffic, by_rounds
from fedsift.report.sent import bytes_by_part, labels, magnitudes, overlap, pairs
from fedsift.runs.compare import megabytes, mibit
from fedsift.runs.disk import replace_file

HERE = Path(__file__).parent


def report_on(
    paths: Sequence[Path], out: Path, reload_seconds: float | None = None
) -> list[ReportedRun]:
    """Write the report of every run in or below the given folders, and return its runs.

    Of runs with the same settings and seed, only the longest is included. The page reloads itself
    every ``reload_seconds``, if they are given.
    """
    found = find_runs(paths)
    runs = longest_runs(read_run(path) for path in found)
    methods = list(dict.fromkeys(run.algorithm for run in runs))
    datasets = list(dict.fromkeys(str(run.setting("dataset")) for run in runs))
    subject = ", ".join(methods) if len(methods) <= 3 else f"{len(methods)} methods"
    write_report(runs, out, f"{subject} on {', '.join(datasets)}", find_target(found),
                 reload_seconds)  # fmt: skip
    return runs


def write_report(
    runs: Sequence[ReportedRun],
    path: Path,
    title: str,
    target: float | None = None,
    reload_seconds: float | None = None,
) -> None:
    """Write the report of the given runs; without a target, choose an initial one."""
    from plotly.offline import get_plotlyjs

    sections = [section(comparison, n, target) for n, comparison in enumerate(arrange(runs))]
    page = template().render(
        title=title,
        reload_seconds=reload_seconds,
        written=f"{datetime.now():%H:%M:%S}",
        sections=sections,
        data=data_of(sections),
        environment=tables.environments(runs),
        version=fedsift.__version__,
        heads={"target": tables.TO_TARGET, "overall": list(tables.OVERALL)},
        css=(HERE / "page.css").read_text(encoding="utf-8"),
        script=(HERE / "page.js").read_text(encoding="utf-8"),
        plotly=get_plotlyjs(),
    )
    replace_file(path, page.encode())


def template() -> Any:
    """Return the page's template, which escapes everything from a run."""
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
"""Functions that make the figures, in the page's order; figures without views are omitted."""


def section(comparison: Comparison, number: int, target: float | None) -> dict[str, Any]:
    """Return the content of the page for one comparison."""
    target = target or likely_target(comparison)
    comparison = ranked(comparison, target)
    same, differing = tables.configuration(comparison)
    return {
        "id": f"comparison{number}",
        "comparison": comparison,
        "about": about(comparison),
        "target": target,
        "rows": tables.comparison_rows(comparison, target),
        "tiles": tables.tiles(comparison) if len(comparison.groups) == 1 else [],
        "blocks": [block for make in FIGURES if (block := make(comparison)).views],
        "same": same,
        "differing": differing,
        "runs": tables.every_run(comparison),
        "seeds": max(len(group.runs) for group in comparison.groups),
    }


def about(comparison: Comparison) -> str:
    """Return a line with what the runs of a comparison have in common."""
    same = dict(tables.configuration(comparison)[0])
    words = [comparison.name.replace(", ", " · ")]
    counts = {d for run in comparison.runs if (d := run.summary.get("parameters"))}
    if len(counts) == 1:
        words[0] += f" ({counts.pop():,} parameters)"
    if "clients" in same:
        words.append(tables.number_of(same["clients"], "client"))
    words.append(f"partition {comparison.partition}")
    if "rounds" in same:
        words.append(tables.number_of(same["rounds"], "round"))
    return " · ".join(words)


def data_of(sections: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the data of the page's script: charts, and curves to compare at other targets."""
    return {
        "blocks": {
            f"{s['id']}-{n}": views_of(block)
            for s in sections
            for n, block in enumerate(s["blocks"])
        },
        "comparisons": {
            s["id"]: {"target": s["target"], "groups": curves_of(s["comparison"])} for s in sections
        },
    }


def views_of(block: FigureBlock) -> list[dict[str, Any]]:
    """Return a block's views, with numbers rounded to six digits."""
    views = [asdict(view) for view in block.views]
    shortened: list[dict[str, Any]] = json.loads(json.dumps(views), parse_float=shorter)
    return shortened


def shorter(text: str) -> float:
    """Round a number to six digits.

    >>> shorter("0.123456789")
    0.123457
    """
    return float(f"{float(text):.6g}")


def curves_of(comparison: Comparison) -> list[dict[str, Any]]:
    """Return the curves of each group's runs; ``dense`` is dense FedAdam's MB per round."""
    return [
        {
            "name": group.name,
            "runs": [
                {
                    "rounds": [r["round"] for r in run.history],
                    "accuracy": [r.get("accuracy") for r in run.history],
                    "mibit": [mibit(r) for r in run.history],
                    "megabytes": [megabytes(r) for r in run.history],
                    "dense": None if (dense := run.dense_bytes(1)) is None else dense / 1e6,
                }
                for run in group.runs
            ],
        }
        for group in comparison.groups
    ]
