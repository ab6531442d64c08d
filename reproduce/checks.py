"""When a claim of the paper holds, by the files in reproduce/results.

Each check yields, for a task and a setting, what was measured and whether the claim holds there; it
yields nothing where nothing was measured. Its docstring says what "holds" means.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SPARSE = ("fedadam-top", "fairness-top", "fedadam-ssm-m", "fedadam-ssm-v")
QUANTIZED = ("onebit-adam", "efficient-adam")
GAINS = (*SPARSE, "fedadam", *QUANTIZED)
Point = dict[str, float]
Finding = tuple[str, bool]
Check = Callable[["Results", str, str], Iterator[Finding]]


@dataclass(frozen=True)
class Results:
    """The files of a results folder."""

    folder: Path

    def json(self, name: str) -> Any:
        """A results file, or nothing if it is not there."""
        file = self.folder / f"{name}.json"
        return json.loads(file.read_text(encoding="utf-8")) if file.exists() else []

    def lines(self, name: str, task: str, setting: str) -> dict[str, Any]:
        """What each method came to, on one task and setting."""
        found = [x for x in self.json(name) if (x["task"], x["setting"]) == (task, setting)]
        return {line["method"]: line for line in found}

    def curves(self, name: str, task: str, setting: str) -> dict[str, list[Point]]:
        """Each method's curve, on one task and setting."""
        file = self.folder / f"{name}-{task}-{setting}.csv"
        curves: dict[str, list[Point]] = {}
        if file.exists():
            with file.open(encoding="utf-8") as rows:
                for row in csv.DictReader(rows):
                    point = {key: float(row[key]) for key in ("round", "mibit", "accuracy")}
                    curves.setdefault(row["method"], []).append(point)
        return curves

    def places(self) -> list[tuple[str, str]]:
        """Every task and setting that has results."""
        found = [x for n in range(2, 9) for x in self.json(f"fig{n}")] + self.json("table1")
        both = {(x["task"], x["setting"]) for x in found}
        return sorted(both | {(task, "iid") for task in self.json("fig1")})


def points(x: float) -> str:
    """An accuracy in percent."""
    return f"{100 * x:.1f}"


def first_round(results: Results, task: str, setting: str) -> dict[str, float]:
    """What each method sends in a round, in Mibit; its second round, past any warm-up."""
    curves = results.curves("fig2", task, setting)
    return {
        name: (curve[1]["mibit"] - curve[0]["mibit"]) / (curve[1]["round"] - curve[0]["round"])
        for name, curve in curves.items()
        if len(curve) > 1
    }


def threefold(results: Results, task: str, setting: str) -> Iterator[Finding]:
    """FedAdam sends three times what FedSGD sends."""
    sent = first_round(results, task, setting)
    if {"fedadam", "fedsgd"} <= set(sent):
        ratio = sent["fedadam"] / sent["fedsgd"]
        yield f"{ratio:.2f} ×", abs(ratio - 3) < 0.01


def cut(results: Results, task: str, setting: str) -> Iterator[Finding]:
    """FedAdam-SSM sends less than FedAdam."""
    sent = first_round(results, task, setting)
    if {"fedadam", "fedadam-ssm"} <= set(sent):
        one, other = sent["fedadam"], sent["fedadam-ssm"]
        yield f"{one:.4g} and {other:.4g} Mibit a round", other < one


def faster(results: Results, task: str, setting: str) -> Iterator[Finding]:
    """The best sparse baseline needs more than 1.1 times FedAdam-SSM's traffic."""
    lines = results.lines("table1", task, setting)
    if "fedadam-ssm" in lines and any(name in lines for name in SPARSE):
        reached = {n: lines[n]["ratio"] for n in SPARSE if n in lines and lines[n]["ratio"]}
        best = min(reached, key=lambda name: reached[name], default=None)
        ours = lines["fedadam-ssm"]["mibit"] is not None
        text = f"{best} {reached[best]:.2f} ×" if best else "no other reaches the target"
        yield text, ours and (best is None or reached[best] > 1.1)


def best_within(curve: list[Point], key: str, most: float) -> float:
    """The best accuracy within a budget of rounds or traffic."""
    return max((p["accuracy"] for p in curve if p[key] <= most), default=0.0)


def ahead(results: Results, task: str, setting: str, key: str = "mibit") -> dict[str, float]:
    """By how much FedAdam-SSM leads within its own traffic, or its own rounds."""
    curves = results.curves("fig2", task, setting)
    if "fedadam-ssm" not in curves:
        return {}
    most = curves["fedadam-ssm"][-1][key]
    own = best_within(curves["fedadam-ssm"], key, most)
    return {name: own - best_within(curve, key, most) for name, curve in curves.items()}


def quantized(results: Results, task: str, setting: str) -> Iterator[Finding]:
    """It leads the better quantized baseline by more than 14.5 points at equal traffic."""
    lead = ahead(results, task, setting)
    found = [lead[name] for name in QUANTIZED if name in lead]
    if found:
        yield f"{points(min(found))} points", min(found) > 0.145


