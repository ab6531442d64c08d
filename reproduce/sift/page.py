"""Write the tables of docs/explanation/sift.md: `python reproduce/sift/page.py` (at once)."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TABLE = HERE / "ablation.csv"
COMPARED = ROOT / "reproduce" / "results" / "sift.json"
PAGE = ROOT / "docs" / "explanation" / "sift.md"
TASKS = {
    "cnn-fashion-mnist": "CNN, Fashion-MNIST",
    "vgg11-cifar10": "VGG-11, CIFAR-10",
    "resnet18-cifar10": "ResNet-18, CIFAR-10",
    "resnet18-svhn": "ResNet-18, SVHN",
    "vit-tiny-cifar10": "ViT-Tiny, CIFAR-10",
    "char-lm": "Character language model, Python's modules",
}
SETTINGS = {
    "iid": "IID",
    "noniid": "Dirichlet 0.1",
    "theta-0.5": "Dirichlet 0.5",
    "theta-1": "Dirichlet 1",
}
UNITS = {"kB": 1e3, "MB": 1e6}
NONE_YET = "There are no figures yet."
Row = dict[str, str]
Told = dict[str, Any]


def compared() -> list[Told]:
    """The committed comparison with other methods; empty if there is none."""
    found: list[Told] = json.loads(COMPARED.read_text("utf-8")) if COMPARED.exists() else []
    return found


def rows() -> list[Row]:
    """The committed ablation; empty if there is none."""
    if not TABLE.exists():
        return []
    with TABLE.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def comparison(found: Sequence[Told]) -> Iterator[str]:
    """For each task and setting: a heading, a table of the methods, and where it was made."""
    groups: dict[tuple[str, str], list[Told]] = {}
    for told in found:
        groups.setdefault((told["task"], told["setting"]), []).append(told)
    for (task, setting), own in groups.items():
        yield f"### {name_of(task, setting)}"
        target, harder = (percent(own[0][goal]["accuracy"]) for goal in ("target", "harder"))
        unit = unit_of(1e6 * (told["target"]["up"] or {}).get("mean", math.inf) for told in own)
        yield (
            f"Traffic in {unit} per client to {target}, and up to {harder}, FedAdam's best. "
            f"Down excludes the first model, {amount(1e6 * own[0]['first_model'], unit)} {unit} "
            "with every method."
        )
        yield markdown(methods(own, unit))
        yield "; ".join(made_by(own)) + "."


def methods(own: Sequence[Told], unit: str) -> Iterator[tuple[str, ...]]:
    """A line a method, its seeds as one."""
    yield (
        "method", "rounds", "up", "down", "up: times fewer", "both: times fewer",
        "up to FedAdam's best", "best accuracy", "final accuracy",
    )  # fmt: skip
    for told in own:
        target, harder = told["target"], told["harder"]
        rounds = (target["round"] or {}).get("mean")
        up, down, further = (
            amount(cost and 1e6 * cost["mean"], unit)
            for cost in (target["up"], target["down"], harder["up"])
        )
        yield (
            f"`{told['method']}`", whole(rounds), up, down, times(target["ratio_up"]),
            times(target["ratio_both"]), further,
            percent(told["best_accuracy"]["mean"]), percent(told["final_accuracy"]["mean"]),
        )  # fmt: skip


def made_by(own: Sequence[Told]) -> Iterator[str]:
    """Where the lines of a table come from, those from one place together."""
    groups: dict[str, list[str]] = {}
    for told in own:
        seeds = [{"seed": seed} for seed in told["seeds"]]
        place = made([each | seed for each in told["environment"] for seed in seeds])
        groups.setdefault(place, []).append(f"`{told['method']}`")
    for place, names in groups.items():
        yield f"{', '.join(names)}: {place}"


def ablation(found: Sequence[Row]) -> Iterator[str]:
    """For each task and setting: a heading, a table of the variants, and where it was made."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in found:
        groups.setdefault((row["task"], row["setting"]), []).append(row)
    for (task, setting), own in groups.items():
        target, harder = (mean(own, key) for key in ("target", "harder_target"))
        yield f"### {name_of(task, setting)}: variants"
        unit = unit_of(float(row["uplink_bytes_to_target"] or math.inf) for row in own)
        yield (
            f"Target {percent(target)}; harder target, FedAdam's own best: {percent(harder)}. "
            f"Traffic in {unit} per client; down includes the first model."
        )
        yield markdown(variants(own, unit))
        clients = "/".join(sorted({row["clients"] for row in own}))
        yield f"{clients} clients; {made(own)}."


