"""Draw reality.csv: `python reproduce/theory/draw.py` (a second).

Writes reality.png, and a copy under docs/ for the page.
"""

import math
from shutil import copyfile

import matplotlib
from page import NAMES, PAGE
from tables import HERE, read

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

CURVES = {
    "theorem": "Theorem 1, corrected",
    "sharper": "moments bounded separately",
    "travel": "no theorem: distance traveled",
    "real": "real, largest client",
}
COLORS = ("tab:blue", "tab:orange", "tab:green", "black")
TICKS = (-2, 0, 2, 4, 10, 30, 100, 300)
WIDTH = 3
SHOWN = PAGE.parents[1] / "images" / "theory-reality.png"


def main() -> None:
    """The deviation and its bounds over the steps of each task's last round."""
    rows = read(HERE / "reality.csv")
    names = list(dict.fromkeys(row["task"] for row in rows))
    height = math.ceil((len(names) + 1) / WIDTH)  # the last panel has the legend
    figure, axes = plt.subplots(
        height, WIDTH, figsize=(10.5, 3.2 * height), sharey=True, layout="tight"
    )
    last = axes.flat[-1]
    for axis in axes.flat[len(names) :]:
        axis.axis("off")
    for name, axis in zip(names, axes.flat, strict=False):
        task_rows = [row for row in rows if row["task"] == name and int(row["step"]) > 0]
        draw(axis, [row for row in task_rows if row["round"] == task_rows[-1]["round"]])
        axis.set_title(f"{NAMES[name]} ({task_rows[0]['images']} images)", fontsize=10)
    for axis in axes[:, 0]:
        axis.set_ylabel("distance from centralized Adam")
    last.legend(*axes[0, 0].get_legend_handles_labels(), loc="center", frameon=False)
    note = "The axis is compressed:\nabove 10⁴, equal steps are not equal factors."
    last.text(0.5, 0.16, note,
              ha="center", fontsize=8, transform=last.transAxes)  # fmt: skip
    figure.savefig(HERE / "reality.png", dpi=110)
    copyfile(HERE / "reality.png", SHOWN)


def draw(axis: Axes, rows: list[dict[str, str]]) -> None:
    """Draw one task; each line is labeled with its last value."""
    steps = [int(row["step"]) for row in rows]
    for (name, label), color in zip(CURVES.items(), COLORS, strict=True):
        logs = [math.log10(float(r["largest"])) if name == "real" else float(r[f"log10_{name}"])
                for r in rows]  # fmt: skip
        axis.plot(steps, logs, color=color, label=label)
        axis.annotate(power(f"{logs[-1]:.1f}"), (steps[-1], logs[-1]), (3, 0), fontsize=8,
                      textcoords="offset points", va="center", color=color)  # fmt: skip
    axis.set_yscale("asinh", linear_width=4)
    axis.set_yticks(TICKS, [power(str(tick)) for tick in TICKS])
    axis.set_xlim(0, steps[-1] * 1.25)
    axis.set_xticks(range(0, steps[-1] + 1, 10))
    axis.grid(alpha=0.2)
    axis.set_xlabel("local step")


def power(exponent: str) -> str:
    """A power of ten for matplotlib."""
    return f"$10^{{{exponent}}}$"


if __name__ == "__main__":
    main()
