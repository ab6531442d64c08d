"""Carry out what a command asks for, in full view: runs, comparisons and reports."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import chain
from pathlib import Path

from safetensors import SafetensorError

from fedsift.cli.terminal import bar, comparison_table, err, out, say_where, summary_table
from fedsift.errors import Diverged, TooFewClients, WorkerDied
from fedsift.federation.round import (
    Federation,
)
from fedsift.report.collect import Shown, find_runs, read_run
from fedsift.report.figures import accuracy_figure
from fedsift.report.html import report_on, write_report
from fedsift.report.tables import number_of
from fedsift.runs.compare import csv_of, table_of
from fedsift.runs.config import RunConfig
from fedsift.runs.disk import replace_file
from fedsift.runs.folder import RunFolder
from fedsift.runs.run import begin, federation_of, go, summarize
from fedsift.runs.tensorboard import logged
from fedsift.simulation import Record

Run = tuple[RunFolder, RunConfig]


def carry_out(folder: RunFolder, config: RunConfig, federation: Federation) -> None:
    """One run from start, or where it stopped, to its end."""
    shown = finish_run(folder, config, federation)
    out.print(summary_table(shown.summary))
    with drawn(folder.path / "report.html", folder.path) as report:
        write_report([shown], report, f"{config.algorithm} on {config.dataset}")


def carry_out_all(path: Path, runs: Sequence[Run], target: float) -> None:
    """Every run of a comparison, then its table, figure and report."""
    again = f"the same command with --out {shlex.quote(str(path))}"
    for folder, config in runs:
        # Each federation is built when its turn comes, and gone with its data when it has passed.
        try:
            finish_run(folder, config, federation_of(config), again)
        except Diverged as problem:  # which is a result, too
            err.print(f"{config.algorithm}: {problem}", style="yellow", markup=False)
    histories = {config.algorithm: folder.history() for folder, config in runs}
    if not any(histories.values()):
        raise Diverged("every method diverged; try a smaller --lr")
    shown = [read_run(folder.path) for folder, config in runs if histories[config.algorithm]]
    rows = table_of(histories, target)
    title = f"{runs[0][1].dataset}, {runs[0][1].partition}: Mibit a client to {100 * target:.1f} %"
    replace_file(path / "compare.csv", csv_of(rows).encode())
    out.print(comparison_table(rows, title))
    say_where("table", path / "compare.csv")
    with drawn(path / "compare.png", path) as figure:
        accuracy_figure(histories, figure, title, target)
    with drawn(path / "report.html", path) as report:
        write_report(shown, report, title, target)


def carry_out_report(paths: Sequence[Path], path: Path) -> None:
    """The report of runs that were made before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    runs = report_on(paths, path)
    shown = {run.folder for run in runs}
    for folder in map(str, find_runs(paths)):
        if folder not in shown:
            print(f"{folder} is left out: another has its settings and its seed", file=sys.stderr)
    err.print(number_of(len(runs), "run"), highlight=False)
    say_where("report", path)


@contextmanager
def drawn(path: Path, folder: Path) -> Iterator[Path]:
    """Say where a figure or report is; a machine that only trains can do without them."""
    kind = "report" if path.suffix == ".html" else "figure"
    try:
        yield path
        say_where(kind, path)
    except ModuleNotFoundError as missing:
        print(
            f"no {kind}, as {missing.name} is not installed here; "
            f"make it elsewhere with: fedsift report {shlex.quote(str(folder))}",
            file=sys.stderr,
        )
    except OSError as problem:
        how = f"make it later with: fedsift report {shlex.quote(str(folder))}"
        raise OSError(f"no {kind}: {problem}; {how}") from None


def finish_run(
    folder: RunFolder, config: RunConfig, federation: Federation, again: str = ""
) -> Shown:
    """Play a run's remaining rounds under a progress bar and write its summary.

    ``again``: what goes on after a stop, if that is not ``fedsift resume``.
    """
    with folder.locked():
        return _finish_run(folder, config, federation, again or folder.command)


def _finish_run(folder: RunFolder, config: RunConfig, federation: Federation, again: str) -> Shown:
    start = begin(folder, federation)
    history: list[Record] = []
    with (
        told_how_to_go_on(folder, again),
        bar(config) as step,
        closing(go(folder, federation, start, config.rounds)) as new,
    ):
        records = chain(start.history, new)
        for record in logged(records, folder.path) if config.tensorboard else records:
            history.append(record)
            step(record)
    summary = summarize(config, federation, history)
    folder.finish(summary)
    return read_run(folder.path)


@contextmanager
def told_how_to_go_on(folder: RunFolder, again: str) -> Iterator[None]:
    """When a run stops early, say what became of it."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"continue with: {again}", file=sys.stderr)
        raise
    except (OSError, SafetensorError, WorkerDied) as problem:
        raise type(problem)(f"{problem}; continue with: {again}") from None
    except Diverged as problem:
        good = len(folder.history())
        kept = f"; the checkpoint of round {good} is in {folder.path}" if good else ""
        raise Diverged(f"{problem}{kept}; try a smaller --lr") from None
    except TooFewClients as problem:
        lost = "a resumed run loses the same ones: give a smaller --dropout or --min-clients"
        raise TooFewClients(f"{problem}; {lost}") from None
