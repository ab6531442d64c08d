"""Experiments are planned as in the paper, can be run piece by piece, and give result files."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedsift.cli import main
from fedsift.data import DATASETS
from fedsift.models import MODELS
from fedsift.reproduce.experiments import EXPERIMENTS, Experiment, read_pinned
from fedsift.reproduce.parallel import unique_runs
from fedsift.reproduce.plan import Selection, plan
from fedsift.reproduce.results import Outcome
from fedsift.reproduce.rivals import groups_of, validation_runs
from fedsift.reproduce.runner import DIVERGED, cached_dataset, execute_run, is_finished
from fedsift.reproduce.traffic import summarize_traffic
from fedsift.runs import RunFolder
from fedsift.runs.records import last_round
from fork_server import ForkedContext, ForkedPython

TABLE_1, SIFT = Experiment.load("table1"), Experiment.load("sift")
TASKS = ("cnn-fashion-mnist", "resnet18-svhn", "resnet18-cifar10", "vgg11-cifar10")
TEN = {
    "fedadam-ssm", "fedadam-top", "fairness-top", "fedadam-ssm-m", "fedadam-ssm-v", "fedadam",
    "onebit-adam", "efficient-adam", "fedsgd", "sparse-fedsgd",
}  # fmt: skip
ADAM = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-6}
LOCAL = {"local_steps": 30, "lr": 0.001}
SPARSE = {"density": 0.05}

# Section VI, "Implementation".
PAPER = {
    **{(task, name): ADAM | LOCAL for task in TASKS for name in TEN if name.startswith("fe")},
    **{
        (task, name): ADAM | LOCAL | SPARSE
        for task in TASKS
        for name in ("fedadam-ssm", "fedadam-top", "fairness-top", "fedadam-ssm-m", "fedadam-ssm-v")
    },
    **{(task, "fedsgd"): LOCAL for task in TASKS},
    **{(task, "sparse-fedsgd"): LOCAL | SPARSE for task in TASKS},
    **{(task, "onebit-adam"): ADAM | {"lr": 0.0001, "warmup_rounds": 1} for task in TASKS},
    **{(task, "efficient-adam"): ADAM | {"lr": 0.0001, "bits": 6} for task in TASKS},
    ("cnn-fashion-mnist", "efficient-adam"): ADAM | {"lr": 0.001, "bits": 2},
    ("vgg11-cifar10", "efficient-adam"): ADAM | {"lr": 0.001, "bits": 6},
    ("vgg11-cifar10", "onebit-adam"): ADAM | {"lr": 0.001, "warmup_rounds": 1},
    ("vgg11-cifar10", "fedsgd"): LOCAL | {"lr": 0.01},
    ("vgg11-cifar10", "sparse-fedsgd"): LOCAL | SPARSE | {"lr": 0.01},
}


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("setting", ["iid", "noniid"])
def test_table_1_has_ten_methods_with_the_papers_settings(task, setting):
    runs = plan(TABLE_1, Selection(task, setting, seeds=2))
    usual = {run.label: run.config for run in runs if run.label in TEN}
    assert set(usual) == TEN
    for name, config in usual.items():
        values = config.flat()
        assert {key: values[key] for key in PAPER[task, name]} == PAPER[task, name], name
        assert (config.clients, config.batch_size, config.participation) == (20, 64, 1.0)
        assert (config.partition, config.theta) == (
            ("iid", 0.1) if setting == "iid" else ("dirichlet", 0.1)
        )
    assert {run.config.seed for run in runs} == {0, 1}
    assert {run.label for run in runs} - TEN == {"fedsgd@lr=0.1", "sparse-fedsgd@lr=0.1"}


@pytest.mark.parametrize(
    ("task", "targets"),
    [
        ("cnn-fashion-mnist", (0.804, 0.798)),
        ("resnet18-svhn", (0.802, 0.744)),
        ("resnet18-cifar10", (0.70, 0.50)),
        ("vgg11-cifar10", (0.624, 0.562)),
    ],
)
def test_the_targets_are_those_of_table_1(task, targets):
    for setting, target in zip(("iid", "noniid"), targets, strict=True):
        assert {r.target for r in plan(TABLE_1, Selection(task, setting))} == {target}


def planned(name, selection):
    """The runs of an experiment that are known before any has ended."""
    experiment = Experiment.load(name)
    if name != "rivals":
        return plan(experiment, selection)
    groups = groups_of(experiment, selection)
    return unique_runs(
        run for group in groups for run in validation_runs(experiment, group, selection)
    )


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_plans_runs_that_fit_their_models(name, quick):
    runs = planned(name, Selection(quick=quick))
    assert len({run.path for run in runs}) == len(runs)
    for run in runs:
        assert MODELS[run.config.model].shape == DATASETS[run.config.dataset].shape
        if not quick:
            assert run.config.rounds <= 1500


def paths(name, **wanted):
    return {run.path for run in plan(Experiment.load(name), Selection(**wanted))}


def test_figures_share_identical_runs():
    assert paths("table1") == paths("fig2") == paths("fig3")
    for name in ("fig5", "fig6", "fig7", "fig8"):
        for task in TASKS:
            assert len(paths(name, task=task, seeds=1) & paths("table1")) == 2, name
    assert len(paths("fig4", task=TASKS[0], seeds=1) & paths("table1")) == 4


def test_runs_with_one_path_differ_only_in_their_rounds():
    found = {}
    for name in EXPERIMENTS[1:]:
        for run in planned(name, Selection(seeds=1)):
            if not run.measures_updates:
                values = run.config.flat() | {"rounds": 1}
                assert found.setdefault(run.path, values) == values, run.path


def test_methods_and_rounds_can_be_chosen():
    runs = plan(TABLE_1, Selection(TASKS[0], "iid", ("fedadam", "fedsgd"), 1, rounds=7))
    assert [run.label for run in runs] == ["fedadam", "fedsgd", "fedsgd@lr=0.1"]
    assert {run.config.rounds for run in runs} == {7}


def test_the_papers_table_is_complete():
    paper = read_pinned("paper")
    assert {task: set(both) for task, both in paper.items()} == {
        task: {"iid", "noniid"} for task in TASKS if task != "resnet18-cifar10"
    }
    methods = TEN - {"fedsgd", "sparse-fedsgd"}
    for both in paper.values():
        for values in both.values():
            assert set(values) == methods
            assert min(values, key=values.get) == "fedadam-ssm"
            assert 2 <= sum(x == float("inf") for x in values.values()) <= 4


def test_a_line_is_listed_with_the_papers_number(cwd):
    words = ["--task", "cnn-fashion-mnist", "--setting", "iid", "--rounds", "1", "--seeds", "1"]
    chosen = ["--methods", "fedadam-ssm,onebit-adam,fedsgd"]
    assert main(["reproduce", "table1", *words, *chosen]) == 0
    found = json.loads((cwd / "runs" / "reproduce" / "results" / "table1.json").read_text())
    about = {x["method"]: (x["in_paper"], x["paper_mibit"], x["paper_ratio"]) for x in found}
    assert about == {
        "fedadam-ssm": (True, 8.15, 1.0),
        "onebit-adam": (True, None, None),
        "fedsgd": (False, None, None),
        "fedsgd@lr=0.1": (False, None, None),
    }


# Runs on a Fashion-MNIST of 60 samples.


SMALL = ["--task", "cnn-fashion-mnist", "--setting", "iid", "--quick", "--rounds", "2"]


def test_table_1_has_csv_and_json_and_its_runs_are_not_repeated(cwd, capsys):
    words = ["reproduce", "table1", *SMALL, "--methods", "fedadam-ssm,onebit-adam"]
    assert main(words) == 0
    assert not set(capsys.readouterr().out) & set("┃│…")  # fits into 80 columns
    runs, results = cwd / "runs" / "quick", cwd / "runs" / "quick" / "results"
    rows = list(csv.DictReader((results / "table1.csv").open()))
    assert [row["method"] for row in rows] == ["fedadam-ssm", "onebit-adam"]
    for row in rows:
        folder = RunFolder(runs / "cnn-fashion-mnist" / "iid" / row["method"] / "seed-0")
        history = folder.history()
        assert last_round(history) == 2 == int(row["rounds"])
        assert float(row["best_accuracy"]) == max(r["accuracy"] for r in history[1:])
        assert (row["seed"], row["target"], row["mibit"]) == ("0", "0.75", "")
        assert row["device"].startswith("cpu")
        assert not folder.checkpoint_file.exists()
    ssm, _ = json.loads((results / "table1.json").read_text())
    assert (ssm["mibit"], ssm["reached"], ssm["seeds"]) == (None, 0, [0])
    assert not ssm["in_paper"]  # its target is another one
    before = {p: p.stat().st_mtime_ns for p in runs.rglob("metrics.jsonl")}
    assert main(words) == 0
    assert {p: p.stat().st_mtime_ns for p in runs.rglob("metrics.jsonl")} == before


def test_an_interrupted_run_resumes_with_the_same_result(cwd):
    (run,) = plan(TABLE_1, Selection(TASKS[0], "iid", ("fedadam-ssm",), 1, 3, quick=True))

    def stop(record):
        if record["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute_run(run, cwd / "broken", stop)
    assert not is_finished(run, cwd / "broken")
    seen = []
    execute_run(run, cwd / "broken", seen.append)
    execute_run(run, cwd / "whole", lambda record: None)
    assert [record["round"] for record in seen] == [3]
    assert is_finished(run, cwd / "broken")
    broken, whole = (RunFolder(cwd / name / run.path).history() for name in ("broken", "whole"))
    for a, b in zip(broken, whole, strict=True):
        assert {**a, "seconds": 0} == {**b, "seconds": 0}


def test_a_run_can_be_extended_but_not_shortened(cwd):
    words = ["reproduce", "table1", *SMALL[:-1], "2", "--methods", "fedadam"]
    assert main(words) == 0
    assert main([*words[:-3], "3", *words[-2:]]) == 0
    folder = RunFolder(cwd / "runs/quick/cnn-fashion-mnist/iid/fedadam/seed-0")
    assert last_round(folder.history()) == 3
    assert main(words) == 0
    assert last_round(folder.history()) == 3


def test_a_longer_line_is_cut_to_the_rounds_of_the_others(cwd):
    words = [*SMALL[:-1], "2", "--methods", "fedadam-ssm"]
    assert main(["reproduce", "table1", *words]) == 0
    path = cwd / "runs/quick/cnn-fashion-mnist/iid/fedadam-ssm/seed-0"
    assert last_round(RunFolder(path).history()) == 2
    (path / DIVERGED).write_text("in round 3")
    assert main(["reproduce", "fig8", *SMALL[:-1], "1"]) == 0
    lines = json.loads((cwd / "runs/quick/results/fig8.json").read_text())
    assert [line["rounds"] for line in lines] == [1] * len(lines)
    usual = next(line for line in lines if line["method"] == "fedadam-ssm")
    assert usual["best_accuracy"] == RunFolder(path).history()[1]["accuracy"]
    assert not usual["diverged"]


def test_a_folder_with_another_run_is_refused(cwd, capsys):
    words = ["reproduce", "table1", *SMALL, "--methods", "fedadam"]
    assert main(words) == 0
    file = cwd / "runs/quick/cnn-fashion-mnist/iid/fedadam/seed-0/config.toml"
    file.write_text(file.read_text().replace("clients = 10", "clients = 9"))
    assert main([*words[:-3], "3", *words[-2:]]) == 2
    assert "--out" in capsys.readouterr().err


def test_stop_at_target_ends_a_run_at_its_target(cwd):
    (run,) = plan(TABLE_1, Selection(TASKS[0], "iid", ("fedadam-ssm",), 1, 4, quick=True))
    easy = replace(run, target=0.001)
    execute_run(easy, cwd, lambda record: None, stop_at_target=True)
    assert last_round(RunFolder(cwd / run.path).history()) == 1
    assert is_finished(easy, cwd, stop_at_target=True)
    assert not is_finished(easy, cwd)
    summary = json.loads(RunFolder(cwd / run.path).summary_file.read_text())
    assert summary["rounds"] == 1


def test_a_run_that_diverges_is_a_result(cwd):
    (run,) = plan(TABLE_1, Selection(TASKS[0], "iid", ("fedadam",), 1, 4, quick=True))
    wild = replace(run, config=replace(run.config, settings={"lr": 1e38, "local_steps": 30}))
    execute_run(wild, cwd, lambda record: None)
    assert is_finished(wild, cwd)
    assert "diverged in round" in (cwd / run.path / DIVERGED).read_text()


def test_figure_1_counts_every_coordinate_of_every_client(cwd):
    assert main(["reproduce", "fig1", *SMALL]) == 0
    (file,) = (cwd / "runs" / "quick").rglob("updates.json")
    found = json.loads(file.read_text())
    for role in "wmv":
        assert sum(found["counts"][role]) + found["zeros"][role] == 10 * 21_840
    summary = json.loads((cwd / "runs/quick/results/fig1.json").read_text())["cnn-fashion-mnist"]
    assert summary["ΔW"]["mean_log10"] > summary["ΔM"]["mean_log10"] > summary["ΔV"]["mean_log10"]
    assert (cwd / "runs/quick/results/fig1-cnn-fashion-mnist.png").stat().st_size > 5000


def test_the_same_runs_give_identical_figures(cwd):
    words = ["reproduce", "fig8", *SMALL]
    assert main(words) == 0
    results = cwd / "runs" / "quick" / "results"
    names = {f"fig8-cnn-fashion-mnist-iid.{kind}" for kind in ("csv", "png", "svg")}
    assert {path.name for path in results.iterdir()} == {"fig8.json", *names}
    before = {path: path.read_bytes() for path in results.iterdir()}
    assert main([*words, "--no-run"]) == 0
    assert {path: path.read_bytes() for path in results.iterdir()} == before
    rows = list(csv.DictReader((results / "fig8-cnn-fashion-mnist-iid.csv").open()))
    assert [(r["method"], r["round"]) for r in rows][:3] == [
        ("fedadam-ssm@density=0.01", "1"),
        ("fedadam-ssm@density=0.01", "2"),
        ("fedadam-ssm", "1"),
    ]


def test_figure_4_has_all_its_settings(cwd):
    assert main(["reproduce", "fig4", *SMALL[:2], "--quick", "--rounds", "1"]) == 0
    lines = json.loads((cwd / "runs/quick/results/fig4.json").read_text())
    found = {(line["method"], line["setting"]) for line in lines}
    wanted = {"iid", "noniid", "theta-1", "theta-0.5"}
    assert found == {(name, s) for name in ("fedadam-ssm", "fedadam") for s in wanted}
    assert (cwd / "runs/quick/results/fig4-cnn-fashion-mnist.svg").exists()


def test_tasks_without_data_are_skipped_unless_named(cwd, capsys):
    words = ["reproduce", "fig5", "--setting", "iid", "--quick", "--rounds", "1"]
    assert main(words) == 0
    assert "skipped vgg11-cifar10: its data is not on this machine" in capsys.readouterr().err
    assert main([*words, "--task", "vgg11-cifar10"]) == 2
    assert "fedsift data get cifar-10" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "phrase"),
    [
        (["table2"], "table1, fig1"),
        (["fig2", "--task", "cnn"], "cnn-fashion-mnist"),
        (["fig2", "--setting", "theta-1"], "iid, noniid"),
        (["fig5", "--methods", "fedadam"], "fedadam-ssm"),
        (["table1", "--seeds", "0"], "at least 1"),
        (["table1", "--no-run"], "no run of table1"),
        (["table1", "--no-run", "--rounds", "0"], "rounds must be at least 1"),
        (["table1", "--no-run", "--device", "tpu"], "auto, cpu, cuda"),
        (["table1", *SMALL, "--device", "tpu"], "cuda"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_bad_input_is_one_line(words, phrase, cwd, capsys):
    assert main(["reproduce", *words]) == 2
    said = capsys.readouterr().err.splitlines()
    assert phrase in said[-1]
    assert said[-1].startswith("fedsift: ")


# The comparison of sift.

SIFT_TASKS = SIFT.tasks


def test_the_comparison_of_sift_shares_runs_of_table_1_and_adds_two_transformers():
    assert SIFT_TASKS[3:] == ("vit-tiny-cifar10", "char-lm")
    shared = paths("sift", methods=("fedadam-ssm", "fedadam"), seeds=1) & paths("table1")
    assert len(shared) == 3 * 2 * 2
    for task, setting in [(task, s) for task in SIFT_TASKS for s in ("iid", "noniid")]:
        configs = [run.config for run in plan(SIFT, Selection(task, setting, seeds=1))]
        for key in ("dataset", "model", "partition", "clients", "batch_size", "lr"):
            assert len({c.flat()[key] for c in configs}) == 1


def test_the_non_iid_language_model_is_partitioned_by_document():
    runs = plan(SIFT, Selection("char-lm", seeds=1))
    assert {(run.setting, run.config.partition) for run in runs} == {
        ("iid", "iid"), ("noniid", "documents"),
    }  # fmt: skip


def test_several_tasks_can_be_named():
    both = plan(TABLE_1, Selection("cnn-fashion-mnist,vgg11-cifar10", seeds=1))
    assert {run.task for run in both} == {"cnn-fashion-mnist", "vgg11-cifar10"}


def outcome(label, seed, *rounds):
    """A run; each round is its accuracy, paper bits, bytes up and bytes down."""
    (run,) = plan(SIFT, Selection(TASKS[0], "iid", (label,), 1))
    keys = ("accuracy", "uplink_bits_paper", "uplink_bytes", "downlink_bytes")
    history = [
        {"round": n, **dict(zip(keys, values, strict=True))} for n, values in enumerate(rounds, 1)
    ]
    return Outcome(replace(run, config=replace(run.config, seed=seed)), history, {}, False)


def test_the_initial_model_is_listed_separately():
    record = (0.81, 8e6, 0.9e6, 3e6)
    with_model = replace(outcome("fedadam-ssm", 0, record), parameters=250_000)
    (summary,) = summarize_traffic([[with_model]])
    assert summary["first_model"] == 1.0
    assert summary["target"]["down"]["mean"] == pytest.approx(2.0)
    assert summary["target"]["both"]["mean"] == pytest.approx(2.9)


def test_traffic_is_counted_to_the_target_and_to_fedadams_best():
    easy, best = (0.81, 8e6, 0.9e6, 3e6), (0.9, 80e6, 9e6, 30e6)
    ssm = [outcome("fedadam-ssm", seed, easy, best) for seed in (0, 1)]
    adam = [outcome("fedadam", 0, (0.85, 0, 2e6, 4e6)), outcome("fedadam", 1, (0.95, 0, 2e6, 4e6))]
    ours = [
        outcome("sift", 0, (0.82, 0, 0.1e6, 0.2e6), (0.86, 0, 0.3e6, 0.6e6)),
        outcome("sift", 1, (0.10, 0, 0.1e6, 0.2e6), (0.81, 0, 0.3e6, 0.6e6)),
    ]
    of_ssm, of_adam, of_sift = summarize_traffic([ssm, adam, ours])
    target = of_sift["target"]
    assert (target["accuracy"], target["reached"], target["of"]) == (0.804, 2, 2)
    assert target["up"] == pytest.approx({"mean": 0.2, "sd": 0.02**0.5})
    assert target["both"]["mean"] == pytest.approx(0.6)
    assert target["ratio_up"] == pytest.approx(1.0 / 0.2)  # 8 Mbit are one megabyte
    assert target["ratio_both"] == pytest.approx(4.0 / 0.6)
    assert of_ssm["target"]["ratio_up"] == pytest.approx(1 / 0.9)
    harder = of_sift["harder"]
    assert harder["accuracy"] == pytest.approx(0.9)  # the mean of 0.85 and 0.95
    assert (harder["reached"], harder["up"], harder["ratio_up"]) == (1, None, None)
    assert of_adam["harder"]["reached"] == 2
    assert of_adam["harder"]["ratio_up"] is None  # FedAdam-SSM did not get to 0.95
    assert of_sift["final_accuracy"]["mean"] == pytest.approx(0.835)


def test_without_fedadam_there_is_no_harder_target():
    (summary,) = summarize_traffic([[outcome("sift", 0, (0.9, 0, 1e6, 1e6))]])
    assert summary["harder"] == {
        "accuracy": None, "reached": 0, "of": 0, "round": None, "up": None, "down": None,
        "both": None, "ratio_up": None, "ratio_both": None,
    }  # fmt: skip
    assert summary["target"]["up"] == {"mean": 1.0, "sd": None}


def test_the_comparison_of_sift_has_a_table_and_a_figure(cwd, capsys):
    assert main(["reproduce", "sift", *SMALL]) == 0
    results = cwd / "runs" / "quick" / "results"
    names = {f"sift-cnn-fashion-mnist-iid.{kind}" for kind in ("csv", "png", "svg")}
    assert {path.name for path in results.iterdir()} == {"sift.json", "sift.csv", *names}
    rows = {row["method"]: row for row in csv.DictReader((results / "sift.csv").open())}
    assert set(rows) >= {"fedadam-ssm", "fedadam", "sift"}
    history = RunFolder(cwd / "runs/quick/cnn-fashion-mnist/iid/fedadam/seed-0").history()
    best = max(history[1:], key=lambda record: record["accuracy"])
    assert float(rows["fedadam"]["harder_target"]) == best["accuracy"]
    assert float(rows["fedadam"]["harder_up"]) == pytest.approx(best["uplink_bytes"] / 1e6)
    rounds = best["downlink_bytes"] - 4 * 21_840  # without the first model
    assert float(rows["fedadam"]["harder_down"]) == pytest.approx(rounds / 1e6)
    assert "FedAdam's best" in capsys.readouterr().out


def test_only_quick_runs_use_a_small_test_set(cwd, monkeypatch):
    monkeypatch.setattr("fedsift.reproduce.runner.QUICK_TEST", 7)
    assert len(cached_dataset.__wrapped__("fashion-mnist", True).test[1]) == 7
    assert len(cached_dataset.__wrapped__("fashion-mnist", False).test[1]) == 60
    assert {run.quick for run in plan(SIFT, Selection(quick=True))} == {True}
    assert {run.quick for run in plan(SIFT, Selection())} == {False}


# Many runs, in this process and in parallel.

TABLE = ["reproduce", "table1", *SMALL, "--seeds", "1", "--out", "there"]
TWO_METHODS = ["--methods", "fedadam-ssm,fedadam"]


def test_a_run_with_other_settings_is_not_taken_for_the_planned_one(cwd, capsys):
    words = [*TABLE, "--methods", "fedadam-ssm"]
    assert main(words) == 0
    full = [word for word in words if word != "--quick"]
    assert main(full) == 2  # the quick run has fewer clients
    line = capsys.readouterr().err.splitlines()[-1]
    assert "fedadam-ssm/seed-0 holds a run with other settings (clients" in line
    config = cwd / "there/cnn-fashion-mnist/iid/fedadam-ssm/seed-0/config.toml"
    lines = config.read_text().splitlines(keepends=True)
    config.write_text("".join(line for line in lines if not line.startswith("density")))
    assert main(words) == 2  # as if an older version had written it, without this setting
    assert "(density)" in capsys.readouterr().err


def test_a_figure_of_one_method_says_that_it_needs_another(cwd, capsys):
    assert main(["reproduce", "fig2", *SMALL, "--methods", "fedadam-ssm"]) == 0
    assert "fig2 compares methods, but" in capsys.readouterr().out


def test_a_failed_run_does_not_stop_the_others(cwd, monkeypatch, capsys):
    def fail_once(run, *rest):
        if run.label == "fedadam-ssm":
            raise RuntimeError("out of\nmemory")
        return execute_run(run, *rest)

    monkeypatch.setattr("fedsift.reproduce.parallel.execute_run", fail_once)
    assert main([*TABLE, *TWO_METHODS]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith("fedadam-ssm/seed-0: FAILED: RuntimeError: out of memory")
    assert lines[1].startswith("[2/2] cnn-fashion-mnist/iid/fedadam/seed-0: 2 rounds, accuracy")
    assert lines[-1] == "1 of 2 runs failed; the same command retries them"
    assert (cwd / "there/results/table1.csv").exists()


def test_runs_that_all_fail_leave_no_results(cwd, monkeypatch, capsys):
    def fail(run, *rest):
        raise RuntimeError("out of memory")

    monkeypatch.setattr("fedsift.reproduce.parallel.execute_run", fail)
    assert main([*TABLE, *TWO_METHODS]) == 1
    assert "2 of 2 runs failed" in capsys.readouterr().err
    assert not (cwd / "there/results").exists()


def test_the_same_command_continues_after_a_time_limit(cwd, monkeypatch, capsys):
    minutes = iter(range(1000))
    clock = SimpleNamespace(monotonic=lambda: 60 * next(minutes))
    monkeypatch.setattr("fedsift.cli.reproduce.time", clock)
    monkeypatch.setattr("fedsift.reproduce.parallel.time", clock)
    words = [*TABLE, *TWO_METHODS]
    assert main([*words, "--minutes", "2"]) == 0  # checked at the start and after each round
    assert "time is up: 2 runs are unfinished" in capsys.readouterr().err
    folder = RunFolder(cwd / "there/cnn-fashion-mnist/iid/fedadam-ssm/seed-0")
    assert last_round(folder.history()) == 1
    assert folder.checkpoint_file.exists()
    assert main(words) == 0
    assert last_round(folder.history()) == 2
    assert len(list((cwd / "there").rglob("summary.json"))) == 2
    assert main(words) == 0
    assert capsys.readouterr().err.count("2 rounds") == 2  # no run is repeated


@pytest.fixture
def forked_workers(monkeypatch):
    """Fork the processes of parallel runs from a server that has torch imported."""
    monkeypatch.setattr("fedsift.reproduce.parallel.get_context", lambda _: ForkedContext())


def test_a_killed_process_is_reported_in_one_line(cwd, monkeypatch, capsys, forked_workers):
    assert main([*TABLE, *TWO_METHODS, "--jobs", "0"]) == 2
    assert "jobs must be at least 1" in capsys.readouterr().err

    def kill(*_):
        raise BrokenProcessPool

    with monkeypatch.context() as patch:
        patch.setattr("fedsift.reproduce.parallel.Future.result", kill)
        assert main([*TABLE, *TWO_METHODS, "--jobs", "2"]) == 1
    assert capsys.readouterr().err.count("was killed") == 2
    assert main([*TABLE, *TWO_METHODS]) == 0


def test_parallel_runs_equal_sequential_ones(cwd, capsys, forked_workers):
    assert main([*TABLE, *TWO_METHODS]) == 0
    assert main([*TABLE[:-1], "parallel", *TWO_METHODS, "--jobs", "2"]) == 0
    assert capsys.readouterr().err.count("2 rounds, accuracy") == 4
    for method in TWO_METHODS[1].split(","):
        path = f"cnn-fashion-mnist/iid/{method}/seed-0"
        one, other = (RunFolder(cwd / out / path).history() for out in ("there", "parallel"))
        for record in (*one, *other):
            record.pop("seconds")
        assert one == other


def test_ctrl_c_stops_parallel_runs_after_their_rounds(cwd):
    words = ["table1", *SMALL[:-2], "--rounds", "500", "--seeds", "1", "--jobs", "2"]
    process = ForkedPython("-m", "fedsift", "reproduce", *words, cwd=cwd, start_new_session=True)
    quick = cwd / "runs" / "quick"
    deadline = time.monotonic() + 60
    while len(list(quick.rglob("metrics.jsonl"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    errors = process.communicate(timeout=30)[1]
    assert process.returncode == 130
    assert errors.splitlines()[-1] == "stopped: the same command continues from here"
    assert "Traceback" not in errors
    assert len(list(quick.rglob("config.toml"))) == 2


def test_refused_input_leaves_no_folder(cwd, capsys):
    words = ["reproduce", "table1", *SMALL, "--methods", "fedsgd", "--precision", "tf32"]
    assert main(words) == 2
    assert "needs a GPU" in capsys.readouterr().err
    assert not list(cwd.rglob("config.toml"))


def test_experiments_share_their_runs(cwd, capsys):
    assert main(["reproduce", "fig2", *TABLE[1:], "--methods", "fedadam,fedsgd"]) == 0
    errors = capsys.readouterr().err
    assert errors.count("fedadam/seed-0: 2 rounds") == 1
    results = cwd / "there" / "results"
    assert {path.stem for path in results.glob("*.json")} == {"table1", "fig2"}


CORE_ONLY = """
import sys

