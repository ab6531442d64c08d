"""Write an experiment's result files from the runs in a folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from fedsift.reproduce.experiments import Experiment
from fedsift.reproduce.plan import Selection
from fedsift.reproduce.results import (
    Curve,
    Outcome,
    curves_csv,
    read_lines,
    read_updates,
    summarize_lines,
    table_csv,
    write_file,
)
from fedsift.reproduce.rival_results import read_comparisons, run_rows, summarize_rivals
from fedsift.reproduce.rows import rows_csv
from fedsift.reproduce.traffic import summarize_traffic, traffic_csv
from fedsift.reproduce.updates import summarize_updates


def write_results(
    experiment: Experiment, selection: Selection, out: Path, results: Path
) -> Iterator[Path]:
    """Write every result file of an experiment except its figures, and yield the paths."""
    if experiment.kind == "updates":
        measured = read_updates(experiment, selection, out)
        if measured:
            densities = {task: summarize_updates(seeds) for task, seeds in measured.items()}
            yield write_file(results / f"{experiment.name}.json", densities)
        return
    if experiment.kind == "rivals":
        yield from write_rivals(experiment, selection, out, results)
        return
    lines = comparable_lines(experiment, selection, out)
    if not lines:
        return
    has_traffic = experiment.kind == "traffic"
    summaries = summarize_traffic(lines) if has_traffic else summarize_lines(lines)
    yield write_file(results / f"{experiment.name}.json", summaries)
    if experiment.kind in ("table", "traffic"):
        text = traffic_csv(lines) if has_traffic else table_csv(lines)
        yield write_file(results / f"{experiment.name}.csv", text)
    if experiment.kind != "table":
        for path, group in _figures(experiment, lines, results):
            curves = [Curve.of(line) for line in group]
            yield write_file(path.with_name(f"{path.name}.csv"), curves_csv(curves))


def write_rivals(
    experiment: Experiment, selection: Selection, out: Path, results: Path
) -> Iterator[Path]:
    """Write the table of tuned methods as JSON, and all of their runs as CSV."""
    if comparisons := read_comparisons(experiment, selection, out):
        rows = summarize_rivals(comparisons)
        yield write_file(results / f"{experiment.name}.json", rows)
        yield write_file(results / f"{experiment.name}.csv", rows_csv(run_rows(comparisons)))


def draw_figures(
    experiment: Experiment, selection: Selection, out: Path, results: Path
) -> Iterator[Path]:
    """Draw every figure of an experiment as PNG and SVG, and yield the paths of the PNGs.

    Only this function needs matplotlib.
    """
    from fedsift.reproduce import figures

    if experiment.kind == "updates":
        for task, measured in read_updates(experiment, selection, out).items():
            path = results / f"{experiment.name}-{task}.png"
            figures.draw_updates(experiment, task, measured, path)
            yield path
    elif experiment.kind == "rivals":
        for comparison in read_comparisons(experiment, selection, out):
            if any(comparison.tests.values()):
                path = results / f"{experiment.name}-{comparison.group.name}.png"
                figures.draw_rivals(experiment, comparison, path)
                yield path
    elif experiment.kind != "table":
        lines = comparable_lines(experiment, selection, out)
        draw = figures.draw_settings if experiment.kind == "settings" else figures.draw_curves
        for path, group in _figures(experiment, lines, results):
            png = path.with_name(f"{path.name}.png")
            draw(experiment, [Curve.of(line) for line in group], png)
            yield png


def comparable_lines(
    experiment: Experiment, selection: Selection, out: Path
) -> list[list[Outcome]]:
    """Return the lines that an experiment's files show."""
    groups = comparison_groups(experiment, read_lines(experiment, selection, out))
    return [line for _, group in groups for line in group]


def comparison_groups(
    experiment: Experiment, lines: Sequence[list[Outcome]]
) -> Iterator[tuple[str, list[list[Outcome]]]]:
    """Yield the lines that one figure or table compares, with the name of its file.

    A single line is left out where a figure compares several, and so is a comparison of traffic
    without the method that the experiment is named after.
    """
    by_setting = experiment.kind == "settings"

    def group_name(line: Sequence[Outcome]) -> str:
        run = line[0].run
        return run.task if by_setting else f"{run.task}-{run.setting}"

    compares = len(experiment.settings if by_setting else experiment.lines) > 1
    for name, group in groupby(lines, group_name):
        found = list(group)
        runs = [line[0].run for line in found]
        compared = {run.setting if by_setting else run.label for run in runs}
        if experiment.kind == "traffic" and experiment.name not in compared:
            continue
        if len(compared) > 1 or not compares or experiment.kind == "table":
            yield name, found


def _figures(
    experiment: Experiment, lines: Sequence[list[Outcome]], results: Path
) -> Iterator[tuple[Path, list[list[Outcome]]]]:
    """Yield the path of each figure, without a suffix, and its lines."""
    for name, group in comparison_groups(experiment, lines):
        yield results / f"{experiment.name}-{name}", group
