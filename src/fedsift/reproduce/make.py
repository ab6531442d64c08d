"""Make a table's or figure's files from whatever runs are there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from fedsift.reproduce import draw
from fedsift.reproduce.pins import Pin, Wanted
from fedsift.reproduce.results import (
    Curve,
    Outcome,
    curves_csv,
    lines_of,
    summaries,
    table_csv,
    updates_of,
    write,
)
from fedsift.reproduce.traffic import costs, costs_csv


def make(pin: Pin, wanted: Wanted, out: Path, results: Path) -> Iterator[Path]:
    """Write every file of a table or figure; gives the paths."""
    if pin.kind == "updates":
        yield from _make_updates(pin, wanted, out, results)
        return
    lines = [line for _, own in compared(pin, lines_of(pin, wanted, out)) for line in own]
    if not lines:
        return
    told = costs(lines) if pin.kind == "traffic" else summaries(lines)
    yield write(results / f"{pin.name}.json", told)
    if pin.kind == "table":
        yield write(results / f"{pin.name}.csv", table_csv(lines))
        return
    if pin.kind == "traffic":
        yield write(results / f"{pin.name}.csv", costs_csv(lines))
    yield from _make_curves(pin, lines, results)


def compared(pin: Pin, lines: Sequence[list[Outcome]]) -> Iterator[tuple[str, list[list[Outcome]]]]:
    """The lines by what is drawn together.

    Left out is a line alone where a figure compares, and a comparison of traffic without the method
    that it is named for.
    """

    def group(line: Sequence[Outcome]) -> str:
        run = line[0].run
        return run.task if pin.kind == "settings" else f"{run.task}-{run.setting}"

    several = len(pin.settings if pin.kind == "settings" else pin.lines) > 1
    for name, found in groupby(lines, group):
        own = list(found)
        kinds = {
            line[0].run.setting if pin.kind == "settings" else line[0].run.label for line in own
        }
        if pin.kind == "traffic" and pin.name not in kinds:
            continue
        if len(kinds) > 1 or not several or pin.kind == "table":
            yield name, own


def _make_curves(pin: Pin, lines: Sequence[list[Outcome]], results: Path) -> Iterator[Path]:
    for name, own in compared(pin, lines):
        curves = [Curve.of(line) for line in own]
        path = results / f"{pin.name}-{name}"
        yield write(path.with_name(f"{path.name}.csv"), curves_csv(curves))
        drawing = draw.draw_settings if pin.kind == "settings" else draw.draw_curves
        drawing(pin, curves, path.with_name(f"{path.name}.png"))
        yield path.with_name(f"{path.name}.png")


def _make_updates(pin: Pin, wanted: Wanted, out: Path, results: Path) -> Iterator[Path]:
    found = updates_of(pin, wanted, out)
    if found:
        told = {task: _told(each) for task, each in found.items()}
        yield write(results / f"{pin.name}.json", told)
    for task, measured in found.items():
        path = results / f"{pin.name}-{task}.png"
        draw.draw_updates(pin, task, measured, path)
        yield path


def _told(measured: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Peak, mean and deviation of log10 of the magnitudes, and the density where it is not 0."""
    told: dict[str, Any] = {"seeds": [each["seed"] for each in measured]}
    told |= {key: measured[0][key] for key in ("round", "environment")}
    for role, name in draw.ROLES.items():
        centers, density = draw.density_of(measured, role)
        share = density / density.sum()
        points = zip(centers, density, strict=True)
        mean = float((centers * share).sum())
        told[name] = {
            "peak_log10": round(float(centers[density.argmax()]), 2),
            "mean_log10": mean,
            "deviation": float(((centers - mean) ** 2 * share).sum() ** 0.5),
            "zeros": sum(each["zeros"][role] for each in measured),
            "density": {f"{c:.2f}": float(f"{d:.4g}") for c, d in points if d > 0},
        }
    return told
