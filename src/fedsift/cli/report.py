"""The command ``fedsift report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedsift.cli.options import path


def report(
    folders: Annotated[
        list[Path], typer.Argument(help="Run folders, or folders that contain them at any depth.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", parser=path, help="HTML file to write.")] = (
        Path("report.html")
    ),
    export: Annotated[
        Path | None,
        typer.Option(
            "--export",
            parser=path,
            help="Folder for every figure as PNG and SVG, and every table as CSV and LaTeX.",
        ),
    ] = None,
) -> None:
    """Plot runs together in one self-contained HTML file.

    Runs that differ only in their seed are summarized by mean and standard deviation. Unfinished
    runs are included up to their last round.

    Examples:
    * `fedsift report runs/digits-fedadam-ssm-20260101-120000`

    * `fedsift report runs/seed-0 runs/seed-1 runs/seed-2 -o seeds.html`

    * `fedsift report runs/seeds --export figures`

    """
    from fedsift.cli.reports import report_on_folders

    report_on_folders(folders, out, export)
