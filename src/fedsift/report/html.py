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
from fedsift.report.collect import ReportedRun, find_runs, find_target, read_run
from fedsift.report.comparisons import Comparison, longest_runs
from fedsift.report.files import export
from fedsift.report.sections import Section, sections_of
from fedsift.report.styles import MARKERS
from fedsift.runs.compare import megabytes, mibit
from fedsift.runs.disk import replace_file

HERE = Path(__file__).parent


def report_on(
    paths: Sequence[Path],
    out: Path,
    reload_seconds: float | None = None,
    export_to: Path | None = None,
) -> list[ReportedRun]:
    """Write the report of every run in or below the given folders, and return its runs.

    Of runs with the same settings and seed, only the longest is included. The page reloads itself
    every ``reload_seconds``, if they are given. ``export_to`` is a folder for the figures and
    tables as files.
    """
    found = find_runs(paths)
    runs = longest_runs(read_run(path) for path in found)
    methods = listed([run.algorithm for run in runs], "methods")
    datasets = listed([str(run.setting("dataset")) for run in runs], "data sets")
    target = find_target(found)
    write_report(runs, out, f"{methods} on {datasets}", target, reload_seconds)
    if export_to is not None:
        export(sections_of(runs, target), export_to)
    return runs


def listed(names: Sequence[str], what: str) -> str:
    """Return a list of the different names, or their number if there are more than three.

    >>> listed(["sift", "fedadam", "sift"], "methods"), listed("abcd", "data sets")
    ('sift, fedadam', '4 data sets')
    """
    different = list(dict.fromkeys(names))
    return ", ".join(different) if len(different) <= 3 else f"{len(different)} {what}"


def write_report(
    runs: Sequence[ReportedRun],
    path: Path,
    title: str,
    target: float | None = None,
    reload_seconds: float | None = None,
) -> None:
    """Write the report of the given runs; without a target, choose an initial one."""
    from plotly.offline import get_plotlyjs

    sections = sections_of(runs, target)
    page = template().render(
        title=title,
        reload_seconds=reload_seconds,
        written=f"{datetime.now():%H:%M:%S}",
        sections=sections,
        data=data_of(sections),
        environment=tables.environments(runs),
        version=fedsift.__version__,
        markers=MARKERS,
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


def data_of(sections: Sequence[Section]) -> dict[str, Any]:
    """Return the data of the page's script: charts, and curves to compare at other targets."""
    return {
        "blocks": {
            f"{section.id}-{n}": views_of(block)
            for section in sections
            for n, block in enumerate(section.blocks)
        },
        "comparisons": {
            section.id: {
                "target": section.target,
                "about": section.about,
                "groups": curves_of(section.comparison),
            }
            for section in sections
        },
    }


def views_of(block: FigureBlock) -> list[dict[str, Any]]:
    """Return a block's views, with numbers rounded to six digits."""
    views = [{**asdict(view), "file": block.file_name(view)} for view in block.views]
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
