"""Write the tables of docs/explanation/sift.md: `python reproduce/sift/page.py`."""

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
Line = dict[str, Any]


def compared() -> list[Line]:
    """Return the committed comparison with other methods; empty if there is none."""
    found: list[Line] = json.loads(COMPARED.read_text("utf-8")) if COMPARED.exists() else []
    return found


def rows() -> list[Row]:
    """Return the committed ablation; empty if there is none."""
    if not TABLE.exists():
        return []
    with TABLE.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def comparison(found: Sequence[Line]) -> Iterator[str]:
    """Yield a heading, a table of the methods and their environments for each task and setting."""
    groups: dict[tuple[str, str], list[Line]] = {}
    for line in found:
        groups.setdefault((line["task"], line["setting"]), []).append(line)
    for (task, setting), own in groups.items():
        yield f"### {name_of(task, setting)}"
        target, harder = (percent(own[0][goal]["accuracy"]) for goal in ("target", "harder"))
        unit = unit_of(1e6 * (line["target"]["up"] or {}).get("mean", math.inf) for line in own)
        yield (
            f"To {target}, in {unit} a client, and up to {harder}, the best that FedAdam came to. "
            f"The first model is not counted: its {amount(1e6 * own[0]['first_model'], unit)} "
            f"{unit} come down with every method."
        )
        yield markdown(methods(own, unit))
        yield "; ".join(environments_of(own)) + "."


def methods(own: Sequence[Line], unit: str) -> Iterator[tuple[str, ...]]:
    """Yield a row per method, with the mean over its seeds."""
    yield (
        "method", "rounds", "up", "down", "up: times fewer", "both: times fewer",
        "up to FedAdam's best", "best accuracy", "final accuracy",
    )  # fmt: skip
    for line in own:
        target, harder = line["target"], line["harder"]
        rounds = (target["round"] or {}).get("mean")
        up, down, further = (
            amount(cost and 1e6 * cost["mean"], unit)
            for cost in (target["up"], target["down"], harder["up"])
        )
        yield (
            f"`{line['method']}`", whole(rounds), up, down, times(target["ratio_up"]),
            times(target["ratio_both"]), further,
            percent(line["best_accuracy"]["mean"]), percent(line["final_accuracy"]["mean"]),
        )  # fmt: skip


def environments_of(own: Sequence[Line]) -> Iterator[str]:
    """Yield the environments of a table's rows, each with the methods that it has."""
    groups: dict[str, list[str]] = {}
    for line in own:
        seeds = [{"seed": seed} for seed in line["seeds"]]
        place = origin([each | seed for each in line["environment"] for seed in seeds])
        groups.setdefault(place, []).append(f"`{line['method']}`")
    for place, names in groups.items():
        yield f"{', '.join(names)}: {place}"


def ablation(found: Sequence[Row]) -> Iterator[str]:
    """Yield a heading, a table of the variants and their environments for each task and setting."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in found:
        groups.setdefault((row["task"], row["setting"]), []).append(row)
    for (task, setting), own in groups.items():
        target, harder = (mean(own, key) for key in ("target", "harder_target"))
        yield f"### {name_of(task, setting)}: variants"
        unit = unit_of(float(row["uplink_bytes_to_target"] or math.inf) for row in own)
        yield (
            f"Target {percent(target)}; the harder one, FedAdam's own best, {percent(harder)}. "
            f"{unit} a client, up and down, the first model among the latter."
        )
        yield markdown(variants(own, unit))
        clients = "/".join(sorted({row["clients"] for row in own}))
        yield f"{clients} clients; {origin(own)}."


def variants(own: Sequence[Row], unit: str) -> Iterator[tuple[str, ...]]:
    """Yield a row per variant, with the mean over its seeds."""
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
    """Return the heading of a task and setting."""
    name = "by document" if (task, setting) == ("char-lm", "noniid") else SETTINGS[setting]
    return f"{TASKS[task]}, {name}"


def mean(own: Sequence[Row], key: str) -> float | None:
    """Return the mean over the rows; None unless all have a value.

    >>> mean([{"x": "1"}, {"x": "3"}], "x"), mean([{"x": "1"}, {"x": ""}], "x")
    (2.0, None)
    """
    cells = [row[key] for row in own]
    return fmean(map(float, cells)) if all(cells) else None


def unit_of(sent: Iterable[float]) -> str:
    """Return the unit in which the smallest amount has a few digits.

    >>> unit_of([5_200.0, 1_223_300.0]), unit_of([5_232_600.0])
    ('kB', 'MB')
    """
    return "MB" if min(sent) >= UNITS["MB"] else "kB"


def amount(x: float | None, unit: str) -> str:
    """Format bytes in a unit; a dash if a seed did not reach the target.

    >>> amount(1_223_300.0, "kB"), amount(None, "kB")
    ('1 223.3', '–')
    """
    return "–" if x is None else f"{x / UNITS[unit]:,.1f}".replace(",", " ")


def times(x: float | None) -> str:
    """Format a ratio with three digits; a dash if there is none.

    >>> times(38.04), times(0.05711), times(None)
    ('38', '0.0571', '–')
    """
    return "–" if x is None else f"{x:.0f}" if x >= 10 else f"{x:.3g}"


def whole(x: float | None) -> str:
    """Format a mean number of rounds."""
    return "–" if x is None else f"{x:.0f}"


def percent(x: float | None) -> str:
    """Format a share in percent."""
    return "–" if x is None else f"{100 * x:.2f} %"


def markdown(body: Iterator[tuple[str, ...]]) -> str:
    """Return a Markdown table."""
    head, *rest = body
    ruled = [head, ("---", *("--:",) * (len(head) - 1)), *rest]
    return "\n".join("| " + " | ".join(row) + " |" for row in ruled)


def origin(places: Sequence[dict[str, Any]]) -> str:
    """Return the seeds, devices and commits of a table's numbers."""
    commits: dict[str, dict[str, None]] = {}  # by device, in order
    for each in places:
        commits.setdefault(f"{each['device']}, {each['precision']}", {})[each["commit"]] = None
    found = (f"{device}, {listed('commit', own)}" for device, own in commits.items())
    seeds = listed("seed", sorted({str(each["seed"]) for each in places}))
    return f"{seeds}, {' and '.join(found)}"


def listed(what: str, names: Collection[str]) -> str:
    """Format one or several names with their noun.

    >>> listed("seed", ["0"]), listed("seed", ["0", "1"])
    ('seed 0', 'seeds 0, 1')
    """
    return f"{what}{'s' * (len(names) > 1)} {', '.join(names)}"


def filled(page: str, found: Sequence[Line], ablated: Sequence[Row]) -> str:
    """Return the page with its tables between the marks."""
    page = between(page, "comparison", comparison(found))
    return between(page, "ablation", ablation(ablated))


def between(page: str, mark: str, pieces: Iterator[str]) -> str:
    """Return the page with the pieces between the marks, or a note that there are none."""
    first, last = f"<!-- {mark} -->", f"<!-- end of {mark} -->"
    before, _, rest = page.partition(first)
    _, _, after = rest.partition(last)
    content = "\n\n".join(pieces) or NONE_YET
    return f"{before}{first}\n\n{content}\n\n{last}{after}"


if __name__ == "__main__":
    text = filled(PAGE.read_text("utf-8"), compared(), rows())
    PAGE.write_text(text, encoding="utf-8")