def variants(own: Sequence[Row], unit: str) -> Iterator[tuple[str, ...]]:
    """A line a variant, its seeds as one."""
    yield (
        "variant", "seeds", "up to target", "down to target", "up to harder", "down to harder",
        "best accuracy", "final accuracy",
    )  # fmt: skip
    for variant in dict.fromkeys(row["variant"] for row in own):
        seeds = [row for row in own if row["variant"] == variant]
        yield (
            variant, str(len(seeds)),
            *(amount(mean(seeds, f"{way}_bytes_to_{goal}"), unit)
              for goal in ("target", "harder") for way in ("uplink", "downlink")),
            percent(mean(seeds, "best_accuracy")), percent(mean(seeds, "final_accuracy")),
        )  # fmt: skip


def name_of(task: str, setting: str) -> str:
    """What a reader calls them."""
    name = "by document" if (task, setting) == ("char-lm", "noniid") else SETTINGS[setting]
    return f"{TASKS[task]}, {name}"


def mean(own: Sequence[Row], key: str) -> float | None:
    """The mean over the rows; None unless each has a figure.

    >>> mean([{"x": "1"}, {"x": "3"}], "x"), mean([{"x": "1"}, {"x": ""}], "x")
    (2.0, None)
    """
    cells = [row[key] for row in own]
    return fmean(map(float, cells)) if all(cells) else None


def unit_of(sent: Iterable[float]) -> str:
    """The unit in which the least of the bytes is a number of a few digits.

    >>> unit_of([5_200.0, 1_223_300.0]), unit_of([5_232_600.0])
    ('kB', 'MB')
    """
    return "MB" if min(sent) >= UNITS["MB"] else "kB"


def amount(x: float | None, unit: str) -> str:
    """Bytes in a unit; a dash where some seed did not get there.

    >>> amount(1_223_300.0, "kB"), amount(None, "kB")
    ('1 223.3', '–')
    """
    return "–" if x is None else f"{x / UNITS[unit]:,.1f}".replace(",", " ")


def times(x: float | None) -> str:
    """A ratio in three digits; a dash where there is none.

    >>> times(38.04), times(0.05711), times(None)
    ('38', '0.0571', '–')
    """
    return "–" if x is None else f"{x:.0f}" if x >= 10 else f"{x:.3g}"


def whole(x: float | None) -> str:
    """A mean of rounds."""
    return "–" if x is None else f"{x:.0f}"


def percent(x: float | None) -> str:
    """In percent."""
    return "–" if x is None else f"{100 * x:.2f} %"


def markdown(body: Iterator[tuple[str, ...]]) -> str:
    """A table."""
    head, *rest = body
    ruled = [head, ("---", *("--:",) * (len(head) - 1)), *rest]
    return "\n".join("| " + " | ".join(line) + " |" for line in ruled)


def made(places: Sequence[dict[str, Any]]) -> str:
    """Where a table's figures come from."""
    commits: dict[str, dict[str, None]] = {}  # by device; a dict keeps their order
    for each in places:
        commits.setdefault(f"{each['device']}, {each['precision']}", {})[each["commit"]] = None
    found = (f"{device}, {listed('commit', own)}" for device, own in commits.items())
    seeds = listed("seed", sorted({str(each["seed"]) for each in places}))
    return f"{seeds}, {' and '.join(found)}"


def listed(what: str, names: Collection[str]) -> str:
    """One or several of something.

    >>> listed("seed", ["0"]), listed("seed", ["0", "1"])
    ('seed 0', 'seeds 0, 1')
    """
    return f"{what}{'s' * (len(names) > 1)} {', '.join(names)}"


def filled(page: str, found: Sequence[Told], ablated: Sequence[Row]) -> str:
    """The page with its tables between the marks."""
    page = between(page, "comparison", comparison(found))
    return between(page, "ablation", ablation(ablated))


def between(page: str, mark: str, pieces: Iterator[str]) -> str:
    """The page with the pieces between the marks, or with a word that there are none."""
    first, last = f"<!-- {mark} -->", f"<!-- end of {mark} -->"
    before, _, rest = page.partition(first)
    _, _, after = rest.partition(last)
    content = "\n\n".join(pieces) or NONE_YET
    return f"{before}{first}\n\n{content}\n\n{last}{after}"


if __name__ == "__main__":
    text = filled(PAGE.read_text("utf-8"), compared(), rows())
    PAGE.write_text(text, encoding="utf-8")
