"""Charts of accuracy and loss against traffic and rounds, with a line per group."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from fedsift.report.charts import HEIGHT, Chart, FigureBlock, View, chart, curve
from fedsift.report.collect import Comparison, SeedGroup
from fedsift.runs.compare import both_ways, megabytes, mibit
from fedsift.simulation import Record


def accuracy_by_traffic(comparison: Comparison) -> FigureBlock:
    """Return the chart of test accuracy against traffic per client."""
    axes: dict[str, tuple[str, Callable[[Record], float]]] = {
        "MB up": ("uplink per client, MB", megabytes),
        "MB up + down": ("uplink and downlink per client, MB", both_ways),
        "Mibit": ("uplink per client by the paper's formula, Mibit", mibit),
        "time": ("time, s", lambda r: float(r["seconds"])),
    }
    groups = [g for g in comparison.groups if any(x is not None for x in g.means(accuracy))]
    views = [
        View(name, [curves(groups, x, accuracy, title, "test accuracy", percent=True)])
        for name, (title, x) in axes.items()
    ]
    note = "Up and to the left is better: more accuracy for less traffic."
    return FigureBlock("Accuracy against traffic", note, views if groups else [])


def by_rounds(comparison: Comparison) -> FigureBlock:
    """Return the charts of accuracy and losses against rounds."""
    columns = {"accuracy": "test accuracy", "loss": "test loss", "train_loss": "training loss"}
    views = []
    for key, title in columns.items():
        value = column(key)
        groups = [g for g in comparison.groups if any(x is not None for x in g.means(value))]
        if groups:
            percent = key == "accuracy"
            views.append(View(title, [curves(groups, rounds, value, "round", title, percent)]))
    several = any(len(group.runs) > 1 for group in comparison.groups)
    note = "The mean over the seeds; the band spans the minimum and maximum." if several else ""
    return FigureBlock("Progress by round", note, views)


def column(key: str) -> Callable[[Record], float | None]:
    """Return a function that gives a column of the metrics."""
    return lambda record: record.get(key)


accuracy = column("accuracy")


def rounds(record: Record) -> float:
    """Return the round."""
    return float(record["round"])


def curves(
    groups: Sequence[SeedGroup],
    x: Callable[[Record], float],
    y: Callable[[Record], float | None],
    x_title: str,
    y_title: str,
    percent: bool = False,
) -> Chart:
    """Return a chart with one line per group."""
    traces: list[Chart] = []
    ends: list[tuple[SeedGroup, float, float]] = []
    for group in reversed(groups):  # the best is drawn last, on top
        xs, ys = group.means(x), group.means(y)
        known = [(a, b) for a, b in zip(xs, ys, strict=True) if a is not None and b is not None]
        if len(group.runs) > 1:
            traces += band(group, xs, y)
        number = "%{y:.2%}" if percent else "%{y:.2f}"
        traces.append(curve(group, xs, ys, f"{number} at %{{x:.2f}}"))
        if known:
            ends.append((group, *known[-1]))
    lows = [value for group in groups for value in group.means(y) if value is not None] or [0, 1]
    low, high = min(lows), max(lows)
    room = 0.04 * (high - low) or 0.01
    totals = [end[1] for end in ends]
    is_log = x is not rounds and max(totals, default=0) > 3 * min(totals, default=0) > 0
    x_axis = {"title": x_title, **(log_axis(groups, x) if is_log else {"rangemode": "tozero"})}
    y_axis: dict[str, Any] = {"title": y_title, "range": [low - room, high + room]}
    if percent:
        y_axis["tickformat"] = ".0%"
    named = len(groups) > 1 and x is rounds
    notes = end_labels(ends, low - room, high + room) if named else []
    return chart(traces, x_axis, y_axis, annotations=notes, target=percent)


def band(
    group: SeedGroup, xs: Sequence[float | None], y: Callable[[Record], float | None]
) -> list[Chart]:
    """Return the area between the minimum and maximum of a group's runs."""
    known = [
        (a, [x for x in column if x is not None])
        for a, column in zip(xs, group.columns(y), strict=True)
        if None not in column
    ]
    common = {"type": "scatter", "mode": "lines", "line": {"width": 0}, "hoverinfo": "skip"}
    sides = [
        {**common, "x": [a for a, _ in known], "y": [side(c) for _, c in known]}
        for side in (min, max)
    ]
    sides[1] |= {"fill": "tonexty", "fillcolor": f"--c{group.color}/0.15"}
    return [{**side, "legendgroup": group.name} for side in sides]


def end_labels(
    ends: Sequence[tuple[SeedGroup, float, float]], low: float, high: float
) -> list[Chart]:
    """Return the groups' names as labels to the right of their lines, without overlap."""
    gap = 17 / (HEIGHT - 56) * (high - low)
    placed = separated([y for _, _, y in ends], gap, low, high)
    return [
        {
            "name": "end",
            "x": 1,
            "xref": "paper",
            "y": y,
            "text": group.name,
            "legendgroup": group.name,
            "font": {"color": f"--c{group.color}", "size": 12},
            "xanchor": "left",
            "showarrow": False,
        }
        for (group, _, _), y in zip(ends, placed, strict=True)
    ]


def separated(heights: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Return the heights, moved as little as possible to be ``gap`` apart and within the range.

    >>> separated([1.0, 1.0, 5.0], 1.0, 0.0, 5.0)
    [0.5, 1.5, 5.0]
    >>> separated([5.0, 5.0], 1.0, 0.0, 5.0)
    [4.0, 5.0]
    """
    piles: list[tuple[float, list[int]]] = []  # the center of each pile, and its members

    def pile(members: list[int]) -> tuple[float, list[int]]:
        half = gap * (len(members) - 1) / 2
        middle = sum(heights[n] for n in members) / len(members)
        return max(low + half, min(high - half, middle)), members

    for n in sorted(range(len(heights)), key=lambda n: heights[n]):
        new = pile([n])
        while piles and piles[-1][0] + gap * (len(piles[-1][1]) + len(new[1])) / 2 > new[0]:
            new = pile(piles.pop()[1] + new[1])
        piles.append(new)
    placed = list(heights)
    for middle, members in piles:
        for place, n in enumerate(members):
            placed[n] = middle + gap * (place - (len(members) - 1) / 2)
    return placed


def log_axis(groups: Sequence[SeedGroup], x: Callable[[Record], float]) -> dict[str, Any]:
    """Return a logarithmic axis with round tick values."""
    every = [value for group in groups for value in group.means(x) if value]
    decades = range(math.floor(math.log10(min(every))), math.ceil(math.log10(max(every))) + 1)
    ratio = max(every) / min(every)
    steps = (1, 2, 5) if ratio < 30 else (1, 3) if ratio < 3000 else (1,)
    ticks = [float(f"{step}e{decade}") for decade in decades for step in steps]
    return {"type": "log", "tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}
