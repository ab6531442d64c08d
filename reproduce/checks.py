"""Checks of the paper's claims against the files in reproduce/results.

Each check yields a finding for a task and setting, or nothing if that was not measured. Its
docstring says when the claim is met.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SPARSE = ("fedadam-top", "fairness-top", "fedadam-ssm-m", "fedadam-ssm-v")
QUANTIZED = ("onebit-adam", "efficient-adam")
BASELINES = (*SPARSE, "fedadam", *QUANTIZED)
Point = dict[str, float]
Check = Callable[["Results", str, str], Iterator["Finding"]]


@dataclass(frozen=True)
class Finding:
    """A measurement on one task and setting, and whether the claim is met there.

    ``margins`` compare it with the numbers in the claim: ratios, which are at least 1 if the
    number is met, or, with ``unit="points"``, differences, which are at least 0.
    """

    measured: str
    is_met: bool
    margins: tuple[float, ...] = ()
    unit: str = "×"


@dataclass(frozen=True)
class Results:
    """The files of a results folder."""

    folder: Path

    def json(self, name: str) -> Any:
        """Return the contents of a JSON file; an empty list if there is none."""
        file = self.folder / f"{name}.json"
        return json.loads(file.read_text(encoding="utf-8")) if file.exists() else []

    def lines(self, name: str, task: str, setting: str) -> dict[str, Any]:
        """Return the summary of each method on one task and setting."""
        found = [x for x in self.json(name) if (x["task"], x["setting"]) == (task, setting)]
        return {line["method"]: line for line in found}

    def curves(self, name: str, task: str, setting: str) -> dict[str, list[Point]]:
        """Return each method's curve on one task and setting."""
        file = self.folder / f"{name}-{task}-{setting}.csv"
        columns = ("round", "mibit", "megabytes", "accuracy")
        curves: dict[str, list[Point]] = {}
        if file.exists():
            with file.open(encoding="utf-8") as rows:
                for row in csv.DictReader(rows):
                    point = {key: float(row[key]) for key in columns}
                    curves.setdefault(row["method"], []).append(point)
        return curves

    def places(self) -> list[tuple[str, str]]:
        """Return every task and setting with results."""
        found = [x for n in range(2, 9) for x in self.json(f"fig{n}")] + self.json("table1")
        both = {(x["task"], x["setting"]) for x in found}
        return sorted(both | {(task, "iid") for task in self.json("fig1")})


def points(x: float) -> str:
    """Format an accuracy in percent, or a difference of accuracies in points."""
    return f"{100 * x:.1f}"


def shown_mibit(x: float | None) -> str:
    """Format Mibit; ∞ if the target was not reached."""
    return "∞" if x is None else f"{x:.4g}"


def per_round(results: Results, task: str, setting: str, key: str) -> dict[str, float]:
    """Return each method's traffic per round, without the first round, which may be a warm-up."""
    return {
        name: (curve[-1][key] - curve[0][key]) / (curve[-1]["round"] - curve[0]["round"])
        for name, curve in results.curves("fig2", task, setting).items()
        if len(curve) > 1
    }


def dense_is_threefold(results: Results, task: str, setting: str) -> Iterator[Finding]:
    """Met if FedAdam sends three times FedSGD's bytes per round, within 1 %."""
    sent = per_round(results, task, setting, "megabytes")
    if {"fedadam", "fedsgd"} <= set(sent):
        ratio = sent["fedadam"] / sent["fedsgd"]
        yield Finding(f"{ratio:.3f} × the bytes", abs(ratio - 3) <= 0.03)


def frames_fit_the_formula(results: Results, task: str, setting: str) -> Iterator[Finding]:
    """Met if FedAdam-SSM's frames take no more bytes than 3kq + d bits."""
    sent = per_round(results, task, setting, "megabytes")
    formula = per_round(results, task, setting, "mibit").get("fedadam-ssm")
    if formula and {"fedadam", "fedadam-ssm"} <= set(sent):
        bytes_by_formula = formula * 2**20 / 8e6
        ssm = sent["fedadam-ssm"]
        text = f"{sent['fedadam']:.4g} to {ssm:.4g} MB per round; 3kq + d: {bytes_by_formula:.4g}"
        yield Finding(text, ssm <= bytes_by_formula, (bytes_by_formula / ssm,))


