"""Methods are tuned on validation data by one protocol, and tested with other seeds."""

import csv
import json
from dataclasses import replace

import pytest

from fedsift.cli import main
from fedsift.reproduce.experiments import Experiment, read_pinned
from fedsift.reproduce.plan import Selection
from fedsift.reproduce.results import Outcome
from fedsift.reproduce.rival_results import gradients_per_round, seconds_to
from fedsift.reproduce.rivals import (
    TEST,
    VALIDATION,
    choices_among,
    groups_of,
    targets_of,
    validation_runs,
)
from fedsift.reproduce.runner import may_stop
from fedsift.reproduce.traffic import Cost
from fedsift.runs import RunFolder
from fedsift.runs.config import RunConfig, read_values

RIVALS = Experiment.load("rivals")
CNN = Selection("cnn-fashion-mnist", "iid")
SMALL = ["reproduce", "rivals", "--task", "cnn-fashion-mnist", "--setting", "iid", "--quick"]
SMALL += ["--rounds", "2", "--seeds", "1", "--device", "cpu"]


@pytest.fixture
def tiny(cwd, monkeypatch):
    """The working directory; quick runs take a tenth of a second."""
    quick = read_pinned("tasks")["tasks"]["cnn-fashion-mnist"]["quick"]
    monkeypatch.setitem(quick, "clients", 2)
    monkeypatch.setitem(quick, "local_steps", 2)
    return cwd


def test_every_method_has_as_many_configurations():
    for group in groups_of(RIVALS, Selection()):
        runs = [run for run in validation_runs(RIVALS, group, Selection()) if run.competitors]
        counts = dict.fromkeys(group.methods, 0)
        for run in runs:
            counts[run.config.algorithm] += 1
            assert len(run.competitors) == 6
            assert run.path in run.competitors
            assert (run.config.validation, run.config.seed) == (0.1, 100)
        assert set(counts.values()) == {6}


def test_the_references_are_among_the_configurations_of_their_methods():
    for group in groups_of(RIVALS, Selection()):
        labels = {r.label: r for r in validation_runs(RIVALS, group, Selection()) if r.competitors}
        if "sift" in group.methods:
            assert {"sift", "fedadam-ssm"} <= set(labels)


@pytest.fixture
def line():
    """Three configurations of sift with runs of three rounds."""
    (group, *_) = groups_of(RIVALS, CNN)
    runs = [r for r in validation_runs(RIVALS, group, CNN) if r.config.algorithm == "sift"][:3]
    return [replace(run, config=replace(run.config, rounds=3)) for run in runs]


def outcome(run, *rounds, down=0.0):
    """The outcome of a run; each round is its accuracy and the bytes up so far."""
    history = [
        {"round": n, "accuracy": accuracy, "uplink_bytes": up, "downlink_bytes": down,
         "uplink_bits_paper": 0.0}
        for n, (accuracy, up) in enumerate(rounds, 1)
    ]  # fmt: skip
    return Outcome(run, history, {}, False)


SLOW = ((0.1, 10.0), (0.2, 20.0), (0.85, 30.0))
FAST = ((0.81, 20.0), (0.82, 40.0), (0.83, 60.0))
NEVER = ((0.1, 1.0), (0.7, 2.0), (0.6, 3.0))
OTHER = ((0.1, 1.0), (0.2, 2.0), (0.3, 3.0))


@pytest.mark.parametrize(
    ("rounds", "down", "best"),
    [
        ((SLOW, FAST, NEVER), (0, 0, 0), 1),  # the fewest bytes up, not the fewest rounds
        ((FAST, FAST, NEVER), (5, 0, 0), 1),  # of equal ones, the fewest both ways
        ((NEVER, FAST, FAST), (0, 5, 5), 1),  # then the first
        ((OTHER, NEVER, OTHER), (0, 0, 0), 1),  # none reaches it: the highest accuracy
        ((SLOW, FAST, NEVER[:2]), (0, 0, 0), None),  # might still need fewer bytes
        ((SLOW, FAST[:1], NEVER), (0, 0, 0), 1),  # ended at its target
        ((SLOW[:2], FAST, NEVER), (0, 0, 0), 1),  # has sent as much as the best
        ((SLOW, FAST, ()), (0, 0, 0), None),  # not begun
    ],
)
def test_the_least_uplink_to_the_target_is_chosen(rounds, down, best, line):
    given = zip(line, rounds, down, strict=True)
    choices = choices_among([outcome(run, *steps, down=x) for run, steps, x in given])
    chosen = choices.get(("sift", "task"))
    assert chosen == (None if best is None else line[best])


def test_the_harder_targets_are_those_of_complete_runs_with_the_papers_settings(line):
    labels = ("fedadam-ssm", "fedadam", "sift")
    runs = [replace(line[0], label=label) for label in labels]
    found = targets_of([outcome(runs[0], *SLOW), outcome(runs[1], *FAST[:2]), outcome(runs[2])])
    assert found == {"task": {100: 0.804}, "fedadam-ssm": {100: 0.85}, "fedadam": {}}


