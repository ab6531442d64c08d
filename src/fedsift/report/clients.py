"""How the accuracy of the global model differs between clients: charts and a table."""

from __future__ import annotations

from collections.abc import Sequence
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

SUMMARIES = {
    "worst client": Quantity("client_accuracy_worst", "accuracy of the worst client", True),
    "10th percentile": Quantity("client_accuracy_p10", "10th percentile of the accuracies", True),
    "mean": Quantity("client_accuracy_mean", "mean accuracy of the clients", True),
    "deviation": Quantity("client_accuracy_std", "standard deviation between clients", True),
}
"""Summaries of the clients' accuracies in a round."""
MOST_BARS = 60
"""A run with more clients than this gets a line in place of bars."""
FEW_BARS = 10
"""Up to this many bars are drawn narrow."""


def by_client(comparison: Comparison) -> FigureBlock:
    """Return the charts of the accuracy on each client."""
    groups = groups_with(comparison, SUMMARIES["worst client"])
    if not groups:
        return FigureBlock("", "")
    views = [View("each client", [clients_chart(groups)])]
    views += [View(name, [summary_chart(groups, y)]) for name, y in SUMMARIES.items()]
    note = (
        "The accuracy of the global model on each client, after the last round that was evaluated, "
        "from the worst client to the best."
    )
    return FigureBlock(
        "How does accuracy differ between clients?", note, views, wide=True, file="clients"
    )


def clients_chart(groups: Sequence[SeedGroup]) -> Chart:
    """Return the clients' accuracies in ascending order: bars for one run, else a line each."""
    accuracies = [sorted_accuracies(group) for group in groups]
    if len(groups) == 1 and len(groups[0].runs) == 1 and len(accuracies[0]) <= MOST_BARS:
        return client_bars(groups[0])
    traces = [
        curve(group, ranks(len(found)), found, "%{y:.2%}, %{x:.0f} % of the clients are worse")
        for group, found in zip(reversed(groups), reversed(accuracies), strict=True)
    ]
    every = [x for found in accuracies for x in found]
    y = {"title": "accuracy on a client", "tickformat": ".0%", "range": [*share_range(every)]}
    x = {"title": "clients, from worst to best, %", "range": [-2, 102]}
    return chart(traces, x, y)


def sorted_accuracies(group: SeedGroup) -> list[float]:
    """Return the clients' last known accuracies in ascending order, mean over the runs."""
    tested = [last for run in group.runs if (last := last_tested(run.history))]
    found = [sorted(record["client_accuracy"]) for record in tested]
    if len({len(each) for each in found}) > 1:
        found = found[:1]
    return [fmean(column) for column in zip(*found, strict=True)]


def last_tested(history: Sequence[Record]) -> Record | None:
    """Return the last record with the clients' accuracies."""
    return next((r for r in reversed(history) if r.get("client_accuracy")), None)


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


def client_bars(group: SeedGroup) -> Chart:
    """Return a bar for each client of a run, with the mean and the 10th percentile as lines."""
    record = last_tested(group.first.history) or {}
    accuracies = record["client_accuracy"]
    order = sorted(range(len(accuracies)), key=lambda n: (accuracies[n], n))
    names = [str(n) for n in order]
    bars = {
        "type": "bar",
        "x": names,
        "y": [accuracies[n] for n in order],
        "marker": {"color": f"--c{group.color}/0.4"},  # the lines across must stay visible
        "name": "accuracy on a client",
        "hovertemplate": "client %{x}: %{y:.2%}<extra></extra>",
    }
    values = {name: record[SUMMARIES[name].key] for name in ("mean", "10th percentile")}
    label = " · ".join(f"{name} {value:.1%}" for name, value in values.items())
    lines = [
        level_line(names, values["mean"], "mean", "dash", label),
        level_line(names, values["10th percentile"], "10th percentile", "dot"),
    ]
    x = {"title": "client", "type": "category", "showgrid": False}
    y = {"title": "accuracy on a client", "tickformat": ".0%", **from_zero()}
    return chart([bars, *lines], x, y, bargap=0.25 if len(order) > FEW_BARS else 0.6)


def level_line(names: Sequence[str], y: float, name: str, dash: str, label: str = "") -> Chart:
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
        "hovertemplate": f"{name}: %{{y:.2%}}<extra></extra>",
    }


def summary_chart(groups: Sequence[SeedGroup], quantity: Quantity) -> Chart:
    """Return the chart of a summary of the clients' accuracies against rounds."""
    low, high = span(groups, quantity)
    traces = group_traces(groups, [group.means(rounds) for group in groups], quantity)
    y: dict[str, Any] = y_axis(quantity, max(low, 0.0) if low > -0.02 else low, high)
    return chart(traces, rounds_axis(groups), y)
