"""Write reports, and say where they are."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fedsift.cli.exit_codes import user_input
from fedsift.cli.terminal import err, print_path
from fedsift.report.collect import find_runs
from fedsift.report.html import report_on
from fedsift.report.tables import number_of


def report_on_folders(folders: Sequence[Path], path: Path) -> None:
    """Write the report of finished or unfinished runs."""
    with user_input():
        path.parent.mkdir(parents=True, exist_ok=True)
        runs = report_on(folders, path)
        included = {run.folder for run in runs}
        for folder in map(str, find_runs(folders)):
            if folder not in included:
                reason = "another run has the same settings and seed"
                print(f"{folder} is left out: {reason}", file=sys.stderr)
    err.print(number_of(len(runs), "run"), highlight=False)
    print_path("report", path)


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