absent = "plotly matplotlib jinja2 sklearn scipy flwr".split()

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in absent:
            raise ModuleNotFoundError(name + " is not here", name=name)

sys.meta_path.insert(0, Block())
from fedsift.cli import main
sys.exit(main({words!r}))
"""


def test_runs_and_tables_need_only_the_core_dependencies(cwd):
    words = ["reproduce", "table1", "fig2", *TABLE[2:], "--methods", "fedadam-ssm,fedadam"]
    source = Path(__file__).parents[2] / "src"
    done = subprocess.run(
        [sys.executable, "-c", CORE_ONLY.format(words=words)],
        env={"PYTHONPATH": str(source), "FEDSIFT_DATA": str(cwd.parent / "data")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "fedadam-ssm/seed-0: 2 rounds" in done.stderr
    assert "no figures: matplotlib is not installed" in done.stderr
    results = cwd / "there" / "results"
    csvs = {"table1.csv", "fig2-cnn-fashion-mnist-iid.csv"}
    assert {path.name for path in results.glob("*.csv")} == csvs
    assert not list(results.glob("*.png"))
    assert main(["reproduce", "fig2", "--quick", "--no-run", "--out", "there"]) == 0
    assert len(list(results.glob("*.png"))) == 1


@pytest.mark.parametrize(
    ("words", "phrase"),
    [
        (["table1", "--task", "char-lm"], "table1 has no task 'char-lm'; choose one of: cnn-"),
        (["table1", "--quick", "--seeds", "0"], "seeds must be at least 1"),
        (["table1", "fig2", "--task", "cnn"], "unknown task 'cnn'"),
    ],
)
def test_a_wrong_selection_is_refused(words, phrase, cwd, capsys):
    assert main(["reproduce", *words]) == 2
    assert phrase in capsys.readouterr().err


def test_without_a_name_the_experiments_are_listed(capsys):
    assert main(["reproduce"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(EXPERIMENTS)
    assert "Convergence rate" in lines[0]


def test_a_line_can_be_selected_by_its_label():
    labels = [
        run.label
        for run in plan(
            TABLE_1,
            Selection(TASKS[0], "iid", ("fedsgd@lr=0.1", "fedadam"), seeds=1),
        )
    ]
    assert labels == ["fedadam", "fedsgd@lr=0.1"]
    with pytest.raises(ValueError, match=r"unknown method 'fedsgd@lr=0.2'; .* fedsgd@lr=0.1"):
        plan(TABLE_1, Selection(methods=("fedsgd@lr=0.2",)))
