"""The plan and the results of the comparison on language models."""

import csv
import json
import sys
import tarfile
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedsift.algorithms.registry import METHODS

SCRIPTS = Path(__file__).parents[2] / "reproduce" / "llm"


def record(number, perplexity, megabytes, **more):
    """A line of metrics.jsonl; one without a perplexity was not evaluated."""
    return {
        "round": number, "accuracy": None, "loss": perplexity and perplexity / 10,
        "perplexity": perplexity, "uplink_bytes": 1e6 * megabytes,
        "downlink_bytes": 2e6 * megabytes, **more,
    }  # fmt: skip


@pytest.fixture
def scripts(monkeypatch):
    """The scripts as modules, which are forgotten after the test, and with them their method."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    names = ("methods", "plan", "results")
    yield SimpleNamespace(**{name: import_module(name) for name in names})
    for name in names:
        del sys.modules[name]
    METHODS.pop("fedavg-adam")


@pytest.fixture
def results(scripts):
    return scripts.results


@pytest.fixture
def plan(scripts):
    return scripts.plan


def write_run(folder, validation, losses):
    """Write a run that ends with this loss on the validation data."""
    folder.mkdir(parents=True)
    clients = {f"client_perplexity_{name}": 9.0 for name in ("mean", "worst", "p90", "std")}
    first = {"downlink_bytes": 5e5}  # the initial model
    lines = [{**record(0, 50.0, 0, validation_loss=5.0, **clients), **first}]
    for number, loss in enumerate(losses, 1):
        lines.append(record(number, 10 * loss, number, validation_loss=validation, **clients))
    lines.append(record(len(losses) + 1, None, 99))  # not evaluated
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "summary.json").write_text('{"environment": {"commit": "abc"}}')


def test_settings_are_chosen_on_the_validation_data_alone(results, tmp_path):
    runs = tmp_path / "runs" / "sotu"
    write_run(runs / "fedavg-adam" / "lr-0.001-eps-1e-12" / "seed-0", 3.0, [3.6, 3.4])
    write_run(runs / "sift" / "lr-0.003-eps-1e-12" / "seed-0", 3.2, [3.1, 3.0])  # best on the test
    write_run(runs / "sift" / "lr-0.001-eps-1e-12" / "seed-0", 2.9, [3.5, 3.4])
    write_run(runs / "sift" / "lr-0.001-eps-1e-12" / "seed-1", 2.9, [3.4, 3.3])
    (tmp_path / "results").mkdir()
    results.main(str(tmp_path / "runs"), str(tmp_path / "results"))
    with (tmp_path / "results" / "llm-comparison.csv").open() as file:
        rows = {row["method"]: row for row in csv.DictReader(file)}
    assert (rows["sift"]["lr"], rows["sift"]["eps"], rows["sift"]["seeds"]) == (
        "0.001",
        "1e-12",
        "2",
    )
    assert float(rows["sift"]["target"]) == 3.4  # of federated averaging
    assert float(rows["sift"]["mb_up_to_target"]) == 1.5  # in rounds 2 and 1, a MB each
    assert float(rows["sift"]["mb_both_to_target"]) == 4.5
    assert float(rows["sift"]["mb_both_to_target_from_seed"]) == 4.5 - 0.5
    assert float(rows["sift"]["loss_at_1_mb_up"]) == pytest.approx(3.45)
    assert (tmp_path / "results" / "llm-sotu.png").read_bytes().startswith(b"\x89PNG")


def test_the_committed_results_are_made_of_the_committed_runs(results, tmp_path):
    with tarfile.open(SCRIPTS / "runs.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    found = list(results.read_runs(tmp_path / "runs"))
    best = results.chosen(found)
    results.write(tmp_path / "tuning.csv", results.tuning_rows(found, best))
    final = [run for run in found if best.get(run.key) == run.settings]
    results.write(tmp_path / "curves.csv", results.curve_rows(final))
    results.write(tmp_path / "comparison.csv", results.result_rows(final))
    for name in ("tuning", "curves", "comparison"):
        committed = SCRIPTS / "results" / f"llm-{name}.csv"
        assert (tmp_path / f"{name}.csv").read_text() == committed.read_text()


def test_urgent_runs_come_first_then_the_main_methods_and_last_the_longest(plan):
    runs = list(plan.grid_runs(plan.TASKS, tuple(plan.LINES), plan.GRID, (plan.EPS,)))
    assert len(runs) == len({run.path for run in runs}) == len(plan.LINES) * 2 * 4
    first, rest = runs[: len(plan.URGENT)], runs[len(plan.URGENT) :]
    assert [run.task for run in first] == ["sotu"] * len(plan.URGENT)
    assert [(run.name, round(run.lr / run.line.base, 6)) for run in first] == list(plan.URGENT)
    lines = list(dict.fromkeys((run.name, run.task) for run in rest))
    assert lines[:8] == [(name, task) for task in plan.TASKS for name in plan.FIRST]
    assert {name for name, _ in lines[-2:]} == {"decomfl"}
    on_plays = [run.lr for run in rest if run.task == "shakespeare"]
    assert on_plays[:4] == [0.001, 0.0003, 0.003, 0.0001]


def test_only_the_chosen_settings_are_repeated_with_other_seeds(plan):
    runs = list(plan.grid_runs(("sotu",), ("sift", "fedavg-sgd"), plan.GRID, (plan.EPS,)))
    best = {("sotu", "sift"): (0.0003, "1e-12"), ("sotu", "fedavg-sgd"): (0.3, "")}
    found = [(run.name, run.lr, run.seed) for run in plan.repeated(runs, best, plan.SEEDS)]
    assert found == [(*line, n) for line in (("sift", 3e-4), ("fedavg-sgd", 0.3)) for n in (1, 2)]
