"""Draw the picture of the front page from committed results: `python docs/front_picture.py`."""

import csv
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "reproduce" / "results"
PICTURE = ROOT / "docs" / "images" / "front"
TARGET = 80.4
"""Test accuracy in percent: the paper's target for the CNN with IID data."""


class Line(NamedTuple):
    """A method in the picture, and the committed file that has its curve."""

    label: str
    method: str
    file: str
    color: str
    style: str
    label_at: tuple[float, float]


LINES = (
    Line("sift", "sift", "sift", "#c8553d", "-", (0.0014, 88.2)),
    Line(
        "Sparse FedSGD",
        "sparse-fedsgd@lr=0.1",
        "fig2",
        "#8d99ae",
        "--",
        (0.0064, 79.3),
    ),
    Line("FedAdam-SSM", "fedadam-ssm", "sift", "#2a9d8f", "-", (0.035, 62.5)),
    Line("FedAdam (dense)", "fedadam", "sift", "#1f4e5f", "-", (0.62, 73.0)),
)
"""The methods in the picture."""


class Curve(NamedTuple):
    """Means over three seeds, with the lowest and highest of each round."""

    megabytes: list[float]
    accuracy: list[float]
    lowest: list[float]
    highest: list[float]


def curve_of(line: Line) -> Curve:
    """Read a method's curve."""
    path = RESULTS / f"{line.file}-cnn-fashion-mnist-iid.csv"
    with path.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["method"] == line.method]
    percent = ([100 * float(row[key]) for row in rows] for key in ("accuracy", "lowest", "highest"))
    return Curve([float(row["megabytes"]) for row in rows], *percent)


def kilobytes_to_target(line: Line) -> float:
    """Return the mean traffic of the round in which each seed first reached the target."""
    with (RESULTS / "sift.csv").open(encoding="utf-8", newline="") as file:
        sent = [1e3 * float(row["up"]) for row in csv.DictReader(file) if is_of(row, line)]
    with (RESULTS / "table1.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if is_of(row, line)]
    return fmean(sent or [1e3 * float(row["megabytes"]) for row in rows])


def is_of(row: dict[str, str], line: Line) -> bool:
    """Whether a row of a table is one of a line's runs."""
    key = (row["task"], row["setting"], row["method"])
    return key == ("cnn-fashion-mnist", "iid", line.method)


def draw(axes: Axes) -> None:
    """Draw every line, its label, and the target."""
    axes.axhline(TARGET, color="0.45", ls=":", lw=1)
    axes.text(3.3e-4, TARGET - 0.5, f"target {TARGET} %", va="top", fontsize=8, color="0.35")
    for line in LINES:
        curve = curve_of(line)
        width = 2.6 if line.method == "sift" else 1.9
        axes.plot(curve.megabytes, curve.accuracy, line.style, color=line.color, lw=width)
        axes.fill_between(
            curve.megabytes, curve.lowest, curve.highest, color=line.color, alpha=0.13, lw=0
        )
        kilobytes = kilobytes_to_target(line)
        axes.plot(kilobytes / 1e3, TARGET, "o", color=line.color, ms=5, zorder=4)
        x, y = line.label_at
        axes.text(x, y, line.label, color=line.color, fontsize=10, fontweight="bold", va="top")
        digits = 1 if kilobytes < 100 else 0
        needed = f"{kilobytes:,.{digits}f} kB to target"
        axes.text(x, y - 2.1, needed, color=line.color, fontsize=8.5, va="top")
    axes.set(
        xscale="log", xlim=(3e-4, 50), ylim=(50, 92.5),
        xlabel="sent by each client, MB (logarithmic)", ylabel="test accuracy, %",
    )  # fmt: skip
    axes.xaxis.set_major_locator(LogLocator())
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())


def main() -> None:
    """Write the picture as SVG and PNG."""
    style = {"axes.spines.right": False, "axes.spines.top": False, "svg.hashsalt": "fedsift"}
    with mpl.rc_context({**style, "axes.grid": True, "grid.alpha": 0.22, "font.size": 9.5}):
        figure = Figure(figsize=(7.4, 3.9), layout="constrained")
        draw(figure.subplots())
        figure.savefig(PICTURE.with_suffix(".png"), dpi=160)


if __name__ == "__main__":
    main()
