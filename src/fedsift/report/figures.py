"""Static figures, for papers and READMEs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path

from fedsift.runs.compare import MIBIT
from fedsift.simulation import Record


def accuracy_figure(
    histories: Mapping[str, Sequence[Record]],
    path: Path,
    title: str,
    target: float | None = None,
) -> None:
    """Accuracy against Mibit sent, and against rounds, side by side; PNG and SVG beside it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (by_bits, by_rounds) = plt.subplots(
        1, 2, figsize=(10, 4.4), sharey=True, layout="constrained"
    )
    styles = cycle(("-", "--", "-.", ":"))
    for (name, history), style in zip(histories.items(), styles, strict=False):
        accuracy = [100 * float(r["accuracy"] or 0) for r in history]
        mibit = [float(r["uplink_bits_paper"] or 0) / MIBIT for r in history]
        by_bits.plot(mibit, accuracy, style, label=name, linewidth=1.6)
        by_rounds.plot([int(r["round"] or 0) for r in history], accuracy, style, linewidth=1.6)
    by_bits.set(xscale="log", xlabel="uplink, Mibit a client", ylabel="test accuracy, %")
    by_rounds.set(xlabel="round")
    for axes in (by_bits, by_rounds):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if target is not None:
            axes.axhline(100 * target, color="0.4", linestyle=":", linewidth=1)
    figure.suptitle(title)
    figure.legend(frameon=False, loc="outside lower center", ncols=5)
    for suffix in (".png", ".svg"):
        figure.savefig(path.with_suffix(suffix), dpi=150)
    plt.close(figure)
