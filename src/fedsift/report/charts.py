"""The report's figures, as plain data for plotly.

A color is the name of a CSS variable (``--c0``, or ``--c0/0.2`` for a transparent one), so the page
can draw the same figure in light mode, in dark mode and on paper. :mod:`fedsift.report.figures`
draws the same data without a browser.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedsift.report.groups import SeedGroup

Chart = dict[str, Any]
HEIGHT = 340
"""Height of a chart in pixels."""
MOST_MARKERS = 9
"""Markers on a line."""
LONG = 48
"""Names with more characters than this, in total, are too long for a row of buttons."""


@dataclass(frozen=True)
class View:
    """One view of a block: what it shows, its name, its charts, and their common legend.

    An entry of the legend is a text, a color and, for bars, a pattern.
    The views of a block are every combination of its quantities and names, in this order.
    """

    name: str
    charts: Sequence[Chart]
    legend: Sequence[tuple[str, ...]] = ()
    quantity: str = ""


@dataclass(frozen=True)
class Choice:
    """A control of a block: one of these names. The next name is ``step`` views further on."""

    label: str
    names: Sequence[str]
    step: int

    @property
    def is_list(self) -> bool:
        """Whether the names are too long for a row of buttons."""
        return sum(len(name) + 3 for name in self.names) > LONG


@dataclass(frozen=True)
class FigureBlock:
    """A heading, a note on how to read the figure, and the views to choose from.

    ``file`` is a short name for files with its views.
    """

    title: str
    note: str
    views: Sequence[View] = field(default_factory=list)
    wide: bool = False
    file: str = ""

    @property
    def choices(self) -> list[Choice]:
        """The controls that are needed to choose a view."""
        names = list(dict.fromkeys(view.name for view in self.views))
        quantities = list(dict.fromkeys(view.quantity for view in self.views))
        found = [Choice("what to show", quantities, len(names)), Choice("view", names, 1)]
        return [choice for choice in found if len(choice.names) > 1]

    def file_name(self, view: View) -> str:
        """Return the name of a view's file, without suffix."""
        return slug(view.quantity, self.file, view.name)


def slug(*words: str) -> str:
    """Return words as the name of a file.

    >>> slug("Accuracy against traffic", "", "MB up + down"), slug("../θ = 0.1")
    ('accuracy-against-traffic-mb-up-down', 'θ-0.1')
    """
    text = re.sub(r"[^\w.]+", "-", " ".join(words).lower()).strip("-.")
    return text[:100] or "figure"


def chart(
    traces: Iterable[Mapping[str, Any]], x: Mapping[str, Any], y: Mapping[str, Any], **layout: Any
) -> Chart:
    """Return a chart of traces with two axes."""
    return {"data": list(traces), "layout": {"xaxis": dict(x), "yaxis": dict(y), **layout}}


def curve(group: SeedGroup, xs: Sequence[Any], ys: Sequence[Any], hover: str, **more: Any) -> Chart:
    """Return the line of one group, with its markers."""
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(xs) > 1 else "markers",
        "x": xs,
        "y": ys,
        "connectgaps": True,  # not every round may be evaluated
        "cliponaxis": False,  # show markers at the edge in full
        "name": escaped(group.name),
        "legendgroup": group.name,
        "line": {"color": f"--c{group.color}", "dash": group.dash, "width": 2},
        "marker": {
            "color": f"--c{group.color}",
            "symbol": group.marker,
            "size": 7,
            "maxdisplayed": MOST_MARKERS,
        },
        "hovertemplate": f"{hover}<extra>{escaped_in_template(group.name)}</extra>",
        **more,
    }


def reference_line(xs: Sequence[float], ys: Sequence[float], text: str) -> Chart:
    """Return a gray dotted line, with a label at its last point."""
    return {
        "type": "scatter",
        "mode": "lines+text",
        "x": xs,
        "y": ys,
        "text": [*([""] * (len(xs) - 1)), text],
        "textposition": "top left",
        "textfont": {"color": "--muted", "size": 11},
        "name": text,
        "line": {"color": "--muted", "width": 1.5, "dash": "dot"},
        "hovertemplate": f"{text}<extra></extra>",
    }


def escaped(text: str) -> str:
    """Return a text that plotly does not read as markup.

    >>> escaped("<b>f1</b> & more")
    '&lt;b&gt;f1&lt;/b&gt; &amp; more'
    """
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def escaped_in_template(text: str) -> str:
    """Return a text for a template of plotly, which reads neither markup nor variables in it.

    >>> escaped_in_template("%{x}")
    '%\u200b{x}'
    """
    return escaped(text).replace("%{", "%\u200b{")
