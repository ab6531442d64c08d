"""How the accuracy or perplexity of the global model differs between clients: the charts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from fedsift.report.charts import Chart, FigureBlock, View, chart, curve
from fedsift.report.comparisons import Comparison
from fedsift.report.curves import (
    from_zero,
    group_traces,
    groups_with,
    rounds,
    rounds_axis,
    span,
    y_axis,
)
from fedsift.report.groups import SeedGroup
from fedsift.report.quantities import Quantity
from fedsift.simulation import Record


@dataclass(frozen=True)
class ClientMeasure:
    """What is measured on each client, and which clients do worst.

    ``percentile`` is that of the values at which a tenth of the clients are worse.
    """

    name: str
    plural: str
    percentile: int
    is_share: bool
    note: str

    @property
    def key(self) -> str:
        """The column with the values of all clients."""
        return f"client_{self.name}"

    @property
    def tail(self) -> str:
        """The name of the percentile."""
        return f"{self.percentile}th percentile"

    @property
    def summaries(self) -> dict[str, Quantity]:
        """The summaries of the clients' values in a round."""
        titles = {
            "worst client": ("worst", f"{self.name} of the worst client"),
            self.tail: (f"p{self.percentile}", f"{self.tail} of the {self.plural}"),
            "mean": ("mean", f"mean {self.name} of the clients"),
            "deviation": ("std", "standard deviation between clients"),
        }
        return {
            name: Quantity(f"{self.key}_{column}", title, self.is_share)
            for name, (column, title) in titles.items()
        }

    @property
    def worst(self) -> Quantity:
        """The value of the worst client."""
        return self.summaries["worst client"]

    def from_worst(self, values: Sequence[float]) -> list[int]:
        """Return the clients in order, from the worst to the best."""
        sign = 1 if self.is_share else -1
        return sorted(range(len(values)), key=lambda n: (sign * values[n], n))

    def show(self, value: str) -> str:
        """Return the format of a value in a chart."""
        return f"%{{{value}:.2%}}" if self.is_share else f"%{{{value}:.2f}}"

    def axis(self) -> dict[str, Any]:
        """Return the axis of the values."""
        return {
            "title": f"{self.name} on a client",
            **({"tickformat": ".0%"} if self.is_share else {}),
        }


MEASURES = (
    ClientMeasure(
        "accuracy", "accuracies", 10, True,
        "Accuracy on the clients after the last round that was evaluated: the lowest, that which "
        "nine out of ten clients exceed, the mean, and the standard deviation in percentage points."
    ),
    ClientMeasure(
        "perplexity", "perplexities", 90, False,
        "Perplexity on the clients after the last round that was evaluated: the highest, that "
        "which one out of ten clients exceeds, the mean, and the standard deviation."
    ),
)  # fmt: skip
"""What can be measured on each client."""
MOST_BARS = 60
"""A run with more clients than this gets a line in place of bars."""
FEW_BARS = 10
"""Up to this many bars are drawn narrow."""


def measured(comparison: Comparison) -> ClientMeasure | None:
    """Return what the runs measured on each client; None if nothing."""
    return next((m for m in MEASURES if groups_with(comparison, m.worst)), None)


def by_client(comparison: Comparison) -> FigureBlock:
    """Return the charts of the accuracy, or the perplexity, on each client."""
    measure = measured(comparison)
    if measure is None:
        return FigureBlock("", "")
    groups = groups_with(comparison, measure.worst)
    views = [View("each client", [clients_chart(groups, measure)])]
    views += [View(name, [summary_chart(groups, y)]) for name, y in measure.summaries.items()]
    note = (
        f"The {measure.name} of the global model on each client, after the last round that was "
        "evaluated, from the worst client to the best."
    )
    title = f"How does {measure.name} differ between clients?"
    return FigureBlock(title, note, views, wide=True, file="clients")


