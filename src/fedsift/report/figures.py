"""Static figures, for papers and READMEs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path

from fedsift.runs.compare import megabytes
from fedsift.simulation import Record


def accuracy_figure(
    histories: Mapping[str, Sequence[Record]],
    path: Path,
    title: str,
    target: float | None = None,
) -> None:
    """Plot accuracy against the uplink and against rounds, as PNG and SVG."""
    from matplotlib.figure import Figure  # imported here because it takes a second

    figure = Figure(figsize=(10, 4.4), layout="constrained")
    by_traffic, by_rounds = figure.subplots(1, 2, sharey=True)
    styles = cycle(("-", "--", "-.", ":"))
    for (name, history), style in zip(histories.items(), styles, strict=False):
        tested = [r for r in history if r["accuracy"] is not None]
        sent = [r for r in tested if r["round"]]  # round 0 sends nothing, and the scale is log
        for axes, records, x in ((by_traffic, sent, megabytes), (by_rounds, tested, round_of)):
            accuracy = [100 * r["accuracy"] for r in records]
            axes.plot([x(r) for r in records], accuracy, style, label=name, linewidth=1.6)
    by_traffic.set(xscale="log", xlabel="uplink per client, MB", ylabel="test accuracy, %")
    by_rounds.set(xlabel="round")
    for axes in (by_traffic, by_rounds):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if target is not None:
            axes.axhline(100 * target, color="0.4", linestyle=":", linewidth=1)
    figure.suptitle(title)
    figure.legend(
        *by_traffic.get_legend_handles_labels(), frameon=False, loc="outside lower center", ncols=5
    )
    for suffix in (".png", ".svg"):
        figure.savefig(path.with_suffix(suffix), dpi=150)


def round_of(record: Record) -> float:
    """Return the number of a record's round."""
    return float(record["round"])
