"""The page of claims is what reproduce/claims.py writes, and its verdicts follow the results."""

import csv
import json
import math
import sys
import tarfile
from pathlib import Path

import pytest

from fedsift.reproduce.experiments import EXPERIMENTS, Experiment
from fedsift.reproduce.plan import Selection
from fedsift.reproduce.result_files import write_results
from shared import shared_folder

REPRODUCE = Path(__file__).parents[2] / "reproduce"
IMAGES = Path(__file__).parents[2] / "docs" / "images"
sys.path.insert(0, str(REPRODUCE))
from checks import Finding, Results, frames_fit_the_formula, rises_then_falls  # noqa: E402
from claims import PAGE, PICTURES, SECTIONS, page, row, verdict  # noqa: E402


def test_the_page_matches_the_results():
    assert PAGE.read_text(encoding="utf-8") == page(Results(REPRODUCE / "results"))


@pytest.fixture(scope="module")
def committed_runs(tmp_path_factory):
    """The folder of all committed runs."""
    return shared_folder(tmp_path_factory, "committed-runs", unpack)


def unpack(folder):
    for path in (REPRODUCE / "runs.tar.xz", REPRODUCE / "rivals" / "runs.tar.xz"):
        with tarfile.open(path) as archive:
            archive.extractall(folder, filter="data")


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_results_are_made_from_the_committed_runs(name, committed_runs, tmp_path):
    made = list(write_results(Experiment.load(name), Selection(), committed_runs, tmp_path))
    committed = (REPRODUCE / "results").glob(f"{name}[.-]*")
    texts = {path.name for path in committed if path.suffix in (".csv", ".json")}
    assert {path.name for path in made} == texts
    for path in made:
        assert path.read_bytes() == (REPRODUCE / "results" / path.name).read_bytes(), path.name


@pytest.mark.parametrize("name", PICTURES)
def test_the_docs_show_the_committed_pictures(name):
    assert (IMAGES / name).read_bytes() == (REPRODUCE / "results" / name).read_bytes()


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
    """Made-up results: FedAdam-SSM is the best by traffic, and FedAdam by rounds."""
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
        writer.writerow(["setting", "method", "round", "mibit", "megabytes", "accuracy"])
        methods = (("fedadam-ssm", 0.1, 0.89), ("fedadam", 6, 0.9), ("fedsgd", 2, 0.2))
        for name, sent, best in methods:
            for n in range(1, 31):
                share = 0.9 if name == "fedadam-ssm" else 1.0  # of the formula's bits
                megabytes = share * sent * n * 2**20 / 8e6
                writer.writerow(["iid", name, n, sent * n, megabytes, best * n / 30])
    return Results(tmp_path)


def cells_of(results, claim):
    (found,) = [c for claims in SECTIONS.values() for c in claims if c[0].startswith(claim)]
    cells = row(results, *found).split("|")
    return cells[3].strip().removeprefix("cnn-fashion-mnist, iid: "), cells[4].strip()


@pytest.mark.parametrize(
    ("claim", "measured", "conclusion"),
    [
        ("FedAdam's uplink", "3.000 × the bytes", "met"),
        (
            "FedAdam-SSM cuts",
            "0.7864 to 0.0118 MB per round; 3kq + d: 0.01311",
            "exceeded (1.11 ×)",
        ),
        ("FedAdam-SSM converges", "fedadam-top 1.050 × (no)", "not met (0.95 ×)"),
        ("CNN, IID: FedAdam-SSM needs", "1 Mibit", "exceeded (8.15 ×)"),
        ("CNN, IID: FedAdam needs", "10.00 ×", "exceeded (3.40 ×)"),
        ("FedAdam-SSM needs the fewest", "fedadam-ssm, 1 Mibit", "met"),
        ("1-bit Adam and Efficient-Adam reach", "∞, ∞ Mibit", "met"),
        ("FedAdam is better than FedAdam-SSM", "-1.0", "met"),
        ("VGG-11, IID: FedAdam-SSM needs", "–", "open"),
        ("A larger α", "–", "open"),
    ],
)
def test_verdicts_follow_from_the_results(claim, measured, conclusion, results):
    assert cells_of(results, claim) == (measured, conclusion)


@pytest.mark.parametrize(
    ("findings", "expected"),
    [
        ([Finding("", True), Finding("", False)], "met in 1 of 2"),
        ([Finding("", True, (1.05,)), Finding("", True, (3.0,))], "met (1.05 to 3.00 ×)"),
        ([Finding("", True, (1.2, math.inf))], "exceeded (1.20 to ∞ ×)"),
        ([Finding("", True, (0.4,), "points")], "met (+0.4 points)"),
    ],
)
def test_a_verdict_has_its_margins(findings, expected):
    assert verdict(findings) == expected


def test_frames_larger_than_the_formula_do_not_meet_it(results):
    file = results.folder / "fig2-cnn-fashion-mnist-iid.csv"
    rows = list(csv.reader(file.open()))
    with file.open("w") as out:
        csv.writer(out).writerows(
            [*r[:4], 2 * float(r[4]), r[5]] if r[1] == "fedadam-ssm" else r for r in rows
        )
    (finding,) = frames_fit_the_formula(results, "cnn-fashion-mnist", "iid")
    assert not finding.is_met
    assert finding.margins == pytest.approx([1 / 1.8])


def test_a_peak_inside_is_a_rise_and_a_fall():
    assert rises_then_falls([0.1, 0.3, 0.2], [])
    assert not rises_then_falls([0.1, 0.2, 0.3], [])
    assert not rises_then_falls([0.3, 0.2, 0.1], [])
