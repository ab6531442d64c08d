"""Charts of what was measured of the model, against traffic and rounds, with a line per group."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from fedsift.report.charts import (
    HEIGHT,
    Chart,
    FigureBlock,
    View,
    chart,
    curve,
    escaped,
    reference_line,
)
from fedsift.report.comparisons import Comparison
from fedsift.report.groups import SeedGroup
from fedsift.report.quantities import (
    ACCURACY,
    PERPLEXITY,
    TRAIN_LOSS,
    Quantity,
    Value,
    quantities_of,
)
from fedsift.runs.compare import MIBIT, both_ways, megabytes, mibit
from fedsift.simulation import Record

DENSE = "dense FedAdam"
WIDE_RANGE = 3.0
"""Amounts whose largest is more than this many times the smallest get a logarithmic axis."""
FEW_ROUNDS = 12
"""Up to this many rounds, each has a tick."""
Amount = Callable[[Record], float]
AMOUNTS: dict[str, tuple[str, Amount]] = {
    "MB up": ("uplink per client, MB", megabytes),
    "MB up + down": ("uplink and downlink per client, MB", both_ways),
    "Mibit": ("uplink per client by the paper's formula, Mibit", mibit),
    "time": ("time, s", lambda record: float(record["seconds"])),
}
"""What a result may cost: its name, the title of the axis, and its value."""


def by_traffic(comparison: Comparison) -> FigureBlock:
    """Return the charts of what was measured against traffic per client and time."""
    found = quantities_of(comparison.runs)
    views = [
        View(name, [cost_chart(comparison, name, quantity)], quantity=quantity.title)
        for quantity in found
        if groups_with(comparison, quantity)
        for name in AMOUNTS
    ]
    names = {ACCURACY: "Accuracy", PERPLEXITY: "Perplexity"}
    what = next((name for quantity, name in names.items() if quantity in found), "Progress")
    note = (
        "Further to the left is better: the same result for less traffic. The dotted line is what "
        "dense FedAdam would send in the same rounds."
    )
    return FigureBlock(f"{what} against traffic", note, views, file="against")


def cost_chart(comparison: Comparison, name: str, quantity: Quantity) -> Chart:
    """Return the chart of a quantity against an amount."""
    title, amount = AMOUNTS[name]
    groups = groups_with(comparison, quantity)
    low, high = span(groups, quantity)
    dense = dense_amount(comparison, name)
    lines = [reference_line([dense, dense], [high, low], DENSE)] if dense else []
    totals = [*last_amounts(groups, amount), *([dense] if dense else [])]
    is_log = max(totals) > WIDE_RANGE * min(totals) > 0
    xs = [shown_amounts(group, amount, is_log) for group in groups]
    axis = log_axis([x for group in xs for x in group if x] + totals) if is_log else from_zero()
    traces = group_traces(groups, xs, quantity)
    return chart([*lines, *traces], {"title": title, **axis}, y_axis(quantity, low, high),
                 target=quantity.is_share)  # fmt: skip


def dense_amount(comparison: Comparison, name: str) -> float | None:
    """Return what dense FedAdam would send in the rounds of the longest run, if it is known."""
    units = {"MB up": 1e6, "Mibit": MIBIT / 8}
    sizes = [run.dense_bytes(run.rounds) for run in comparison.runs]
    known = [size for size in sizes if size]
    return max(known) / units[name] if name in units and known else None


def last_amounts(groups: Sequence[SeedGroup], amount: Amount) -> list[float]:
    """Return the amount after the last round of each group."""
    return [found for group in groups if (found := group.means(amount)[-1]) is not None]


def shown_amounts(group: SeedGroup, amount: Amount, is_log: bool) -> list[float | None]:
    """Return a group's amounts; a logarithmic axis has no place for 0, that of the first model."""
    return [None if is_log and not x else x for x in group.means(amount)]


def by_rounds(comparison: Comparison) -> FigureBlock:
    """Return the charts of what was measured, and of the traffic, against rounds."""
    shown = [*quantities_of(comparison.runs), TRAIN_LOSS]
    views = [
        View("", [rounds_chart(groups, quantity)], quantity=quantity.title)
        for quantity in shown
        if (groups := groups_with(comparison, quantity))
    ]
    several = any(len(group.runs) > 1 for group in comparison.groups)
    note = "The mean over the seeds; the band spans the minimum and maximum." if several else ""
    traffic = View("", [traffic_chart(comparison)], quantity="MB up")
    return FigureBlock("Progress by round", note, [*views, traffic], file="by round")


def rounds_chart(groups: Sequence[SeedGroup], quantity: Quantity) -> Chart:
    """Return the chart of a quantity against rounds."""
    low, high = span(groups, quantity)
    traces = group_traces(groups, [group.means(rounds) for group in groups], quantity)
    notes = end_labels(ends_of(groups, quantity), low, high) if len(groups) > 1 else []
    y = y_axis(quantity, low, high)
    return chart(traces, rounds_axis(groups), y, annotations=notes, target=quantity.is_share)


