"""The page of claims is what reproduce/claims.py writes, and the script tells true from false."""

import csv
import json
import sys
import tarfile
from pathlib import Path

import pytest

from fedsift.reproduce import Pin, Wanted
from fedsift.reproduce.make import compared
from fedsift.reproduce.results import lines_of, summaries, table_csv
from fedsift.reproduce.traffic import costs, costs_csv

REPRODUCE = Path(__file__).parents[2] / "reproduce"
IMAGES = Path(__file__).parents[2] / "docs" / "images"
sys.path.insert(0, str(REPRODUCE))
from checks import Results, rises_then_falls  # noqa: E402
from claims import PAGE, SECTIONS, page, row  # noqa: E402


def test_the_page_is_in_step_with_the_results():
    assert PAGE.read_text(encoding="utf-8") == page(Results(REPRODUCE / "results"))


@pytest.mark.parametrize(
    ("name", "every", "in_all"), [("table1", table_csv, summaries), ("sift", costs_csv, costs)]
)
def test_the_results_are_made_of_the_committed_runs(name, every, in_all, tmp_path):
    with tarfile.open(REPRODUCE / "runs.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    pin = Pin.of(name)
    groups = compared(pin, lines_of(pin, Wanted(), tmp_path))
    lines = [line for _, own in groups for line in own]
    assert every(lines) == (REPRODUCE / "results" / f"{name}.csv").read_text(encoding="utf-8")
    told = json.loads((REPRODUCE / "results" / f"{name}.json").read_text(encoding="utf-8"))
    assert in_all(lines) == told


@pytest.mark.parametrize("name", ["fig2-cnn-fashion-mnist-iid", "sift-cnn-fashion-mnist-noniid"])
def test_the_docs_show_the_committed_pictures(name):
    shown, made = (folder / f"{name}.png" for folder in (IMAGES, REPRODUCE / "results"))
    assert shown.read_bytes() == made.read_bytes()


README_NAMES = {
    "cnn-fashion-mnist": "CNN, Fashion-MNIST",
    "vgg11-cifar10": "VGG-11, CIFAR-10",
    "resnet18-cifar10": "ResNet-18, CIFAR-10",
    "vit-tiny-cifar10": "ViT-Tiny, CIFAR-10",
    "char-lm": "Transformer, Python's modules",
}


def test_the_readme_has_the_committed_comparison_of_sift():
    lines = json.loads((REPRODUCE / "results" / "sift.json").read_text(encoding="utf-8"))
    by_key = {(x["task"], x["setting"], x["method"]): x for x in lines}
    readme = (REPRODUCE.parent / "README.md").read_text(encoding="utf-8")
    settings = [(task, setting) for task, setting, method in by_key if method == "sift"]
    for key in settings:
        assert readme_row(*key, by_key) in readme, key
    assert readme.count("× |") == 3 * len(settings)


def readme_row(task, setting, by_key):
    methods = [by_key[task, setting, name] for name in ("sift", "fedadam-ssm", "fedadam")]
    sift, ssm, dense = (x["target"]["up"]["mean"] for x in methods)
    ratios = (dense / sift, ssm / sift, methods[0]["target"]["ratio_up"])
    split = "IID" if setting == "iid" else "by document" if task == "char-lm" else "Dirichlet 0.1"
    finals = ", ".join(f"{100 * x['final_accuracy']['mean']:.1f}" for x in methods)
    cells = [README_NAMES[task], split, str(len(methods[0]["seeds"]))]
    cells += [f"{sift:.1f} MB" if sift >= 1 else f"{1e3 * sift:.1f} kB"]
    cells += [f"{ratio:,.0f}×" for ratio in ratios]
    return f"| {' | '.join(cells)} | {finals} % |"


def line(method, mibit, best, **more):
    return {
        "task": "cnn-fashion-mnist", "setting": "iid", "method": method, "mibit": mibit,
        "ratio": mibit and mibit / 1.0, "reached": 3 * (mibit is not None), "round": 5.0,
        "best_accuracy": best, "paper_mibit": None, "paper_ratio": None, **more,
    }  # fmt: skip


@pytest.fixture
def results(tmp_path):
    """Made-up results in which FedAdam-SSM is the best at traffic, and FedAdam by rounds."""
    lines = [
        line("fedadam-ssm", 1.0, 0.89, paper_mibit=8.15, paper_ratio=1.0),
        line("fedadam-top", 1.05, 0.88, paper_mibit=11.3, paper_ratio=1.39),
        line("fedadam", 10.0, 0.9, paper_mibit=24.0, paper_ratio=2.94),
        line("onebit-adam", None, 0.7),
        line("efficient-adam", None, 0.8),
    ]
    (tmp_path / "table1.json").write_text(json.dumps(lines))
    with (tmp_path / "fig2-cnn-fashion-mnist-iid.csv").open("w") as file:
        writer = csv.writer(file)
        writer.writerow(["setting", "method", "round", "mibit", "accuracy"])
        made = (("fedadam-ssm", 0.1, 0.89), ("fedadam", 6, 0.9), ("fedsgd", 2, 0.2))
        for name, sent, best in made:
            for n in range(1, 31):
                writer.writerow(["iid", name, n, sent * n, best * n / 30])
    return Results(tmp_path)


def told(results, claim):
    (found,) = [c for claims in SECTIONS.values() for c in claims if c[0].startswith(claim)]
    cells = row(results, *found).split("|")
    return cells[3].strip().removeprefix("cnn-fashion-mnist, iid: "), cells[4].strip()


@pytest.mark.parametrize(
    ("claim", "measured", "verdict"),
    [
        ("FedAdam's uplink", "3.00 ×", "confirmed"),
        ("FedAdam-SSM converges", "fedadam-top 1.05 × (no)", "not confirmed"),
        ("CNN, IID: 8.15 Mibit", "1 Mibit; FedAdam 10.00 ×", "confirmed"),
        ("FedAdam-SSM needs the fewest", "fedadam-ssm, 1 Mibit", "confirmed"),
        ("1-bit Adam and Efficient-Adam reach", "∞, ∞", "confirmed"),
        ("FedAdam is better than FedAdam-SSM", "-1.0", "confirmed"),
        ("VGG-11, IID: 2073", "–", "open"),
        ("A larger α", "–", "open"),
    ],
)
def test_claims_are_told_from_the_results(claim, measured, verdict, results):
    assert told(results, claim) == (measured, verdict)


def test_a_peak_inside_is_a_rise_and_a_fall():
    assert rises_then_falls([0.1, 0.3, 0.2], [])
    assert not rises_then_falls([0.1, 0.2, 0.3], [])
    assert not rises_then_falls([0.3, 0.2, 0.1], [])
