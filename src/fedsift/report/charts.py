"""The report's figures, as plain data for plotly.

A color is the name of a CSS variable (``--c0``, or ``--c0/0.2`` for a transparent one), so the page
can draw the same figure in light mode, in dark mode and on paper.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedsift.report.collect import SeedGroup

Chart = dict[str, Any]
HEIGHT = 340
"""Height of a chart in pixels."""


@dataclass(frozen=True)
class View:
    """One view of a block: its name, its charts, and their common legend."""

    name: str
    charts: Sequence[Chart]
    legend: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class FigureBlock:
    """A heading, a note on how to read the figure, and the views to choose from."""

    title: str
    note: str
    views: Sequence[View] = field(default_factory=list)
    wide: bool = False

    @property
    def names_are_long(self) -> bool:
        """Whether the views' names are too long for a row of buttons."""
        return sum(len(view.name) + 3 for view in self.views) > 48


def chart(
    traces: Iterable[Mapping[str, Any]], x: Mapping[str, Any], y: Mapping[str, Any], **layout: Any
) -> Chart:
    """Return a chart of traces with two axes."""
    return {"data": list(traces), "layout": {"xaxis": dict(x), "yaxis": dict(y), **layout}}


def curve(group: SeedGroup, xs: Sequence[Any], ys: Sequence[Any], hover: str, **more: Any) -> Chart:
    """Return the line of one group."""
    return {
        "type": "scatter",
        "mode": "lines" if len(xs) > 1 else "markers",
        "x": xs,
        "y": ys,
        "connectgaps": True,  # not every round may be evaluated
        "name": group.name,
        "legendgroup": group.name,
        "line": {"color": f"--c{group.color}", "dash": group.dash, "width": 2},
        "hovertemplate": f"{hover}<extra>{group.name}</extra>",
        **more,
    }
