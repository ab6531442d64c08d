"""The page of results has the committed results; runs are packed into the same bytes every time."""

import importlib
import json
import sys
import tarfile
from pathlib import Path

import pytest

from fedsift.cli import main

REPRODUCE = Path(__file__).parents[2] / "reproduce"
sys.path.insert(0, str(REPRODUCE))
pack, results_page = (importlib.import_module(name) for name in ("pack", "results_page"))


def test_the_page_has_the_committed_results():
    page = results_page.PAGE.read_text(encoding="utf-8")
    assert results_page.filled(page) == page


def test_the_documentation_has_the_committed_figures():
    committed = {path.name: path.read_bytes() for path in results_page.RESULTS.glob("rivals-*.png")}
    shown = {path.name: path.read_bytes() for path in results_page.IMAGES.glob("rivals-*.png")}
    assert shown == committed


ROW = {
    "task": "cnn-500-clients", "setting": "noniid", "method": "sift", "tuned": True,
    "target": "task", "line": "sift@lr=0.003", "accuracy": 0.8, "seeds": [200, 201], "reached": 2,
    "round": 10.0, "up": 0.002, "up_range": [0.001, 0.003], "down": 0.01, "both": 0.012,
    "both_range": [0.01, 0.014], "seconds_1_mbit": 600.0, "seconds_10_mbit": 60.0, "ratio": 33.0,
    "best_accuracy": None, "final_accuracy": None, "within": {"0.001": None, "1": 0.85},
    "environment": [{"device": "cpu", "precision": "fp32", "commit": "abc"}],
}  # fmt: skip
OPEN = ROW | {"method": "sparseloco", "line": None, "seeds": [], "within": {}, "environment": []}


def test_a_row_has_its_spread_and_open_rows_say_so():
    harder = [ROW | {"target": name, "line": None} for name in ("fedadam-ssm", "fedadam")]
    text = "\n".join(results_page.rivals([ROW, OPEN, *harder]))
    assert "### CNN, 20 of 500 clients, Dirichlet 0.3" in text
    cells = "2 of 2 | 10 | 2.0 (1.0 to 3.0) | 12.0 (10.0 to 14.0) | 33 | open | open | –"
    assert f"| sift | {cells} |" in text
    assert f"| SparseLoCo | open |{'  |' * 7}" in text
    assert "No configuration has been tested yet." in results_page.rivals([OPEN])
    assert "Test seeds 200, 201; cpu, fp32, commit abc." in text
    assert "| sift | – | **85.0 %** |" in "\n".join(results_page.budgets([ROW, OPEN]))
    assert "| sift | 10.0 min | 60.0 s |" in "\n".join(results_page.seconds([ROW, OPEN]))


def test_what_was_not_run_is_listed_as_open():
    run = {"task": "cnn-500-clients", "setting": "noniid"}
    text = "\n".join(results_page.open_rows([ROW, OPEN], [run]))
    names = "`fedadam-ssm`, `sparse-fedsgd`, `sparseloco`"
    assert f"| CNN, 20 of 500 clients, Dirichlet 0.3 | {names} | the target |" in text
    assert f"| `sift`, {names} | FedAdam's best |" in text
    assert "| ResNet-18, CIFAR-10, IID | all | all |" in text


def test_packed_runs_give_the_same_results(cwd, monkeypatch):
    words = ["reproduce", "table1", "--task", "cnn-fashion-mnist", "--setting", "iid", "--quick"]
    words += ["--rounds", "1", "--methods", "fedsgd,sparse-fedsgd", "--device", "cpu"]
    assert main([*words, "--out", "all"]) == 0
    pack.main("all", "cnn-fashion-mnist/iid", "one.tar.xz")
    pack.main("all", "cnn-fashion-mnist/iid", "other.tar.xz")
    assert Path("one.tar.xz").read_bytes() == Path("other.tar.xz").read_bytes()
    with tarfile.open("one.tar.xz") as archive:
        archive.extractall("unpacked", filter="data")
    assert main([*words, "--no-run", "--out", "unpacked"]) == 0
    ours, theirs = (
        json.loads(Path(folder, "results", "table1.json").read_text())
        for folder in ("all", "unpacked")
    )
    for one, other in zip(ours, theirs, strict=True):
        assert one == pytest.approx(other) if not isinstance(one, dict) else one.keys()
        assert one["best_accuracy"] == other["best_accuracy"]
    Path("all/cnn-fashion-mnist/iid/fedsgd/seed-0/summary.json").unlink()
    pack.main("all", "cnn-fashion-mnist/iid", "one.tar.xz")  # keeps what is no longer there
    assert Path("one.tar.xz").read_bytes() == Path("other.tar.xz").read_bytes()
