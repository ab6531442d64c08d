"""Write the tables of docs/explanation/sift.md: `python reproduce/sift/page.py` (at once)."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

HERE = Path(__file__).parent
TABLE = HERE / "ablation.csv"
PAGE = HERE.parents[1] / "docs" / "explanation" / "sift.md"
FIRST, LAST = "<!-- ablation -->", "<!-- end of ablation -->"
TASKS = {
    "cnn-fashion-mnist": "CNN, Fashion-MNIST",
    "vgg11-cifar10": "VGG-11, CIFAR-10",
    "resnet18-cifar10": "ResNet-18, CIFAR-10",
    "resnet18-svhn": "ResNet-18, SVHN",
}
SETTINGS = {"iid": "IID", "noniid": "Dirichlet 0.1"}
NONE_YET = "There are no figures yet."
Row = dict[str, str]


def rows() -> list[Row]:
    """The committed table; empty if there is none."""
    if not TABLE.exists():
        return []
    with TABLE.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def tables(found: Sequence[Row]) -> Iterator[str]:
    """For each task and setting: a heading, a table, and where it was made."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in found:
        groups.setdefault((row["task"], row["setting"]), []).append(row)
    for (task, setting), own in groups.items():
        target, harder = (mean(own, key) for key in ("target", "harder_target"))
        yield f"### {TASKS.get(task, task)}, {SETTINGS.get(setting, setting)}"
        yield (
            f"Target {percent(target)}; the harder one, FedAdam's own best, {percent(harder)}. "
            "kB a client, up and down."
        )
        yield markdown(lines(own))
        yield made(own)


def lines(own: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    """A line a variant, its seeds as one."""
    yield (
        "variant", "seeds", "up to target", "down to target", "up to harder", "down to harder",
        "best accuracy", "final accuracy",
    )  # fmt: skip
    for variant in dict.fromkeys(row["variant"] for row in own):
        seeds = [row for row in own if row["variant"] == variant]
        yield (
            variant, str(len(seeds)),
            *(kilobytes(mean(seeds, f"{way}_bytes_to_{goal}"))
              for goal in ("target", "harder") for way in ("uplink", "downlink")),
            percent(mean(seeds, "best_accuracy")), percent(mean(seeds, "final_accuracy")),
        )  # fmt: skip


def mean(own: Sequence[Row], key: str) -> float | None:
    """The mean over the rows; None unless each has a figure.

    >>> mean([{"x": "1"}, {"x": "3"}], "x"), mean([{"x": "1"}, {"x": ""}], "x")
    (2.0, None)
    """
    cells = [row[key] for row in own]
    return fmean(map(float, cells)) if all(cells) else None


def kilobytes(x: float | None) -> str:
    """In kB; a dash where some seed did not get there."""
    return "–" if x is None else f"{x / 1000:,.1f}".replace(",", " ")


def percent(x: float | None) -> str:
    """In percent."""
    return "–" if x is None else f"{100 * x:.2f} %"


def markdown(body: Iterator[tuple[str, ...]]) -> str:
    """A table."""
    head, *rest = body
    ruled = [head, ("---", *("--:",) * (len(head) - 1)), *rest]
    return "\n".join("| " + " | ".join(line) + " |" for line in ruled)


def made(own: Sequence[Row]) -> str:
    """Where a table's figures come from."""
    places = dict.fromkeys(f"{r['device']}, {r['precision']}, commit {r['commit']}" for r in own)
    clients = "/".join(sorted({row["clients"] for row in own}))
    seeds = ", ".join(sorted({row["seed"] for row in own}))
    return f"{clients} clients; seeds {seeds}; {'; '.join(places)}."


def filled(page: str, found: Sequence[Row]) -> str:
    """The page with its tables, or with how to make them, between the marks."""
    before, _, rest = page.partition(FIRST)
    _, _, after = rest.partition(LAST)
    content = "\n\n".join(tables(found)) if found else NONE_YET
    return f"{before}{FIRST}\n\n{content}\n\n{LAST}{after}"


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text("utf-8"), rows()), encoding="utf-8")