def traffic_chart(comparison: Comparison) -> Chart:
    """Return the chart of traffic against rounds, next to that of dense FedAdam."""
    groups, last = comparison.groups, max(run.rounds for run in comparison.runs)
    sizes = [size for run in comparison.runs if (size := run.dense_bytes(1))]
    numbers = range(1, last + 1)
    dense = [max(sizes) * n / 1e6 for n in numbers] if sizes else []
    lines = [reference_line([*numbers], dense, DENSE)] if dense else []
    ys = [shown_amounts(group, megabytes, is_log=True) for group in groups]
    traces = [
        curve(group, group.means(rounds), values, "%{y:.2f} MB in round %{x:.0f}")
        for group, values in zip(reversed(groups), reversed(ys), strict=True)
    ]
    known = [y for values in ys for y in values if y]
    axis = log_axis([*known, *dense]) if known else {}
    y = {"title": AMOUNTS["MB up"][0], **axis}
    return chart([*lines, *traces], rounds_axis(groups), y)


def groups_with(comparison: Comparison, value: Value) -> list[SeedGroup]:
    """Return the groups that have values."""
    return [g for g in comparison.groups if any(x is not None for x in g.means(value))]


def rounds(record: Record) -> float:
    """Return the round."""
    return float(record["round"])


def group_traces(
    groups: Sequence[SeedGroup], xs: Sequence[Sequence[float | None]], y: Quantity
) -> list[Chart]:
    """Return a line per group, and a band around it if it has several seeds."""
    number = "%{y:.2%}" if y.is_share else "%{y:.4g}"
    traces: list[Chart] = []
    for group, own in zip(reversed(groups), reversed(xs), strict=True):  # the best on top
        if len(group.runs) > 1:
            traces += band(group, own, y)
        traces.append(curve(group, own, group.means(y), f"{number} at %{{x:.4g}}"))
    return traces


def band(group: SeedGroup, xs: Sequence[float | None], y: Value) -> list[Chart]:
    """Return the area between the minimum and maximum of a group's runs."""
    known = [
        (a, [x for x in column if x is not None])
        for a, column in zip(xs, group.columns(y), strict=True)
        if a is not None and None not in column
    ]
    common = {
        "type": "scatter",
        "mode": "lines",
        "line": {"width": 0},
        "hoverinfo": "skip",
        "showlegend": False,
    }
    sides = [
        {**common, "x": [a for a, _ in known], "y": [side(c) for _, c in known]}
        for side in (min, max)
    ]
    sides[1] |= {"fill": "tonexty", "fillcolor": f"--c{group.color}/0.15"}
    return [{**side, "legendgroup": group.name} for side in sides]


def span(groups: Sequence[SeedGroup], y: Value) -> tuple[float, float]:
    """Return the range of an axis: that of the means, with a little room."""
    values = [value for group in groups for value in group.means(y) if value is not None] or [0, 1]
    low, high = min(values), max(values)
    room = 0.04 * (high - low) or 0.01
    return low - room, high + room


def y_axis(quantity: Quantity, low: float, high: float) -> dict[str, Any]:
    """Return the axis of a quantity."""
    form = {"tickformat": ".0%" if high - low > 0.05 else ".1%"} if quantity.is_share else {}
    return {"title": escaped(quantity.title), "range": [low, high], **form}


def rounds_axis(groups: Sequence[SeedGroup]) -> dict[str, Any]:
    """Return the axis of rounds, with ticks at whole numbers."""
    last = max(run.rounds for group in groups for run in group.runs)
    steps = {"dtick": 1} if last <= FEW_ROUNDS else {}
    return {"title": "round", "tickformat": ",d", **from_zero(), **steps}


def from_zero() -> dict[str, Any]:
    """Return a linear axis that starts at zero."""
    return {"rangemode": "tozero"}


def log_axis(amounts: Sequence[float]) -> dict[str, Any]:
    """Return a logarithmic axis with round tick values."""
    low, high = min(amounts), max(amounts)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ratio = high / low
    steps = (1, 2, 5) if ratio < 30 else (1, 3) if ratio < 300 else (1,)
    ticks = [float(f"{step}e{decade}") for decade in decades for step in steps]
    room = 0.03 * math.log10(ratio) or 0.1
    ends = [math.log10(low) - room, math.log10(high) + room]
    return {
        "type": "log",
        "range": ends,
        "tickvals": ticks,
        "ticktext": [f"{tick:g}" for tick in ticks],
    }


def ends_of(groups: Sequence[SeedGroup], y: Value) -> list[tuple[SeedGroup, float]]:
    """Return the last known value of each group."""
    known = [(group, [v for v in group.means(y) if v is not None]) for group in groups]
    return [(group, values[-1]) for group, values in known if values]


def end_labels(ends: Sequence[tuple[SeedGroup, float]], low: float, high: float) -> list[Chart]:
    """Return the groups' names as labels to the right of their lines, without overlap."""
    gap = 17 / (HEIGHT - 56) * (high - low)
    placed = separated([y for _, y in ends], gap, low, high)
    return [
        {
            "name": "end",
            "x": 1,
            "xref": "paper",
            "y": y,
            "text": escaped(group.name),
            "legendgroup": group.name,
            "font": {"color": f"--c{group.color}", "size": 12},
            "xanchor": "left",
            "showarrow": False,
        }
        for (group, _), y in zip(ends, placed, strict=True)
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
