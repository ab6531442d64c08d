"""Write reports, and say where they are."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fedsift.cli.exit_codes import user_input
from fedsift.cli.terminal import err, print_path
from fedsift.errors import ConfigError
from fedsift.report.collect import ReportedRun, find_runs
from fedsift.report.html import report_on
from fedsift.report.tables import number_of


def report_on_folders(folders: Sequence[Path], path: Path, export_to: Path | None = None) -> None:
    """Write the report of finished or unfinished runs, and its figures and tables as files."""
    with user_input():
        path.parent.mkdir(parents=True, exist_ok=True)
        runs = written_where_possible(folders, path, export_to)
        included = {run.folder for run in runs}
        for folder in map(str, find_runs(folders)):
            if folder not in included:
                reason = "another run has the same settings and seed"
                print(f"{folder} is left out: {reason}", file=sys.stderr)
    err.print(number_of(len(runs), "run"), highlight=False)
    print_path("report", path)
    if export_to is not None:
        print_path("figures and tables", export_to)


def written_where_possible(
    folders: Sequence[Path], path: Path, export_to: Path | None
) -> list[ReportedRun]:
    """Write a report; say in one line which package it lacks."""
    try:
        return report_on(folders, path, export_to=export_to)
    except ModuleNotFoundError as missing:
        raise ConfigError(
            f"a report needs {missing.name}, which is not installed here: install it, or report on "
            "a copy of the run folder on another machine"
        ) from None


@contextmanager
def written_or_explained(kind: str, path: Path, folder: Path) -> Iterator[Path]:
    """Print the path of a report or figure, or say why it is missing and how to write it.

    A machine that only trains may lack the packages for plots; the run is complete without them.
    """
    command = f"fedsift report {shlex.quote(str(folder))}"
    try:
        yield path
        print_path(kind, path)
    except ModuleNotFoundError as missing:
        print(
            f"no {kind}: {missing.name} is not installed here; on another machine, run: {command}",
            file=sys.stderr,
        )
    except OSError as problem:
        raise OSError(f"no {kind}: {problem}; write it later with: {command}") from None