def test_a_run_ends_when_a_competitor_needed_less():
    (group, *_) = groups_of(RIVALS, CNN)
    run = validation_runs(RIVALS, group, CNN)[0]
    history = [{"round": 1, "accuracy": 0.5, "uplink_bytes": 9.0}]
    assert not may_stop(run, history, least=10.0)
    assert may_stop(run, history, least=9.0)
    assert may_stop(run, [{**history[0], "accuracy": 0.804}], least=10.0)


def test_the_work_of_a_round_is_counted_in_gradients():
    def work(algorithm, **settings):
        return gradients_per_round(RunConfig.from_values({"algorithm": algorithm, **settings}))

    assert work("sift", local_steps=7) == 7
    assert work("efficient-adam") == 1
    assert work("decomfl", perturbations=30) == 20
    assert work("e3sfc", local_steps=5, sample_steps=64, batch_size=64) == 8


def test_time_counts_what_a_participating_client_sends():
    values = {"algorithm": "sift", "clients": 500, "participation": 0.04, "model": "cnn"}
    config = RunConfig.from_values({**values, "dataset": "fashion-mnist"})
    cost = Cost(round=10, up=0.01, down=0.5, up_in_paper_format=0.0)
    computing = 10 * 30 * 0.006
    assert seconds_to(config, cost, 1.0) == pytest.approx(computing + 8 * (0.25 + 0.5))


def paths_below(folder):
    return {str(p.parent.relative_to(folder)) for p in folder.rglob("metrics.jsonl")}


def test_the_protocol_from_end_to_end(tiny, capsys):
    words = [*SMALL, "--methods", "sift,fedadam"]
    assert main(words) == 0
    quick = tiny / "runs" / "quick"
    validation = paths_below(quick / VALIDATION)
    assert len(validation) == 7
    assert {path.rpartition("/")[2] for path in validation} == {"seed-100"}
    test = paths_below(quick / TEST)
    assert {path.rpartition("/")[2] for path in test} == {"seed-200"}
    labels = {path.split("/")[2] for path in test}
    assert {"sift", "fedadam"} <= labels <= {path.split("/")[2] for path in validation}
    config = read_values(quick / VALIDATION / min(validation) / "config.toml")
    assert (config["validation"], config["seed"]) == (0.1, 100)
    rows = list(csv.DictReader((quick / "results" / "rivals.csv").open()))
    assert [row["data"] for row in rows] == ["validation"] * 7 + ["test"] * len(test)
    table = json.loads((quick / "results" / "rivals.json").read_text())
    by_key = {(row["method"], row["tuned"], row["target"]): row for row in table}
    sift = by_key["sift", True, "fedadam"]
    assert sift["line"] in labels
    assert by_key["sparseloco", True, "task"]["line"] is None
    assert "open" in capsys.readouterr().out
    files = {path: path.read_bytes() for path in (quick / "results").iterdir()}
    names = ("rivals.csv", "rivals.json", "rivals-cnn-fashion-mnist-iid.png",
             "rivals-cnn-fashion-mnist-iid.svg")  # fmt: skip
    assert {path.name for path in files} == {*names}
    before = {p: p.stat().st_mtime_ns for p in quick.rglob("metrics.jsonl")}
    assert main(words) == 0  # repeats nothing
    assert main([*SMALL, "--no-run"]) == 0
    assert {p: p.stat().st_mtime_ns for p in quick.rglob("metrics.jsonl")} == before
    assert {path: path.read_bytes() for path in (quick / "results").iterdir()} == files


def test_ending_at_the_target_leaves_harder_targets_open(tiny, monkeypatch):
    quick = read_pinned("tasks")["tasks"]["cnn-fashion-mnist"]["quick"]
    monkeypatch.setitem(quick, "target", 0.0)
    assert main([*SMALL, "--methods", "sift,fedadam", "--stop-at-target"]) == 0
    rounds = {str(p): len(RunFolder(p.parent).history()) for p in tiny.rglob("metrics.jsonl")}
    assert set(rounds.values()) == {2}  # rounds 0 and 1
    table = json.loads((tiny / "runs" / "quick" / "results" / "rivals.json").read_text())
    rows = [row for row in table if row["method"] == "sift" and row["tuned"]]
    assert [row["line"] is None for row in rows] == [False, True, True]
    assert [row["final_accuracy"] for row in rows] == [None] * 3


def test_a_method_that_is_not_compared_is_refused(tiny, capsys):
    assert main([*SMALL, "--methods", "fedprox"]) == 2
    assert "unknown method 'fedprox'" in capsys.readouterr().err
    assert main([*SMALL, "--seeds", "0"]) == 2


def test_a_setting_that_a_task_does_not_have_is_refused(capsys):
    assert main(["reproduce", "rivals", "--task", "cnn-500-clients", "--setting", "iid"]) == 2
    said = capsys.readouterr().err
    assert "rivals does not compare cnn-500-clients with --setting iid: leave out" in said