def moments_of(told: dict[str, Any]) -> tuple[float, float]:
    """Skewness and excess kurtosis of a density."""
    mean, deviation = told["mean_log10"], told["deviation"]
    pairs = [((float(c) - mean) / deviation, d) for c, d in told["density"].items()]
    whole = sum(d for _, d in pairs)
    return sum(z**3 * d for z, d in pairs) / whole, sum(z**4 * d for z, d in pairs) / whole - 3


def normal(results: Results, task: str, setting: str) -> Iterator[Finding]:
    """Skewness and excess kurtosis of all three are below 1."""
    told = (results.json("fig1") or {}).get(task)
    if told and setting == "iid":
        shapes = [moments_of(told[name]) for name in ("ΔW", "ΔM", "ΔV")]
        text = ", ".join(f"{s:.1f} and {k:.1f}" for s, k in shapes)
        yield f"skewness and kurtosis {text}", all(abs(x) < 1 for s in shapes for x in s)


def centers_of(results: Results, task: str) -> list[float]:
    """Where the densities of log10 of the three magnitudes peak."""
    told = (results.json("fig1") or {}).get(task)
    return [told[name]["peak_log10"] for name in ("ΔW", "ΔM", "ΔV")] if told else []


def ordered(results: Results, task: str, setting: str) -> Iterator[Finding]:
    """The peaks of the densities are in this order."""
    peaks = centers_of(results, task)
    if peaks and setting == "iid":
        yield ", ".join(f"{x:.1f}" for x in peaks), peaks[0] > peaks[1] > peaks[2]


def centered(task: str, *paper: float) -> Check:
    """The peaks are within half a decade of the paper's."""

    def check(results: Results, here: str, setting: str) -> Iterator[Finding]:
        peaks = centers_of(results, task)
        if peaks and (here, setting) == (task, "iid"):
            near = all(abs(a - b) < 0.5 for a, b in zip(peaks, paper, strict=True))
            yield ", ".join(f"{x:.1f}" for x in peaks), near

    return check


def spans(task: str, *paper: tuple[float, float]) -> Check:
    """The middle 98 % of each lie in the paper's range, to within one decade."""

    def check(results: Results, here: str, setting: str) -> Iterator[Finding]:
        told = (results.json("fig1") or {}).get(task)
        if told and (here, setting) == (task, "iid"):
            found = [middle(told[name]["density"]) for name in ("ΔW", "ΔM", "ΔV")]
            text = ", ".join(f"{low:.1f} to {high:.1f}" for low, high in found)
            both = zip(found, paper, strict=True)
            yield text, all(a > c - 1 and b < d + 1 for (a, b), (c, d) in both)

    return check


def middle(density: dict[str, float]) -> tuple[float, float]:
    """Where the middle 98 % of a density lie."""
    whole, seen, low, high = sum(density.values()), 0.0, None, 0.0
    for center, share in density.items():
        seen += share / whole
        if low is None and seen >= 0.01:
            low = float(center)
        if seen <= 0.99:
            high = float(center)
    return low or 0.0, high


def traffic(task: str, setting: str) -> Check:
    """FedAdam-SSM needs no more than in the paper, and FedAdam's ratio is at least the paper's."""

    def check(results: Results, here: str, there: str) -> Iterator[Finding]:
        lines = results.lines("table1", task, setting)
        if (here, there) == (task, setting) and {"fedadam-ssm", "fedadam"} <= set(lines):
            ours, dense = lines["fedadam-ssm"], lines["fedadam"]
            spent = "∞" if ours["mibit"] is None else f"{ours['mibit']:.4g} Mibit"
            ratio = "∞" if dense["ratio"] is None else f"{dense['ratio']:.2f} ×"
            good = ours["mibit"] is not None and ours["mibit"] <= ours["paper_mibit"]
            enough = dense["ratio"] is None or dense["ratio"] >= dense["paper_ratio"]
            yield f"{spent}; FedAdam {ratio}", good and enough

    return check


def fewest(results: Results, task: str, setting: str) -> Iterator[Finding]:
    """No method with the paper's settings reaches the target with less."""
    lines = results.lines("table1", task, setting)
    if len(lines) > 2 and "fedadam-ssm" in lines:
        spent = {n: x["mibit"] for n, x in lines.items() if x["mibit"] is not None and "@" not in n}
        best = min(spent, key=lambda name: spent[name], default="none")
        yield f"{best}, {spent.get(best, 0):.4g} Mibit", best == "fedadam-ssm"


def fewer_than(*names: str) -> Check:
    """FedAdam-SSM reaches the target with less than each of these."""

    def check(results: Results, task: str, setting: str) -> Iterator[Finding]:
        lines = results.lines("table1", task, setting)
        if all(name in lines for name in ("fedadam-ssm", *names)):
            own, *others = (lines[name]["mibit"] for name in ("fedadam-ssm", *names))
            text = ", ".join("∞" if x is None else f"{x:.4g}" for x in (own, *others))
            is_less = own is not None and all(x is None or own < x for x in others)
            yield f"{text} Mibit", is_less

    return check


