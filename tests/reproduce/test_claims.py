"""The page of claims is what reproduce/claims.py writes, and the script tells true from false."""

import csv
import json
import re
import sys
import tarfile
from pathlib import Path

import pytest

from fedsift.reproduce.experiments import Experiment
from fedsift.reproduce.plan import Selection
from fedsift.reproduce.result_files import comparable_lines
from fedsift.reproduce.results import summarize_lines, table_csv
from fedsift.reproduce.traffic import summarize_traffic, traffic_csv

REPRODUCE = Path(__file__).parents[2] / "reproduce"
IMAGES = Path(__file__).parents[2] / "docs" / "images"
sys.path.insert(0, str(REPRODUCE))
from checks import Results, rises_then_falls  # noqa: E402
from claims import PAGE, SECTIONS, page, row  # noqa: E402


def test_the_page_is_in_step_with_the_results():
    assert PAGE.read_text(encoding="utf-8") == page(Results(REPRODUCE / "results"))


@pytest.mark.parametrize(
    ("name", "make_csv", "summarize"),
    [("table1", table_csv, summarize_lines), ("sift", traffic_csv, summarize_traffic)],
)
def test_the_results_are_made_from_the_committed_runs(name, make_csv, summarize, tmp_path):
    with tarfile.open(REPRODUCE / "runs.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    lines = comparable_lines(Experiment.load(name), Selection(), tmp_path)
    assert make_csv(lines) == (REPRODUCE / "results" / f"{name}.csv").read_text(encoding="utf-8")
    committed = (REPRODUCE / "results" / f"{name}.json").read_text(encoding="utf-8")
    assert summarize(lines) == json.loads(committed)


@pytest.mark.parametrize("name", ["fig2-cnn-fashion-mnist-iid", "sift-cnn-fashion-mnist-noniid"])
def test_the_docs_show_the_committed_pictures(name):
    shown, made = (folder / f"{name}.png" for folder in (IMAGES, REPRODUCE / "results"))
    assert shown.read_bytes() == made.read_bytes()


@pytest.mark.parametrize(
    ("task", "model"),
    [
        ("vgg11-cifar10", "VGG-11"),
        ("resnet18-cifar10", "ResNet-18"),
        ("vit-tiny-cifar10", "ViT-Tiny"),
    ],
)
def test_the_readme_says_how_sift_does_on_the_larger_models(task, model):
    told = json.loads((REPRODUCE / "results" / "sift.json").read_text(encoding="utf-8"))
    found = {(x["setting"], x["method"]): x for x in told if x["task"] == task}
    readme = " ".join((REPRODUCE.parent / "README.md").read_text(encoding="utf-8").split())
    iid, noniid = (found[s, "sift"]["target"]["ratio_up"] for s in ("iid", "noniid"))
    ours, theirs = (
        [100 * found[s, name]["final_accuracy"]["mean"] for s in ("iid", "noniid")]
        for name in ("sift", "fedadam-ssm")
    )
    points = [a - b for a, b in zip(ours, theirs, strict=True)]
    times = f"{iid:.0f} and {noniid:.0f} times"
    claim = re.search(rf"{model} (?:it is )?{times}, and it ends ([^;(]+)", readme)
    assert claim
    assert claim[1].strip() == in_words(*points)


def in_words(iid, noniid):
    sides = ["above" if points > 0 else "below" for points in (iid, noniid)]
    first, second = (f"{abs(points):.1f}" for points in (iid, noniid))
    if sides[0] == sides[1]:
        return f"{first} and {second} points {sides[0]}"
    return f"{first} points {sides[0]} and {second} {sides[1]}"


def test_the_readme_says_how_sift_compares():
    told = json.loads((REPRODUCE / "results" / "sift.json").read_text(encoding="utf-8"))
    cnn = {(x["setting"], x["method"]): x for x in told if x["task"] == "cnn-fashion-mnist"}
    settings = ("iid", "noniid")
    iid, noniid = (f"{cnn[name, 'sift']['target']['ratio_up']:.0f}" for name in settings)
    sentence = f"{iid} (IID) and {noniid} (Dirichlet 0.1) times fewer bytes up"
    readme = (REPRODUCE.parent / "README.md").read_text(encoding="utf-8")
    assert sentence in readme
    assert "ends above it" in readme
    for name in settings:
        ours, theirs = (
            cnn[name, each]["final_accuracy"]["mean"] for each in ("sift", "fedadam-ssm")
        )
        assert ours > theirs


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
