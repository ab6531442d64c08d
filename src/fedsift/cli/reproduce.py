"""The command ``fedsift reproduce``: parse, execute the runs, show the results."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fedsift.cli.exit_codes import user_input
from fedsift.cli.options import DataDir, option, path
from fedsift.cli.reproduce_tables import (
    is_selected,
    paper_table,
    rivals_table,
    traffic_table,
)
from fedsift.cli.terminal import err
from fedsift.cli.terminal import out as console
from fedsift.reproduce.experiments import EXPERIMENTS, Experiment, split_names, task_names

if TYPE_CHECKING:
    from fedsift.reproduce.parallel import BatchOptions, RunStatus
    from fedsift.reproduce.plan import PlannedRun, Selection
    from fedsift.simulation import Record


def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...",
            help=f"One or more of: {', '.join(EXPERIMENTS)}. Without a name, list them.",
            show_default=False,
        ),
    ] = None,
    task: Annotated[
        str | None,
        option(
            "--task",
            f"One or more, separated by commas: {', '.join(task_names())}.",
            "all with data on this machine",
        ),
    ] = None,
    setting: Annotated[str | None, option("--setting", "iid or noniid.", "both")] = None,
    methods: Annotated[
        str | None,
        option(
            "--methods",
            "Algorithms, or lines such as fedsgd@lr=0.1, separated by commas.",
            "all",
        ),
    ] = None,
    seeds: Annotated[
        int, option("--seeds", "Number of seeds: 0, 1, …; always one with --quick.")
    ] = 3,
    rounds: Annotated[int | None, option("--rounds", "Rounds of every run.", "as pinned")] = None,
    quick: Annotated[
        bool, option("--quick", "Run a small version that takes minutes on two cores.")
    ] = False,
    stop_at_target: Annotated[
        bool, option("--stop-at-target", "Stop each run when it reaches the task's target.")
    ] = False,
    no_run: Annotated[
        bool, option("--no-run", "Do not train: write the results of existing runs.")
    ] = False,
    jobs: Annotated[int, option("--jobs", "Number of runs to execute in parallel.")] = 1,
    minutes: Annotated[
        float | None,
        option("--minutes", "Stop after this many minutes; rerun to continue.", "no limit"),
    ] = None,
    device: Annotated[str, option("--device", "auto, cpu or cuda.")] = "auto",
    precision: Annotated[str, option("--precision", "On a GPU: fp32, tf32 or bf16.")] = "fp32",
    out: Annotated[
        Path | None,
        option("--out", "Folder of the runs.", "runs/reproduce, or runs/quick", parser=path),
    ] = None,
    results: Annotated[
        Path | None,
        option(
            "--results", "Folder of the results.", "results, in the folder of the runs", parser=path
        ),
    ] = None,
    data_dir: DataDir = None,
) -> None:
    """Reproduce tables and figures of the paper, or comparisons of sift with other methods.

    The same command continues where it stopped: finished runs are not repeated, and interrupted
    runs resume. A run that fails does not stop the others. The results include all runs in the
    folder. The runs need only the core dependencies; only the figures need matplotlib.

    Examples:
    * `fedsift reproduce table1 --task cnn-fashion-mnist --setting iid --quick`

    * `fedsift reproduce table1 fig4 --methods fedadam-ssm,fedsgd@lr=0.1 --device cuda --jobs 4`

    * `fedsift reproduce sift --task vit-tiny-cifar10,char-lm --device cuda --minutes 9`

    """
    if not names:
        list_experiments()
        return
    start = time.monotonic()
    with user_input():
        from fedsift.data.folder import use_existing_data_folder
        from fedsift.reproduce.parallel import BatchOptions
        from fedsift.reproduce.plan import Selection
        from fedsift.reproduce.rivals import check_selection

        use_existing_data_folder(data_dir)
        seeds = min(seeds, 1) if quick else seeds
        selected = split_names(methods or "")
        selection = Selection(task, setting, selected, seeds, rounds, quick, device, precision)
        runs = out or Path("runs/quick" if quick else "runs/reproduce")
        deadline = math.inf if minutes is None else start + 60 * minutes
        options = BatchOptions(runs, stop_at_target, deadline, jobs)
        experiments = [Experiment.load(name) for name in dict.fromkeys(names)]
        for experiment in experiments:
            check_selection(experiment, selection)
        failed, unfinished = (0, 0) if no_run else execute(experiments, selection, options)
        for experiment in experiments if not unfinished else ():
            show_results(experiment, selection, runs, results or runs / "results", bool(failed))
    if failed:
        raise typer.Exit(1)


def list_experiments() -> None:
    """Print the names and titles of all experiments."""
    width = max(map(len, EXPERIMENTS))
    for name in EXPERIMENTS:
        print(f"{name:<{width}}  {Experiment.load(name).title}")


def execute(
    experiments: Sequence[Experiment], selection: Selection, options: BatchOptions
) -> tuple[int, int]:
    """Execute all unfinished runs; return how many failed, and how many the deadline stopped."""
    from fedsift.reproduce.parallel import unique_runs
    from fedsift.reproduce.rivals import stages
    from fedsift.reproduce.runner import require_executable, unfinished_runs

    failed = unfinished = 0
    warn = cache(print_line)  # once per task
    for stage in stages(experiments, selection, options.out):
        runs = unique_runs(stage)
        todo = unfinished_runs(runs, selection, options.out, options.stop_at_target, warn)
        require_executable(todo)
        statuses = execute_stage(todo, options)
        failed += sum(status.has_failed for status in statuses)
        unfinished = sum(status.is_unfinished for status in statuses)
        if unfinished:
            print_line(f"time is up: {unfinished} runs are unfinished; the same command continues")
            break
    return failed, unfinished


def execute_stage(todo: Sequence[PlannedRun], options: BatchOptions) -> list[RunStatus]:
    """Execute runs, print a line for each, and return how they ended."""
    statuses = []
    try:
        for n, (run, status) in enumerate(execute_with_progress(todo, options), 1):
            statuses.append(status)
            if not status.is_unfinished:
                print_line(f"[{n}/{len(todo)}] {run.path}: {status.text}")
    except KeyboardInterrupt:
        print_line("stopped: the same command continues from here")
        raise
    if failed := sum(status.has_failed for status in statuses):
        print_line(f"{failed} of {len(todo)} runs failed; the same command retries them")
    return statuses


def execute_with_progress(
    todo: Sequence[PlannedRun], options: BatchOptions
) -> Iterator[tuple[PlannedRun, RunStatus]]:
    """Execute the runs under a bar of all runs and one of the current run, if in a terminal."""
    from fedsift.reproduce.parallel import execute_runs

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn())
    disable = not (err.is_terminal and todo)
    with Progress(*columns, TimeElapsedColumn(), console=err, disable=disable) as progress:
        all_runs = progress.add_task("runs", total=len(todo))
        current = progress.add_task("", visible=False)

        def on_record(run: PlannedRun, record: Record) -> None:
            rounds = {"total": run.config.rounds, "completed": record["round"]}
            progress.update(current, description=str(run.path), visible=True, **rounds)

        for run, status in execute_runs(todo, options, on_record):
            progress.advance(all_runs)
            yield run, status


def print_line(line: str) -> None:
    """Print a line to stderr, above the progress bars."""
    err.print(line, soft_wrap=True, markup=False, highlight=False)


def show_results(
    experiment: Experiment, selection: Selection, out: Path, results: Path, may_be_empty: bool
) -> None:
    """Write an experiment's results, print the selected tables, and name the files."""
    from fedsift.reproduce.result_files import draw_figures, write_results
    from fedsift.reproduce.results import read_lines

    name = experiment.name
    paths = list(write_results(experiment, selection, out, results))
    if (
        not paths
        and experiment.kind not in ("updates", "rivals")
        and read_lines(experiment, selection, out)
    ):
        print(f"{name} compares methods, but {out} has runs of fewer than two")
        return
    if not paths:
        if may_be_empty:
            return
        raise ValueError(f"{out} contains no run of {name}")
    if experiment.kind != "updates":
        print_tables(experiment, selection, results / f"{name}.json", out)
    try:
        paths += draw_figures(experiment, selection, out, results)
    except ModuleNotFoundError as missing:
        print_line(
            f"no figures: {missing.name} is not installed; draw them on another machine with: "
            f"fedsift reproduce {name} --no-run --out {out}"
        )
    for file in paths:
        print(file)


def print_tables(experiment: Experiment, selection: Selection, file: Path, out: Path) -> None:
    """Print a table for each selected task and setting."""
    lines = json.loads(file.read_text(encoding="utf-8"))
    has_all_settings = experiment.kind == "settings"
    lines = [line for line in lines if is_selected(line, selection, has_all_settings)]
    if not lines:
        raise ValueError(f"no run of {experiment.name} in {out} matches the selection")
    tables = {"traffic": traffic_table, "rivals": rivals_table}
    make_table = tables.get(experiment.kind, paper_table)
    for (task, setting), group in groupby(lines, lambda line: (line["task"], line["setting"])):
        console.print(make_table(list(group), f"{task}, {setting}"))
