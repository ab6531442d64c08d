"""What the pages say is what the committed tables say."""

import csv
import json
from pathlib import Path
from statistics import mean, median

import pytest

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


@pytest.mark.parametrize("task", TASKS)
def test_the_deviation_of_networks(task):
    rows = [r for r in table("reality.csv") if r["task"] == task]
    last = rows[-1]
    cells = [f"{float(last['largest']):.2f}"]
    cells += [f"10^{float(last[f'log10_{x}']):.1f}" for x in ("theorem", "sharper", "travel")]
    assert any(TASKS[task] in line and " | ".join(cells) in line for line in PAGE.splitlines())
    for row in rows:  # the inequality holds on networks too, step by step
        assert float(row["largest"]) <= 10 ** min(float(row["log10_theorem"]), 300) * (1 + 1e-3)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(
    ("kind", "word"), [("theorem", "Theorem 1"), ("sharper", "sharper"), ("equal", "1, 1, 1")]
)
def test_the_table_of_masks(task, kind, word):
    mine = [r for r in table("masks.csv") if r["task"] == task and r["weights"] == kind]
    usual = [r for r in mine if r["density"] == "0.05"]
    means = [f"{mean(float(r[x]) for r in usual):.4f}" for x in ("W", "M", "V", "union")]
    assert "| " + " | ".join([TASKS[task], word, *means]) + " |" in PAGE
    assert max(float(r["best"]) for r in mine) <= 1.00011  # the certificate, rounded
    if kind == "theorem":
        assert max(float(r["W"]) for r in mine) <= 1.00002


@pytest.mark.parametrize("task", TASKS)
def test_the_table_of_advice(task):
    found = json.loads((HERE / f"advise-{task}.json").read_text(encoding="utf-8"))
    choice = found["advice"]["choice"]
    settings = f"{choice['local_steps']}, {choice['lr']:g}, {choice['density']:g}"
    means = [mean_of(found[key]) for key in ("advised", "defaults")]
    row = next(line for line in ADVICE.splitlines() if line.startswith(f"| {TASKS[task]}"))
    for cell in (settings, *means):
        assert cell in row, (cell, row)


@pytest.mark.parametrize("task", TASKS)
def test_the_advice_past_the_target(task):
    found = json.loads((HERE / f"advise-beyond-{task}.json").read_text(encoding="utf-8"))
    shares = [f"{100 * found[key]['best_accuracy']:.1f} %" for key in ("advised", "defaults")]
    mibit = f"{found['defaults']['mibit']:.2f}"
    assert f"| {TASKS[task]} | {mibit} | {' | '.join(shares)} |" in ADVICE


def mean_of(runs):
    spent = [run["mibit"] for run in runs]
    return "∞" if None in spent else f"{mean(spent):.2f}"