def clients_chart(groups: Sequence[SeedGroup], measure: ClientMeasure) -> Chart:
    """Return the clients' values from worst to best: bars for one run, else a line each."""
    values = [values_from_worst(group, measure) for group in groups]
    if len(groups) == 1 and len(groups[0].runs) == 1 and len(values[0]) <= MOST_BARS:
        return client_bars(groups[0], measure)
    hover = f"{measure.show('y')}, %{{x:.0f}} % of the clients are worse"
    traces = [
        curve(group, ranks(len(found)), found, hover)
        for group, found in zip(reversed(groups), reversed(values), strict=True)
    ]
    every = [x for found in values for x in found]
    bounds = {"range": [*share_range(every)]} if measure.is_share else {}
    x = {"title": "clients, from worst to best, %", "range": [-2, 102]}
    return chart(traces, x, {**measure.axis(), **bounds})


def values_from_worst(group: SeedGroup, measure: ClientMeasure) -> list[float]:
    """Return the clients' last known values from worst to best, mean over the runs."""
    tested = [
        last[measure.key] for run in group.runs if (last := last_tested(run.history, measure))
    ]
    found = [[values[n] for n in measure.from_worst(values)] for values in tested]
    if len({len(each) for each in found}) > 1:
        found = found[:1]
    return [fmean(column) for column in zip(*found, strict=True)]


def last_tested(history: Sequence[Record], measure: ClientMeasure) -> Record | None:
    """Return the last record with the clients' values."""
    return next((r for r in reversed(history) if r.get(measure.key)), None)


def ranks(clients: int) -> list[float]:
    """Return the share of the other clients that are worse than each, in percent.

    >>> ranks(3), ranks(1)
    ([0.0, 50.0, 100.0], [100.0])
    """
    return [100.0 * n / (clients - 1) for n in range(clients)] if clients > 1 else [100.0]


def share_range(shares: Sequence[float]) -> tuple[float, float]:
    """Return the range of an axis of shares: around them, but not below 0 or above 1."""
    room = 0.05 * (max(shares) - min(shares)) or 0.02
    return max(0.0, min(shares) - room), min(1.02, max(shares) + room)


def client_bars(group: SeedGroup, measure: ClientMeasure) -> Chart:
    """Return a bar for each client of a run, with the mean and the percentile as lines."""
    record = last_tested(group.first.history, measure) or {}
    found = record[measure.key]
    order = measure.from_worst(found)
    names = [str(n) for n in order]
    bars = {
        "type": "bar",
        "x": names,
        "y": [found[n] for n in order],
        "marker": {"color": f"--c{group.color}/0.4"},  # the lines across must stay visible
        "name": f"{measure.name} on a client",
        "hovertemplate": f"client %{{x}}: {measure.show('y')}<extra></extra>",
    }
    values = {name: record[measure.summaries[name].key] for name in ("mean", measure.tail)}
    form = ".1%" if measure.is_share else ".2f"
    label = " · ".join(f"{name} {value:{form}}" for name, value in values.items())
    hover = measure.show("y")
    lines = [
        level_line(names, values["mean"], "mean", "dash", hover, label),
        level_line(names, values[measure.tail], measure.tail, "dot", hover),
    ]
    x = {"title": "client", "type": "category", "showgrid": False}
    y = {**measure.axis(), **from_zero()}
    return chart([bars, *lines], x, y, bargap=0.25 if len(order) > FEW_BARS else 0.6)


def level_line(
    names: Sequence[str], y: float, name: str, dash: str, hover: str, label: str = ""
) -> Chart:
    """Return a horizontal line across all clients, with a label above the first ones."""
    return {
        "type": "scatter",
        "mode": "lines+text",
        "x": [names[0], names[-1]],
        "y": [y, y],
        "text": [label, ""],
        "textposition": "top right",
        "textfont": {"color": "--ink", "size": 11},
        "name": name,
        "line": {"color": "--ink", "width": 1.5, "dash": dash},
        "hovertemplate": f"{name}: {hover}<extra></extra>",
    }


def summary_chart(groups: Sequence[SeedGroup], quantity: Quantity) -> Chart:
    """Return the chart of a summary of the clients' values against rounds."""
    low, high = span(groups, quantity)
    traces = group_traces(groups, [group.means(rounds) for group in groups], quantity)
    y: dict[str, Any] = y_axis(quantity, max(low, 0.0) if low > -0.02 else low, high)
    return chart(traces, rounds_axis(groups), y)
