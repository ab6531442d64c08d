"""Write the tables of docs/explanation/sift.md: `python reproduce/sift/page.py`."""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from doc_tables import (
    ROOT,
    amount,
    between,
    listed,
    name_of,
    percent,
    table,
    times,
    unit_of,
    whole,
)

HERE = Path(__file__).parent
TABLE = HERE / "ablation.csv"
COMPARED = ROOT / "reproduce" / "results" / "sift.json"
PAGE = ROOT / "docs" / "explanation" / "sift.md"
Row = dict[str, str]
Result = dict[str, Any]


def compared() -> list[Result]:
    """The committed comparison with other methods; empty if there is none."""
    found: list[Result] = json.loads(COMPARED.read_text("utf-8")) if COMPARED.exists() else []
    return found


def rows() -> list[Row]:
    """The committed ablation; empty if there is none."""
    if not TABLE.exists():
        return []
    with TABLE.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def comparison(found: Sequence[Result]) -> Iterator[str]:
    """Yield, per task and setting, a heading, a table of the methods, and its origin."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in found:
        groups.setdefault((result["task"], result["setting"]), []).append(result)
    for (task, setting), group in groups.items():
        yield f"### {name_of(task, setting)}"
        target, harder = (percent(group[0][goal]["accuracy"]) for goal in ("target", "harder"))
        unit = unit_of(
            1e6 * (result["target"]["up"] or {}).get("mean", math.inf) for result in group
        )
        yield (
            f"Traffic to {target}, in {unit} per client, and uplink to {harder}, FedAdam's best. "
            f"The initial model is not counted: every method sends its "
            f"{amount(1e6 * group[0]['first_model'], unit)} {unit} to each client."
        )
        yield table(methods(group, unit))
        yield "; ".join(origins(group)) + "."


def methods(group: Sequence[Result], unit: str) -> Iterator[tuple[str, ...]]:
    """One row per method, as means over its seeds."""
    yield (
        "method", "rounds", "up", "down", "up: times fewer", "both: times fewer",
        "up to FedAdam's best", "best accuracy", "final accuracy",
    )  # fmt: skip
    for result in group:
        target, harder = result["target"], result["harder"]
        rounds = (target["round"] or {}).get("mean")
        up, down, further = (
            amount(cost and 1e6 * cost["mean"], unit)
            for cost in (target["up"], target["down"], harder["up"])
        )
        yield (
            f"`{result['method']}`", whole(rounds), up, down, times(target["ratio_up"]),
            times(target["ratio_both"]), further,
            percent(result["best_accuracy"]["mean"]), percent(result["final_accuracy"]["mean"]),
        )  # fmt: skip


def origins(group: Sequence[Result]) -> Iterator[str]:
    """Yield the origin of the rows of a table, grouped by origin."""
    groups: dict[str, list[str]] = {}
    for result in group:
        seeds = [{"seed": seed} for seed in result["seeds"]]
        place = origin(
            [environment | seed for environment in result["environment"] for seed in seeds]
        )
        groups.setdefault(place, []).append(f"`{result['method']}`")
    for place, names in groups.items():
        yield f"{', '.join(names)}: {place}"


def ablation(found: Sequence[Row]) -> Iterator[str]:
    """Yield, per task and setting, a heading, a table of the variants, and its origin."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in found:
        groups.setdefault((row["task"], row["setting"]), []).append(row)
    for (task, setting), group in groups.items():
        target, harder = (mean(group, key) for key in ("target", "harder_target"))
        yield f"### {name_of(task, setting)}: variants"
        unit = unit_of(float(row["uplink_bytes_to_target"] or math.inf) for row in group)
        yield (
            f"Target {percent(target)}; harder target, FedAdam's own best, {percent(harder)}. "
            f"{unit} per client, up and down; down includes the initial model."
        )
        yield table(variants(group, unit))
        clients = "/".join(sorted({row["clients"] for row in group}))
        yield f"{clients} clients; {origin(group)}."


def variants(group: Sequence[Row], unit: str) -> Iterator[tuple[str, ...]]:
    """One row per variant, as means over its seeds."""
    yield (
        "variant", "seeds", "up to target", "down to target", "up to harder", "down to harder",
        "best accuracy", "final accuracy",
    )  # fmt: skip
    for variant in dict.fromkeys(row["variant"] for row in group):
        seeds = [row for row in group if row["variant"] == variant]
        yield (
            variant, str(len(seeds)),
            *(amount(mean(seeds, f"{way}_bytes_to_{goal}"), unit)
              for goal in ("target", "harder") for way in ("uplink", "downlink")),
            percent(mean(seeds, "best_accuracy")), percent(mean(seeds, "final_accuracy")),
        )  # fmt: skip


def mean(group: Sequence[Row], key: str) -> float | None:
    """The mean over the rows; None unless all have a value.

    >>> mean([{"x": "1"}, {"x": "3"}], "x"), mean([{"x": "1"}, {"x": ""}], "x")
    (2.0, None)
    """
    cells = [row[key] for row in group]
    return fmean(map(float, cells)) if all(cells) else None


def origin(places: Sequence[dict[str, Any]]) -> str:
    """The seeds, devices and commits of a table."""
    commits: dict[str, dict[str, None]] = {}  # by device; a dict keeps the order
    for each in places:
        commits.setdefault(f"{each['device']}, {each['precision']}", {})[each["commit"]] = None
    found = (f"{device}, {listed('commit', hashes)}" for device, hashes in commits.items())
    seeds = listed("seed", sorted({str(each["seed"]) for each in places}))
    return f"{seeds}, {' and '.join(found)}"


def filled(page: str, found: Sequence[Result], ablated: Sequence[Row]) -> str:
    """The page with the tables inserted between the marks."""
    page = between(page, "comparison", comparison(found))
    return between(page, "ablation", ablation(ablated))


if __name__ == "__main__":
    text = filled(PAGE.read_text("utf-8"), compared(), rows())
    PAGE.write_text(text, encoding="utf-8")
