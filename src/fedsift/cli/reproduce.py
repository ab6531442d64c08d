"""The command ``fedsift reproduce``: parse, call, print."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from fedsift.cli.options import DataDir, path
from fedsift.cli.terminal import err, plain_table, user_input
from fedsift.cli.terminal import out as console
from fedsift.data.folder import use_existing_data_folder
from fedsift.reproduce.pins import PINS, Pin, Planned, Wanted, plan, read, split
from fedsift.reproduce.results import lines_of
from fedsift.reproduce.runner import carry_out, to_do
from fedsift.simulation import Record


def option(flag: str, text: str, shown: bool | str = True, **more: Any) -> Any:
    """One option."""
    return typer.Option(flag, help=text, show_default=shown, **more)


def reproduce(
    name: Annotated[
        str, typer.Argument(help=f"One of: {', '.join(PINS)}.", show_default=False)
    ] = "",
    task: Annotated[
        str | None,
        option(
            "--task",
            f"One, or several separated by commas: {', '.join(read('tasks')['tasks'])}.",
            "all that have data",
        ),
    ] = None,
    setting: Annotated[str | None, option("--setting", "iid or noniid.", "both")] = None,
    methods: Annotated[
        str | None, option("--methods", "Only these, separated by commas.", "all of the pin")
    ] = None,
    seeds: Annotated[int, option("--seeds", "Repeat with seeds 0, 1, …; one with --quick.")] = 3,
    rounds: Annotated[int | None, option("--rounds", "Rounds of every run.", "as pinned")] = None,
    quick: Annotated[bool, option("--quick", "A small version, minutes on two cores.")] = False,
    stop_at_target: Annotated[
        bool, option("--stop-at-target", "End each run when it reaches the task's target.")
    ] = False,
    no_run: Annotated[
        bool, option("--no-run", "Only make the results from the runs that are there.")
    ] = False,
    device: Annotated[str, option("--device", "auto, cpu or cuda.")] = "auto",
    precision: Annotated[str, option("--precision", "On a GPU: fp32, tf32 or bf16.")] = "fp32",
    out: Annotated[
        Path | None,
        option("--out", "Folder of the runs.", "runs/reproduce, or runs/quick", parser=path),
    ] = None,
    results: Annotated[
        Path | None,
        option(
            "--results",
            "Folder of the results.",
            "results, in the folder of the runs",
            parser=path,
        ),
    ] = None,
    data_dir: DataDir = None,
) -> None:
    """Make a table or figure of the paper anew, or the comparison of sift.

    It can be done in pieces: what is finished is not done again, and a run that was stopped goes
    on where it was. The results are made from all runs that are there.

    For example:

    * `fedsift reproduce table1 --task cnn-fashion-mnist --setting iid --quick`

    * `fedsift reproduce sift --task char-lm --quick`

    * `fedsift reproduce fig5 --task vgg11-cifar10 --seeds 1 --device cuda --precision tf32`
    """
    chosen = split(methods or "")
    seeds = min(seeds, 1) if quick else seeds
    wanted = Wanted(task, setting, chosen, seeds, rounds, quick, device, precision)
    runs = out or Path("runs/quick" if quick else "runs/reproduce")
    with user_input():
        if not name:
            raise ValueError(f"name what to make: one of {', '.join(PINS)}")
        use_existing_data_folder(data_dir)
        pin = Pin.of(name)
        plan(pin, wanted)  # what cannot be meant is refused, even if there is nothing to run
        if not no_run:
            say = lambda line: err.print(line, highlight=False)  # noqa: E731
            play(pin, to_do(pin, wanted, runs, stop_at_target, say), runs, stop_at_target)
        show(pin, wanted, runs, results or runs / "results")


def play(pin: Pin, todo: Sequence[Planned], out: Path, stop_at_target: bool) -> None:
    """Carry out runs under a progress bar."""
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=err) as progress:
        all_runs = progress.add_task(f"{pin.name}, runs", total=len(todo))
        for run in todo:
            bar = progress.add_task(str(run.path), total=run.config.rounds)

            def watch(record: Record, bar: Any = bar) -> None:
                progress.update(bar, completed=record["round"])

            try:
                carry_out(run, out, watch, stop_at_target)
            except KeyboardInterrupt:
                print("the same command goes on from here", file=sys.stderr)
                raise
            progress.remove_task(bar)
            progress.advance(all_runs)


def show(pin: Pin, wanted: Wanted, out: Path, results: Path) -> None:
    """Make the results of all runs that are there, print the asked-for tables, name the files."""
    from fedsift.reproduce.make import make  # here, as matplotlib takes a second

    paths = list(make(pin, wanted, out, results))
    if not paths and pin.kind != "updates" and lines_of(pin, wanted, out):
        print(f"the runs are in {out}; {pin.name} compares: it needs one more method")
        return
    if not paths:
        raise ValueError(f"there is no run of {pin.name} in {out}")
    if pin.kind != "updates":
        lines = json.loads((results / f"{pin.name}.json").read_text(encoding="utf-8"))
        lines = [line for line in lines if is_asked_for(line, wanted, pin.kind == "settings")]
        if not lines:
            raise ValueError(f"there is no such run of {pin.name} in {out}")
        shown = traffic_table if pin.kind == "traffic" else table
        for (task, setting), own in groupby(lines, lambda line: (line["task"], line["setting"])):
            console.print(shown(list(own), f"{task}, {setting}"))
    for file in paths:
        print(file)


def is_asked_for(line: dict[str, Any], wanted: Wanted, has_all_settings: bool = False) -> bool:
    """Whether a line is of a task and setting that were named, if any were.

    >>> is_asked_for({"task": "char-lm", "setting": "iid"}, Wanted(task="char-lm,other"))
    True
    """
    setting = None if has_all_settings else wanted.setting
    is_task = wanted.task is None or line["task"] in split(wanted.task)
    return is_task and setting in (None, line["setting"])


def table(lines: Sequence[dict[str, Any]], title: str) -> Table:
    """The paper's Table 1 for one task and setting, with the paper's own figures."""
    shown = plain_table(f"{title}: Mibit a client to {100 * lines[0]['target']:.1f} %")
    add_columns(shown, ("method", "Mibit", "ratio", "seeds", "rounds", "paper", "ratio", "best %"))
    for line in lines:
        reached = f"{line['reached']}/{len(line['seeds'])}"
        ours = number(line["mibit"], "∞")
        theirs = number(line["paper_mibit"], "∞" if line["in_paper"] else "–")
        ratios = [number(line[key], "", "×") for key in ("ratio", "paper_ratio")]
        made = (reached, str(line["rounds"]), theirs)
        best = line["best_accuracy"]
        in_percent = number(None if best is None else 100 * best, "–")
        shown.add_row(line["method"], ours, ratios[0], *made, ratios[1], in_percent)
    return shown


def add_columns(table: Table, headings: Sequence[str]) -> None:
    """The first may be broken where there is too little room, but never a number."""
    for heading in headings:
        first = heading == headings[0]
        table.add_column(
            heading, justify="left" if first else "right", no_wrap=not first, overflow="fold"
        )


TRAFFIC = ("method", "MB up", "ratio", "down", "both", "ratio", "best", "final")


def traffic_table(lines: Sequence[dict[str, Any]], title: str) -> Table:
    """What each method really sends to the task's target and, below it, to FedAdam's best."""
    shown = plain_table(
        f"{title}: megabytes a client to {100 * lines[0]['target']['accuracy']:.1f} %\n"
        "and, below it, to FedAdam's best; ratio: against FedAdam-SSM in the paper's format"
    )
    add_columns(shown, TRAFFIC)
    for line in lines:
        accuracies = [line[key] for key in ("best_accuracy", "final_accuracy")]
        means = (f"{100 * x['mean']:.2f}" for x in accuracies)
        shown.add_row(line["method"], *traffic_cells(line["target"]), *means)
        if len(line["seeds"]) > 1:
            deviations = (f"{100 * x['sd']:.2f}" for x in accuracies)
            shown.add_row("  ±", *deviation_cells(line["target"]), *deviations)
        harder = line["harder"]
        if harder["accuracy"] is not None:
            shown.add_row(f"  to {100 * harder['accuracy']:.2f} %", *traffic_cells(harder))
    return shown


def traffic_cells(cost: dict[str, Any]) -> list[str]:
    """Megabytes up, down and together to a target, and the ratios of the first and the last."""
    if cost["up"] is None:
        return [f"∞ ({cost['reached']}/{cost['of']})", "", "", "", ""]
    up, down, both = (short(cost[key]["mean"]) for key in ("up", "down", "both"))
    ratios = ["" if x is None else f"{short(x)}×" for x in (cost["ratio_up"], cost["ratio_both"])]
    return [up, ratios[0], down, both, ratios[1]]


def deviation_cells(cost: dict[str, Any]) -> list[str]:
    """The standard deviations over the seeds, below the figures of :func:`traffic_cells`."""
    if cost["up"] is None:
        return ["", "", "", "", ""]
    up, down, both = (f"{cost[key]['sd']:.2g}" for key in ("up", "down", "both"))
    return [up, "", down, both, ""]


def short(x: float) -> str:
    """Three digits, or as many as a number has before the point, but at most four decimals.

    >>> short(12345.6), short(37.12), short(0.01234), short(0.0044676)
    ('12346', '37.1', '0.0123', '0.0045')
    """
    return f"{x:.0f}" if x >= 100 else f"{round(x, 4):.3g}"


def number(x: float | None, otherwise: str, unit: str = "") -> str:
    """To two decimals, from a thousand on to whole numbers.

    >>> number(2.944, "∞", "×"), number(18559.3, ""), number(None, "∞")
    ('2.94×', '18559', '∞')
    """
    return otherwise if x is None else f"{x:.{2 if x < 1000 else 0}f}{unit}"
