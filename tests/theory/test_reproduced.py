"""What the pages say is what the committed tables say."""

import csv
import json
import math
from importlib import import_module
from pathlib import Path
from statistics import mean, median

import pytest

from fedsift.theory import beta2_limit, coefficient_order

ROOT = Path(__file__).parents[2]
HERE = ROOT / "reproduce" / "theory"
SLIPS = (ROOT / "docs" / "explanation" / "theory-slips.md").read_text(encoding="utf-8")
PAGE = (ROOT / "docs" / "explanation" / "theory.md").read_text(encoding="utf-8")
ADVICE = (ROOT / "docs" / "how-to" / "advise.md").read_text(encoding="utf-8")
TASKS = {
    "digits-iid": "digits, IID",
    "digits-dirichlet": "digits, Dirichlet 0.1",
    "fashion-mnist-cnn": "CNN, Fashion-MNIST",
}


def table(name):
    with (HERE / name).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_the_survey_of_proposition_1():
    rows = table("order.csv")
    met = [r for r in rows if r["condition"] == "True"]
    bad = [r for r in met if not (r["gamma_over_theta"] == r["theta_over_lambda"] == "True")]
    assert all(r["gamma_over_theta"] == "True" for r in met)
    for count in (sum(int(r["settings"]) for r in part) for part in (rows, met, bad)):
        assert f"{count:,}" in SLIPS
    listed = sum(int(r["settings"]) for r in table("order_counter_examples.csv"))
    assert listed == sum(int(r["settings"]) for r in bad)


def test_the_trials_of_theorem_1():
    rows = table("inequality.csv")
    assert max(float(r[key]) for r in rows for key in ("theorem", "sharper")) <= 1
    assert f"{sum(int(r['comparisons']) for r in rows):,} of" in PAGE
    assert f"{len(rows)} random federations" in PAGE
    assert f"{max(float(r['theorem']) for r in rows):.5f}" in PAGE
    assert f"{median(float(r['theorem']) for r in rows):.5f}" in PAGE
    (sampling,) = table("sampling.csv")
    assert f"{sampling['above_the_bound']} of {int(sampling['comparisons']):,}" in SLIPS
    assert f"{float(sampling['mean_ratio']):.2f} of it" in SLIPS
    assert f"{float(sampling['largest_ratio']):.2f} times" in SLIPS


def test_the_tables_of_the_page_are_the_committed_ones(monkeypatch):
    """`python reproduce/theory/page.py` writes them."""
    monkeypatch.syspath_prepend(HERE)
    assert import_module("page").filled(PAGE) == PAGE


def test_the_deviation_of_networks():
    ends = {row["task"]: row for row in table("reality.csv")}
    assert min(float(row["log10_theorem"]) for row in ends.values()) > 240
    assert "more than 10²⁴⁰" in PAGE
    most = math.ceil(max(float(row["largest"]) for row in ends.values()))
    assert f"where the truth is at most {most}." in PAGE
    for row in table("reality.csv"):  # the inequality holds on networks too, step by step
        assert float(row["largest"]) <= 10 ** min(float(row["log10_theorem"]), 300) * (1 + 1e-3)


def test_the_first_step_of_the_last_round():
    first = [r for r in table("reality.csv") if r["step"] == "1" and r["round"] == "4"]
    for bound in ("theorem", "travel"):
        logs = sorted(float(r[f"log10_{bound}"]) for r in first)
        assert f"10^{logs[0]:.1f} to 10^{logs[-1]:.1f}" in PAGE


def test_the_mask_of_w_is_the_best_by_the_theorem():
    rows = table("masks.csv")
    assert max(float(r["best"]) for r in rows) <= 1.00011  # the certificate, rounded
    worst = max(float(r["W"]) for r in rows if r["weights"] == "theorem")
    assert worst <= 1.00001
    assert "the best mask there is, to 0.001 %" in PAGE
    assert "no mean is more than 0.001 % off" in PAGE


def test_the_order_of_the_factors_on_every_task():
    sizes = {"digits-iid": 27_430, "digits-dirichlet": 27_430, "fashion-mnist-cnn": 21_840,
             "vgg11-cifar10": 9_750_922, "resnet18-cifar10": 11_173_962}  # fmt: skip
    found = {}
    for row in table("constants.csv"):
        found.setdefault(row["task"], {})[row["constant"]] = float(row["value"])
    for task, mine in found.items():
        known = {"d": sizes[task], "rho": mine["rho"], "grad_bound": mine["grad_bound"]}
        order = coefficient_order(l=30, beta1=0.9, beta2=0.999, eps=1e-6, lr=1e-3, **known)
        assert vars(order) == dict.fromkeys(vars(order), True)
        assert beta2_limit(**known) >= 0.999995


@pytest.mark.parametrize("task", TASKS)
def test_the_table_of_advice(task):
    found = json.loads((HERE / f"advise-{task}.json").read_text(encoding="utf-8"))
    choice = found["advice"]["choice"]
    settings = f"{choice['local_steps']}, {choice['lr']:g}, {choice['density']:g}"
    means = [mean_of(found[key]) for key in ("advised", "defaults")]
    row = next(line for line in ADVICE.splitlines() if line.startswith(f"| {TASKS[task]}"))
    for cell in (settings, *means):
        assert cell in row, (cell, row)


def test_the_table_of_the_command():
    rows = table("advise_command.csv")
    names = dict.fromkeys(r["task"] for r in rows)
    assert len(names) >= 3
    for name in names:
        mine = {x: [r for r in rows if (r["task"], r["settings"]) == (name, x)]
                for x in ("advised", "defaults")}  # fmt: skip
        first = mine["advised"][0]
        settings = ", ".join(f"{float(first[x]):g}" for x in ("local_steps", "lr", "density"))
        spent = [mean(float(r["mibit"]) for r in runs) for runs in mine.values()]
        rounds = [f"{mean(int(r['rounds']) for r in runs):.0f}" for runs in mine.values()]
        words = (name, f"{100 * float(first['target']):.0f} %", settings)
        numbers = (f"{spent[0]:.2f}", f"{spent[1]:.2f}", f"{spent[1] / spent[0]:.1f}×")
        assert f"| {' | '.join((*words, *numbers, ' against '.join(rounds)))} |" in ADVICE


@pytest.mark.parametrize("task", TASKS)
def test_the_advice_past_the_target(task):
    found = json.loads((HERE / f"advise-beyond-{task}.json").read_text(encoding="utf-8"))
    shares = [f"{100 * found[key]['best_accuracy']:.1f} %" for key in ("advised", "defaults")]
    mibit = f"{found['defaults']['mibit']:.2f}"
    assert f"| {TASKS[task]} | {mibit} | {' | '.join(shares)} |" in ADVICE


def mean_of(runs):
    spent = [run["mibit"] for run in runs]
    return "∞" if None in spent else f"{mean(spent):.2f}"
