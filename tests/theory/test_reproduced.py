"""What the pages say is what the committed tables say."""

import csv
import json
import math
import sys
from importlib import import_module
from pathlib import Path
from statistics import mean, median

import pytest

from fedsift.theory import beta2_limit, coefficient_order

ROOT = Path(__file__).parents[2]
HERE = ROOT / "reproduce" / "theory"
SLIPS = (ROOT / "docs" / "explanation" / "theory-slips.md").read_text(encoding="utf-8")
PAGE = (ROOT / "docs" / "explanation" / "theory.md").read_text(encoding="utf-8")
TEXT = " ".join(PAGE.split())
ADVICE = (ROOT / "docs" / "how-to" / "advise.md").read_text(encoding="utf-8")
TASKS = {
    "digits-iid": "digits, IID",
    "digits-dirichlet": "digits, Dirichlet 0.1",
    "fashion-mnist-cnn": "CNN, Fashion-MNIST",
}

NAMES = {  # as the sentence on equal weights goes on
    "digits-iid": " off on digits IID",
    "digits-dirichlet": " on digits Dirichlet",
    "fashion-mnist-cnn": " on the CNN",
    "vgg11-cifar10": " on VGG-11",
    "resnet18-cifar10": " on ResNet-18",
}
RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


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
    monkeypatch.delitem(sys.modules, "page", raising=False)  # reproduce/sift has one, too
    assert import_module("page").filled(PAGE) == PAGE


def test_the_deviation_of_networks():
    ends = {row["task"]: row for row in table("reality.csv")}
    assert ends.keys() == NAMES.keys()
    logs = sorted(float(row["log10_theorem"]) for row in ends.values())
    least, most = (f"10{f'{x:.0f}'.translate(RAISED)}" for x in (logs[0], logs[-1]))
    real = math.ceil(max(float(row["largest"]) for row in ends.values()))
    assert f"it gives {least} to {most} where the truth is at most {real}." in PAGE
    off = min(float(r["log10_theorem"]) - math.log10(float(r["largest"])) for r in ends.values())
    assert f"off by {math.floor(off)} orders of magnitude or more" in TEXT
    for row in table("reality.csv"):  # the inequality holds on networks too, step by step
        assert float(row["largest"]) <= 10 ** min(float(row["log10_theorem"]), 300) * (1 + 1e-3)


def test_the_first_step_of_the_last_round():
    first = [r for r in table("reality.csv") if r["step"] == "1" and r["round"] == "4"]
    for bound in ("theorem", "travel"):
        logs = sorted(float(r[f"log10_{bound}"]) for r in first)
        assert f"10^{logs[0]:.1f} to 10^{logs[-1]:.1f}" in PAGE


def test_the_largest_deviation_of_all():
    row = max(table("reality.csv"), key=lambda row: float(row["largest"]))
    assert (row["task"], row["round"]) == ("resnet18-cifar10", "2")
    start = f"in round 2 of ResNet-18, which starts {float(row['x_w']):.1f} apart"
    assert f"was {float(row['largest']):.1f}, {start}" in TEXT


def test_how_much_sharper_the_sharper_bound_is():
    rows = table("reality.csv")
    ends = {row["task"]: row for row in rows}.values()
    gains = sorted(float(r["log10_theorem"]) - float(r["log10_sharper"]) for r in ends)
    assert f"smaller by 10^{gains[0]:.0f} to 10^{gains[-1]:.0f} above" in PAGE
    telling = [(r["task"], int(r["step"])) for r in rows if r["round"] == "4" and r["step"] != "0"
               and float(r["log10_sharper"]) < float(r["log10_travel"])]  # fmt: skip
    assert telling == [("vgg11-cifar10", step) for step in (1, 2, 3, 4, 5)]
    assert "except for the first five steps of VGG-11" in TEXT


def test_the_mask_of_w_is_the_best_by_the_theorem():
    rows = table("masks.csv")
    assert {row["task"] for row in rows} == NAMES.keys()
    assert max(float(r["best"]) for r in rows) <= 1.00011  # the certificate, rounded
    worst = max(float(r["W"]) for r in rows if r["weights"] == "theorem")
    assert worst <= 1.00001
    assert "the best mask there is, to 0.001 %" in PAGE
    assert "no mean is more than 0.001 % off" in PAGE
    poor = [max(float(r[mask]) for r in rows if r["weights"] == "theorem") for mask in "MV"]
    assert f"up to {poor[0]:.1f} and {poor[1]:.1f} times the minimum" in PAGE


def test_the_mask_of_w_is_not_the_best_by_other_weights():
    off = {}
    for row in table("masks.csv"):
        key = row["weights"], row["task"]
        off[key] = max(off.get(key, 0), 100 * (float(row["W"]) - 1))
    others = [x for (kind, task), x in off.items() if kind == "sharper" and "vgg" not in task]
    sharper = off["sharper", "vgg11-cifar10"]
    assert f"at most {max(others):.1f} % off on four tasks and up to {sharper:.1f} % on VGG" in TEXT
    for task, name in NAMES.items():
        assert f"{off['equal', task]:.1f} %{name}" in TEXT
    assert f"it is up to {off['equal', 'resnet18-cifar10']:.0f} % off" in TEXT
    rows = [r for r in table("masks.csv") if r["weights"] == "equal"]
    union = 100 * (max(float(r["union"]) for r in rows) - 1)
    assert f"the union is never more than {union:.1f} % off" in TEXT
    (ratio,) = {r["log_theta_over_gamma"] for r in table("masks.csv")
                if (r["weights"], r["task"]) == ("sharper", "vgg11-cifar10")}  # fmt: skip
    assert f"the sharper Θ {round(math.exp(float(ratio)), -2):,.0f} times Γ" in TEXT


def test_the_order_of_the_factors_on_every_task():
    sizes = {"digits-iid": 27_430, "digits-dirichlet": 27_430, "fashion-mnist-cnn": 21_840,
             "vgg11-cifar10": 9_750_922, "resnet18-cifar10": 11_173_962}  # fmt: skip
    found, limits = {}, {}
    for row in table("constants.csv"):
        found.setdefault(row["task"], {})[row["constant"]] = float(row["value"])
    for task, mine in found.items():
        known = {"d": sizes[task], "rho": mine["rho"], "grad_bound": mine["grad_bound"]}
        order = coefficient_order(l=30, beta1=0.9, beta2=0.999, eps=1e-6, lr=1e-3, **known)
        assert vars(order) == dict.fromkeys(vars(order), True)
        limits[task] = beta2_limit(**known)
    assert f"its limit is {limits.pop('vgg11-cifar10'):.4f} on VGG-11" in TEXT
    assert min(limits.values()) >= 0.999995
    assert "0.999995 or more on the others" in PAGE
    assert f"comes down to {found['vgg11-cifar10']['mu']:.1e} times 2F" in TEXT


def test_the_page_says_of_which_weights_the_rows_of_vgg_are():
    rows = [r for name in ("reality", "constants", "masks") for r in table(f"{name}.csv")]
    (commit,) = {r["commit"] for r in rows if r["task"] == "vgg11-cifar10"}
    assert (commit == "fadaf8a") == ("are of commit fadaf8a" in TEXT)


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
