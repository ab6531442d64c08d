"""Write the results of accuracy.py into the documentation: `python reproduce/privacy/page.py`.

The tables go to docs/how-to/differential-privacy.md, the figure to docs/images.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parents[1]))
from doc_tables import ROOT, between, listed, percent, table

HERE = Path(__file__).parent
PAGE = ROOT / "docs" / "how-to" / "differential-privacy.md"
PICTURE = ROOT / "docs" / "images" / "private-accuracy.svg"
BUDGETS = ("1", "2", "4", "8", "none")
NAMES = {"none": "∞"}
COLORS = {"fedavg": "#8d99ae", "fedadam": "#1f4e5f", "sift-common": "#c8553d"}
COHORT, ROUNDS = 100, 20
"""The expected clients per round, and the rounds, of accuracy.py."""
Row = dict[str, str]


def rows(name: str, folder: Path = HERE) -> list[Row]:
    """Return the committed rows of a table; none if it is not there."""
    path = folder / f"{name}.csv"
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def pieces(
    accuracy: Sequence[Row], variants: Sequence[Row], trials: Sequence[Row]
) -> Iterator[str]:
    """Yield the tables, and where they come from."""
    if not trials:
        return
    if accuracy:
        yield table(accuracies(accuracy))
    if variants:
        yield "Variants of `sift-common` with ε = 4, with the learning rate and clip chosen for it:"
        yield table(of_variants(variants))
    yield (
        "The trials on the validation split with ε = 4. The clip is given in units of the median "
        "norm of what 20 clients send; 0.00 % are runs that diverged:"
    )
    yield table(of_trials(trials))
    yield f"{origin([*accuracy, *variants, *trials])}."


def accuracies(found: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    """Yield a line per method: its test accuracy by ε, and what it sends."""
    yield (
        "method",
        *(f"ε = {NAMES.get(x, x)}" for x in BUDGETS),
        "seeds",
        "values with noise",
        "up",
    )
    for method in dict.fromkeys(row["method"] for row in found):
        ours = [row for row in found if row["method"] == method]
        noisy = [row for row in ours if row["noisy_values"]]
        yield (
            f"`{method}`",
            *(percent(mean(row for row in ours if row["budget"] == x)) for x in BUDGETS),
            "/".join(sorted({row["seed"] for row in ours})),
            values_of(noisy),
            upload_of(noisy),
        )


def of_variants(found: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    """Yield a line per variant."""
    yield "density", "model", "accuracy", "values with noise", "up"
    for row in found:
        model = "the last one" if row.get("average") == "0" else "averaged"
        density, accuracy = float(row["density"]), float(row["accuracy"])
        yield f"{density:g}", model, percent(accuracy), values_of([row]), upload_of([row])


def of_trials(found: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    """Yield a line per trial."""
    yield "method", "learning rate", "clip", "density", "accuracy", "values with noise", "up"
    for row in found:
        is_done = bool(row.get("noisy_values"))
        yield (
            f"`{row['method']}`",
            row["lr"],
            row["clip"] + (f", moments {row['moments']}" if row.get("moments") else ""),
            row.get("density") or "–",
            percent(float(row["accuracy"])),
            values_of([row] if is_done else []),
            upload_of([row] if is_done else []),
        )


def mean(found: Iterable[Row]) -> float | None:
    """Return the mean accuracy of runs; None if there are none."""
    accuracies = [float(row["accuracy"]) for row in found]
    return fmean(accuracies) if accuracies else None


def values_of(found: Sequence[Row]) -> str:
    """Return the number of values that get noise."""
    return f"{int(found[0]['noisy_values']):,}" if found else "–"


def upload_of(found: Sequence[Row]) -> str:
    """Return the bytes of one client's upload; a client takes part in a tenth of all rounds."""
    if not found:
        return "–"
    uploads = fmean(float(row["up_bytes"]) for row in found) / (ROUNDS * COHORT / 1000)
    return f"{uploads / 1e3:,.1f} kB"


def origin(found: Sequence[Row]) -> str:
    """Return the devices and commits of runs."""
    devices, commits = (
        sorted({row[key] for row in found if row.get(key)}) for key in ("device", "commit")
    )
    return f"{listed('Device', devices)}; {listed('commit', commits)}"


def draw(axes: Axes, found: Sequence[Row]) -> None:
    """Draw a line per method, with a mark per seed."""
    for method, color in COLORS.items():
        ours = [row for row in found if row["method"] == method]
        by_budget = [(at, [r for r in ours if r["budget"] == x]) for at, x in enumerate(BUDGETS)]
        line = [(at, 100 * fmean(float(r["accuracy"]) for r in rs)) for at, rs in by_budget if rs]
        axes.plot(*zip(*line, strict=True), "-", color=color, lw=2, label=method)
        marks = [(at, 100 * float(row["accuracy"])) for at, rs in by_budget for row in rs]
        axes.plot(*zip(*marks, strict=True), "o", color=color, ms=4)
    axes.set_xticks(range(len(BUDGETS)), [NAMES.get(x, x) for x in BUDGETS])
    axes.set(xlabel="ε", ylabel="test accuracy, %")
    axes.legend(frameon=False)


def main() -> None:
    """Write the tables, and draw the figure if every method has results."""
    accuracy, variants, trials = (rows(name) for name in ("accuracy", "variants", "settings"))
    page = between(PAGE.read_text("utf-8"), "accuracy", pieces(accuracy, variants, trials))
    PAGE.write_text(page, encoding="utf-8")
    if {row["method"] for row in accuracy} != COLORS.keys():
        return
    style = {"axes.spines.right": False, "axes.spines.top": False, "svg.hashsalt": "fedsift"}
    with mpl.rc_context({**style, "axes.grid": True, "grid.alpha": 0.22, "font.size": 9.5}):
        figure = Figure(figsize=(6.2, 3.4), layout="constrained")
        draw(figure.subplots(), accuracy)
        figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