def beats_sparse_baselines(results: Results, task: str, setting: str) -> Iterator[Finding]:
    """Met if the best sparse baseline needs more than 1.1 times FedAdam-SSM's traffic."""
    lines = results.lines("table1", task, setting)
    if "fedadam-ssm" in lines and any(name in lines for name in SPARSE):
        reached = {n: lines[n]["ratio"] for n in SPARSE if n in lines and lines[n]["ratio"]}
        best = min(reached, key=lambda name: reached[name], default=None)
        ratio = reached[best] if best else math.inf
        text = f"{best} {ratio:.3f} ×" if best else "no other reaches the target"
        is_reached = lines["fedadam-ssm"]["mibit"] is not None
        yield Finding(text, is_reached and ratio > 1.1, (ratio / 1.1,))


def best_within(curve: list[Point], key: str, budget: float) -> float:
    """Return the best accuracy within a budget of rounds or traffic."""
    return max((p["accuracy"] for p in curve if p[key] <= budget), default=0.0)


def leads_of_ssm(results: Results, task: str, setting: str, key: str) -> dict[str, float]:
    """Return FedAdam-SSM's lead over each method within its own traffic or its own rounds."""
    curves = results.curves("fig2", task, setting)
    if "fedadam-ssm" not in curves:
        return {}
    budget = curves["fedadam-ssm"][-1][key]
    ssm = best_within(curves["fedadam-ssm"], key, budget)
    return {name: ssm - best_within(curve, key, budget) for name, curve in curves.items()}


def beats_quantized_baselines(results: Results, task: str, setting: str) -> Iterator[Finding]:
    """Met if it leads the better quantized baseline by more than 14.5 points at equal traffic."""
    leads = leads_of_ssm(results, task, setting, "mibit")
    found = [leads[name] for name in QUANTIZED if name in leads]
    if found:
        lead = min(found)
        margins = (100 * lead - 14.5,)
        yield Finding(f"{points(lead)} points", lead > 0.145, margins, "points")


def shape_of(density: dict[str, Any]) -> tuple[float, float]:
    """Return the skewness and excess kurtosis of a density."""
    mean, deviation = density["mean_log10"], density["deviation"]
    pairs = [((float(c) - mean) / deviation, d) for c, d in density["density"].items()]
    total = sum(d for _, d in pairs)
    return sum(z**3 * d for z, d in pairs) / total, sum(z**4 * d for z, d in pairs) / total - 3


def is_normal(results: Results, task: str, setting: str) -> Iterator[Finding]:
    """Met if skewness and excess kurtosis of all three are below 1."""
    densities = (results.json("fig1") or {}).get(task)
    if densities and setting == "iid":
        shapes = [shape_of(densities[name]) for name in ("ΔW", "ΔM", "ΔV")]
        text = ", ".join(f"{s:.1f} and {k:.1f}" for s, k in shapes)
        is_met = all(abs(x) < 1 for shape in shapes for x in shape)
        yield Finding(f"skewness and kurtosis {text}", is_met)


def peaks_of(results: Results, task: str) -> list[float]:
    """Return the peaks of the densities of log10 of the three magnitudes."""
    densities = (results.json("fig1") or {}).get(task)
    return [densities[name]["peak_log10"] for name in ("ΔW", "ΔM", "ΔV")] if densities else []


def peaks_are_ordered(results: Results, task: str, setting: str) -> Iterator[Finding]:
    """Met if the peaks of the densities are in this order."""
    peaks = peaks_of(results, task)
    if peaks and setting == "iid":
        yield Finding(", ".join(f"{x:.1f}" for x in peaks), peaks[0] > peaks[1] > peaks[2])


def peaks_at(only_task: str, *paper: float) -> Check:
    """Met if the peaks are within half a decade of the paper's."""

    def check(results: Results, task: str, setting: str) -> Iterator[Finding]:
        peaks = peaks_of(results, only_task)
        if peaks and (task, setting) == (only_task, "iid"):
            is_met = all(abs(a - b) < 0.5 for a, b in zip(peaks, paper, strict=True))
            yield Finding(", ".join(f"{x:.1f}" for x in peaks), is_met)

    return check


