"""Static figures, for papers and READMEs."""

from __future__ import annotations

import math
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
        accuracy = [math.nan if (a := r["accuracy"]) is None else 100 * a for r in history]
        by_traffic.plot([megabytes(r) for r in history], accuracy, style, label=name, linewidth=1.6)
        by_rounds.plot([r["round"] for r in history], accuracy, style, linewidth=1.6)
    by_traffic.set(xscale="log", xlabel="uplink per client, MB", ylabel="test accuracy, %")
    by_rounds.set(xlabel="round")
    for axes in (by_traffic, by_rounds):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if target is not None:
            axes.axhline(100 * target, color="0.4", linestyle=":", linewidth=1)
    figure.suptitle(title)
    figure.legend(frameon=False, loc="outside lower center", ncols=5)
    for suffix in (".png", ".svg"):
        figure.savefig(path.with_suffix(suffix), dpi=150)
