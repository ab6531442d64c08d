"""Draw reality.png from reality.csv: `python reproduce/theory/draw.py` (a second)."""

import math

import matplotlib
from tables import HERE, read

matplotlib.use("Agg")
from matplotlib import pyplot as plt

LINES = {
    "log10_theorem": "Theorem 1, corrected",
    "log10_sharper": "moments followed one by one",
    "log10_travel": "no theorem: distance travelled",
}


def main() -> None:
    """Decimal logarithms of the deviation and the bounds over the steps of the last round."""
    rows = read(HERE / "reality.csv")
    names = list(dict.fromkeys(row["task"] for row in rows))
    figure, axes = plt.subplots(1, len(names), figsize=(3.6 * len(names), 3.4), sharey=True)
    for name, axis in zip(names, axes, strict=True):
        mine = [row for row in rows if row["task"] == name and int(row["step"]) > 0]
        mine = [row for row in mine if row["round"] == mine[-1]["round"]]
        steps = [int(row["step"]) for row in mine]
        for column, label in LINES.items():
            axis.plot(steps, [float(row[column]) for row in mine], label=label)
        real = [math.log10(float(row["largest"])) for row in mine]
        axis.plot(steps, real, "k", label="real, largest")
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("local step")
    axes[0].set_ylabel("log₁₀ of the deviation")
    axes[0].legend(fontsize=7, loc="upper left")
    figure.tight_layout()
    figure.savefig(HERE / "reality.png", dpi=110)


if __name__ == "__main__":
    main()