def spans(only_task: str, *paper: tuple[float, float]) -> Check:
    """Met if the middle 98 % of each are in the paper's range, to within one decade."""

    def check(results: Results, task: str, setting: str) -> Iterator[Finding]:
        densities = (results.json("fig1") or {}).get(task)
        if densities and (task, setting) == (only_task, "iid"):
            found = [middle(densities[name]["density"]) for name in ("ΔW", "ΔM", "ΔV")]
            text = ", ".join(f"{low:.1f} to {high:.1f}" for low, high in found)
            pairs = zip(found, paper, strict=True)
            yield Finding(text, all(a > c - 1 and b < d + 1 for (a, b), (c, d) in pairs))

    return check


def middle(density: dict[str, float]) -> tuple[float, float]:
    """Return the range of the middle 98 % of a density."""
    total, seen, low, high = sum(density.values()), 0.0, None, 0.0
    for center, share in density.items():
        seen += share / total
        if low is None and seen >= 0.01:
            low = float(center)
        if seen <= 0.99:
            high = float(center)
    return low or 0.0, high


def ssm_traffic(only_task: str, only_setting: str) -> Check:
    """Met if FedAdam-SSM needs no more Mibit than in the paper; the margin is paper / measured."""

    def check(results: Results, task: str, setting: str) -> Iterator[Finding]:
        ssm = results.lines("table1", task, setting).get("fedadam-ssm")
        if (task, setting) == (only_task, only_setting) and ssm:
            margin = ssm["paper_mibit"] / ssm["mibit"] if ssm["mibit"] else 0.0
            yield Finding(f"{shown_mibit(ssm['mibit'])} Mibit", margin >= 1, (margin,))

    return check


def ratios_to_ssm(only_task: str, *names: str, only_setting: str | None = None) -> Check:
    """Met if each method's traffic is at least the paper's multiple of FedAdam-SSM's.

    The margin is measured / paper. A target that a method does not reach counts as infinite.
    """

    def check(results: Results, task: str, setting: str) -> Iterator[Finding]:
        lines = results.lines("table1", task, setting)
        is_place = task == only_task and only_setting in (None, setting)
        if is_place and all(name in lines for name in ("fedadam-ssm", *names)):
            pairs = [
                tuple(lines[n][key] or math.inf for key in ("ratio", "paper_ratio")) for n in names
            ]
            text = ", ".join("∞" if math.isinf(x) else f"{x:.2f} ×" for x, _ in pairs)
            margins = tuple(x / paper for x, paper in pairs if not math.isinf(paper))
            yield Finding(text, all(x >= paper for x, paper in pairs), margins)

    return check


def ssm_needs_fewest(results: Results, task: str, setting: str) -> Iterator[Finding]:
    """Met if no method with the paper's settings reaches the target with fewer bits."""
    lines = results.lines("table1", task, setting)
    if len(lines) > 2 and "fedadam-ssm" in lines:
        spent = {n: x["mibit"] for n, x in lines.items() if x["mibit"] is not None and "@" not in n}
        best = min(spent, key=lambda name: spent[name], default="none")
        yield Finding(f"{best}, {spent.get(best, 0):.4g} Mibit", best == "fedadam-ssm")


def ssm_needs_fewer_than(*names: str) -> Check:
    """Met if FedAdam-SSM reaches the target with fewer bits than each of these."""

    def check(results: Results, task: str, setting: str) -> Iterator[Finding]:
        lines = results.lines("table1", task, setting)
        if all(name in lines for name in ("fedadam-ssm", *names)):
            ssm, *others = (lines[name]["mibit"] for name in ("fedadam-ssm", *names))
            text = ", ".join(shown_mibit(x) for x in (ssm, *others))
            is_met = ssm is not None and all(x is None or ssm < x for x in others)
            yield Finding(f"{text} Mibit", is_met)

    return check


def quantized_reach_nothing(results: Results, task: str, setting: str) -> Iterator[Finding]:
    """Met if neither quantized method reaches the target."""
    lines = results.lines("table1", task, setting)
    if all(name in lines for name in QUANTIZED):
        text = ", ".join(shown_mibit(lines[name]["mibit"]) for name in QUANTIZED)
        yield Finding(f"{text} Mibit", all(lines[name]["reached"] == 0 for name in QUANTIZED))


