"""The report's figures, as plain data for plotly.

A color is the name of a CSS variable (``--c0``, or ``--c0/0.2`` to see through), so that the page
can draw the same figure in light, in dark and on paper. A :class:`Block` is what stands under one
heading: one or more charts, and the views between which its reader can choose.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedsift.report.collect import Group

Chart = dict[str, Any]
HEIGHT = 340
"""Of a chart, in pixels; what labels need to keep their distance."""


@dataclass(frozen=True)
class View:
    """One of a block's views: its name, its charts, and what colors mean in all of them."""

    name: str
    charts: Sequence[Chart]
    legend: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class Block:
    """A figure with its heading, a sentence on how to read it, and its views."""

    title: str
    note: str
    views: Sequence[View] = field(default_factory=list)
    wide: bool = False

    @property
    def names_are_long(self) -> bool:
        """Whether the views' names take more room than a row of buttons has."""
        return sum(len(view.name) + 3 for view in self.views) > 48


def chart(
    traces: Iterable[Mapping[str, Any]], x: Mapping[str, Any], y: Mapping[str, Any], **layout: Any
) -> Chart:
    """Traces and two axes."""
    return {"data": list(traces), "layout": {"xaxis": dict(x), "yaxis": dict(y), **layout}}


def curve(group: Group, xs: Sequence[Any], ys: Sequence[Any], hover: str, **more: Any) -> Chart:
    """One group's line."""
    return {
        "type": "scatter",
        "mode": "lines" if len(xs) > 1 else "markers",
        "x": xs,
        "y": ys,
        "name": group.name,
        "legendgroup": group.name,
        "line": {"color": f"--c{group.color}", "dash": group.dash, "width": 2},
        "hovertemplate": f"{hover}<extra>{group.name}</extra>",
        **more,
    }