def ratios(task: str, names: tuple[str, ...]) -> Check:
    """Each method's ratio to FedAdam-SSM is at least the paper's; infinity is more than any."""

    def check(results: Results, here: str, setting: str) -> Iterator[Finding]:
        lines = results.lines("table1", task, setting)
        if here == task and "fedadam-ssm" in lines and all(name in lines for name in names):
            own = [lines[name]["ratio"] for name in names]
            paper = [lines[name]["paper_ratio"] for name in names]
            text = ", ".join("∞" if x is None else f"{x:.2f} ×" for x in own)
            bound = [float("inf") if x is None else x for x in paper]
            yield text, all(x is None or x >= b for x, b in zip(own, bound, strict=True))

    return check


def never(results: Results, task: str, setting: str) -> Iterator[Finding]:
    """Neither quantized method reaches the target."""
    lines = results.lines("table1", task, setting)
    if all(name in lines for name in QUANTIZED):
        spent = [lines[name]["mibit"] for name in QUANTIZED]
        text = ", ".join("∞" if x is None else f"{x:.4g} Mibit" for x in spent)
        yield text, all(lines[name]["reached"] == 0 for name in QUANTIZED)


def gains(task: str, setting: str) -> Check:
    """At the traffic of all its rounds FedAdam-SSM leads each of the seven."""

    def check(results: Results, here: str, there: str) -> Iterator[Finding]:
        lead = ahead(results, task, setting)
        if (here, there) == (task, setting) and all(name in lead for name in GAINS):
            own = [lead[name] for name in GAINS]
            yield ", ".join(points(x) for x in own), all(x > 0 for x in own)

    return check


def leads(*names: str, by: str, least: float = 0.0, most: float = 1.0) -> Check:
    """FedAdam-SSM leads each by that much, in its own traffic or its own rounds."""

    def check(results: Results, task: str, setting: str) -> Iterator[Finding]:
        lead = ahead(results, task, setting, by)
        if all(name in lead for name in names):
            own = [lead[name] for name in names]
            yield ", ".join(points(x) for x in own), all(least < x < most for x in own)

    return check


def by_setting(results: Results, task: str, method: str) -> dict[str, float]:
    """Fig. 4: the best accuracy of a method on each data distribution."""
    lines = [x for x in results.json("fig4") if (x["task"], x["method"]) == (task, method)]
    return {line["setting"]: line["best_accuracy"] for line in lines}


IMBALANCE = ("iid", "theta-1", "theta-0.5", "noniid")


def alike(results: Results, task: str, setting: str) -> Iterator[Finding]:
    """The best accuracy falls from IID over 1 and 0.5 to 0.1."""
    found = by_setting(results, task, "fedadam-ssm")
    if setting == "iid" and all(name in found for name in IMBALANCE):
        own = [found[name] for name in IMBALANCE]
        yield ", ".join(points(x) for x in own) + " %", own == sorted(own, reverse=True)


def sensitive(results: Results, task: str, setting: str) -> Iterator[Finding]:
    """From IID to Dirichlet 0.1 FedAdam-SSM loses less of its best accuracy than FedAdam."""
    own, other = (by_setting(results, task, name) for name in ("fedadam-ssm", "fedadam"))
    if setting == "iid" and all({"iid", "noniid"} <= set(found) for found in (own, other)):
        lost = [found["iid"] - found["noniid"] for found in (own, other)]
        yield f"{points(lost[0])} against {points(lost[1])} points", lost[0] < lost[1]


def swept(results: Results, name: str, task: str, setting: str) -> list[tuple[float, float]]:
    """Figs. 5 to 8: the best accuracy and the round of the target, in the order of the sweep."""
    lines = results.lines(name, task, setting).values()
    return [(line["best_accuracy"], line["round"] or float("inf")) for line in lines]


def sweep(name: str, holds: Callable[[list[float], list[float]], bool]) -> Check:
    """A statement about best accuracies and rounds to the target, from small to large values."""

    def check(results: Results, task: str, setting: str) -> Iterator[Finding]:
        found = swept(results, name, task, setting)
        if len(found) >= 3:
            best, rounds = [x for x, _ in found], [x for _, x in found]
            shown = ", ".join("∞" if x == float("inf") else f"{x:.0f}" for x in rounds)
            text = f"{', '.join(points(x) for x in best)} %; target in round {shown}"
            yield text, holds(best, rounds)

    return check


def rises_then_falls(best: list[float], rounds: list[float]) -> bool:
    """The largest is neither the first nor the last."""
    return 0 < best.index(max(best)) < len(best) - 1


def is_rising(x: list[float]) -> bool:
    """Never falls."""
    return x == sorted(x)


def is_falling(x: list[float]) -> bool:
    """Never rises."""
    return x == sorted(x, reverse=True)


def robust(results: Results, task: str, setting: str) -> Iterator[Finding]:
    """Over L, FedAdam-SSM's best accuracies lie closer together than FedAdam's."""
    both = [swept(results, name, task, setting) for name in ("fig5", "fig6")]
    if all(len(found) >= 3 for found in both):
        wide = [max(x for x, _ in found) - min(x for x, _ in found) for found in both]
        yield f"{points(wide[0])} against {points(wide[1])} points", wide[0] < wide[1]