def gains(only_task: str, only_setting: str, *paper: float) -> Check:
    """Met if at equal traffic FedAdam-SSM leads each of the seven by the paper's points."""

    def check(results: Results, task: str, setting: str) -> Iterator[Finding]:
        leads = leads_of_ssm(results, task, setting, "mibit")
        is_place = (task, setting) == (only_task, only_setting)
        if is_place and all(name in leads for name in BASELINES):
            found = [leads[name] for name in BASELINES]
            margins = tuple(100 * x - y for x, y in zip(found, paper, strict=True))
            text = ", ".join(points(x) for x in found)
            yield Finding(text, min(margins) >= 0, margins, "points")

    return check


def leads(*names: str, by: str, least: float = 0.0, most: float = 1.0) -> Check:
    """Met if FedAdam-SSM's lead over each is in this range, in its own traffic or rounds."""

    def check(results: Results, task: str, setting: str) -> Iterator[Finding]:
        found = leads_of_ssm(results, task, setting, by)
        if all(name in found for name in names):
            text = ", ".join(points(found[name]) for name in names)
            yield Finding(text, all(least < found[name] < most for name in names))

    return check


def best_by_setting(results: Results, task: str, method: str) -> dict[str, float]:
    """Return the best accuracy of a method on each data distribution of Fig. 4."""
    lines = [x for x in results.json("fig4") if (x["task"], x["method"]) == (task, method)]
    return {line["setting"]: line["best_accuracy"] for line in lines}


IMBALANCE = ("iid", "theta-1", "theta-0.5", "noniid")


def falls_with_imbalance(results: Results, task: str, setting: str) -> Iterator[Finding]:
    """Met if the best accuracy falls from IID over Dirichlet 1 and 0.5 to 0.1."""
    found = best_by_setting(results, task, "fedadam-ssm")
    if setting == "iid" and all(name in found for name in IMBALANCE):
        best = [found[name] for name in IMBALANCE]
        text = ", ".join(points(x) for x in best)
        yield Finding(f"{text} %", best == sorted(best, reverse=True))


def ssm_loses_less(results: Results, task: str, setting: str) -> Iterator[Finding]:
    """Met if FedAdam-SSM's best accuracy falls less than FedAdam's, from IID to Dirichlet 0.1."""
    both = [best_by_setting(results, task, name) for name in ("fedadam-ssm", "fedadam")]
    if setting == "iid" and all({"iid", "noniid"} <= set(found) for found in both):
        ssm, dense = (found["iid"] - found["noniid"] for found in both)
        yield Finding(f"{points(ssm)} against {points(dense)} points", ssm < dense)


def swept(results: Results, name: str, task: str, setting: str) -> list[tuple[float, float]]:
    """Return the best accuracy and the round of the target for each value of Figs. 5 to 8."""
    lines = results.lines(name, task, setting).values()
    return [(line["best_accuracy"], line["round"] or math.inf) for line in lines]


def sweep(name: str, holds: Callable[[list[float], list[float]], bool]) -> Check:
    """Met if a condition holds for the best accuracies and the rounds to the target."""

    def check(results: Results, task: str, setting: str) -> Iterator[Finding]:
        found = swept(results, name, task, setting)
        if len(found) >= 3:
            best, rounds = [x for x, _ in found], [x for _, x in found]
            texts = ", ".join("∞" if math.isinf(x) else f"{x:.0f}" for x in rounds)
            text = f"{', '.join(points(x) for x in best)} %; target in round {texts}"
            yield Finding(text, holds(best, rounds))

    return check


def rises_then_falls(best: list[float], rounds: list[float]) -> bool:
    """Return whether the largest value is neither the first nor the last."""
    return 0 < best.index(max(best)) < len(best) - 1


def is_rising(x: list[float]) -> bool:
    """Return whether the values never fall."""
    return x == sorted(x)


def is_falling(x: list[float]) -> bool:
    """Return whether the values never rise."""
    return x == sorted(x, reverse=True)


def ssm_is_robust_in_l(results: Results, task: str, setting: str) -> Iterator[Finding]:
    """Met if over L, FedAdam-SSM's best accuracies are closer together than FedAdam's."""
    both = [swept(results, name, task, setting) for name in ("fig5", "fig6")]
    if all(len(found) >= 3 for found in both):
        ssm, dense = (max(x for x, _ in f) - min(x for x, _ in f) for f in both)
        yield Finding(f"{points(ssm)} against {points(dense)} points", ssm < dense)
