"""The paper's table and figures are planned as the paper has them, run in pieces, and drawn."""

import csv
import gzip
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

import numpy as np
import pytest

from fedsift.cli.commands import main
from fedsift.data import DATASETS
from fedsift.models import MODELS
from fedsift.reproduce import PINS, Pin, Wanted, plan
from fedsift.reproduce.__main__ import main as core_main
from fedsift.reproduce.pins import read
from fedsift.reproduce.results import Outcome
from fedsift.reproduce.runner import DIVERGED, carry_out, is_done, loaded
from fedsift.reproduce.traffic import costs
from fedsift.runs import RunFolder

TASKS = ("cnn-fashion-mnist", "resnet18-svhn", "resnet18-cifar10", "vgg11-cifar10")
TEN = {
    "fedadam-ssm", "fedadam-top", "fairness-top", "fedadam-ssm-m", "fedadam-ssm-v", "fedadam",
    "onebit-adam", "efficient-adam", "fedsgd", "sparse-fedsgd",
}  # fmt: skip
ADAM = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-6}
LOCAL = {"local_steps": 30, "lr": 0.001}
SPARSE = {"density": 0.05}

# Section VI, "Implementation", read once more.
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
def test_table_1_runs_ten_methods_with_the_papers_settings(task, setting):
    runs = plan(Pin.of("table1"), Wanted(task, setting, seeds=2))
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
        assert {r.target for r in plan(Pin.of("table1"), Wanted(task, setting))} == {target}


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("name", PINS)
def test_every_pin_plans_runs_that_can_be_made(name, quick):
    runs = plan(Pin.of(name), Wanted(quick=quick))
    assert len({run.path for run in runs}) == len(runs)
    for run in runs:
        assert MODELS[run.config.model].shape == DATASETS[run.config.dataset].shape
        if not quick:
            assert run.config.rounds <= 1500


def paths(name, **wanted):
    return {run.path for run in plan(Pin.of(name), Wanted(**wanted))}


def test_figures_share_the_runs_that_are_the_same():
    assert paths("table1") == paths("fig2") == paths("fig3")
    for name in ("fig5", "fig6", "fig7", "fig8"):
        for task in TASKS:
            assert len(paths(name, task=task, seeds=1) & paths("table1")) == 2, name
    assert len(paths("fig4", task=TASKS[0], seeds=1) & paths("table1")) == 4


def test_runs_in_one_folder_have_one_configuration_but_for_the_rounds():
    found = {}
    for name in PINS[1:]:
        for run in plan(Pin.of(name), Wanted(seeds=1)):
            if not run.measures_updates:
                values = run.config.flat() | {"rounds": 1}
                assert found.setdefault(run.path, values) == values, run.path


def test_methods_and_rounds_can_be_chosen():
    runs = plan(Pin.of("table1"), Wanted(TASKS[0], "iid", ("fedadam", "fedsgd"), 1, rounds=7))
    assert [run.label for run in runs] == ["fedadam", "fedsgd", "fedsgd@lr=0.1"]
    assert {run.config.rounds for run in runs} == {7}


def test_the_papers_table_is_whole():
    paper = read("paper")
    assert {task: set(both) for task, both in paper.items()} == {
        task: {"iid", "noniid"} for task in TASKS if task != "resnet18-cifar10"
    }
    methods = TEN - {"fedsgd", "sparse-fedsgd"}
    for both in paper.values():
        for values in both.values():
            assert set(values) == methods
            assert min(values, key=values.get) == "fedadam-ssm"
            assert 2 <= sum(x == float("inf") for x in values.values()) <= 4


def test_a_line_has_the_papers_figure_beside_it(here):
    words = ["--task", "cnn-fashion-mnist", "--setting", "iid", "--rounds", "1", "--seeds", "1"]
    chosen = ["--methods", "fedadam-ssm,onebit-adam,fedsgd"]
    assert main(["reproduce", "table1", *words, *chosen]) == 0
    found = json.loads((here / "runs" / "reproduce" / "results" / "table1.json").read_text())
    about = {x["method"]: (x["in_paper"], x["paper_mibit"], x["paper_ratio"]) for x in found}
    assert about == {
        "fedadam-ssm": (True, 8.15, 1.0),
        "onebit-adam": (True, None, None),
        "fedsgd": (False, None, None),
        "fedsgd@lr=0.1": (False, None, None),
    }


# Runs, on a Fashion-MNIST of a few samples.


def idx(array):
    sizes = b"".join(n.to_bytes(4, "big") for n in array.shape)
    return gzip.compress(bytes([0, 0, 8, array.ndim]) + sizes + array.astype(np.uint8).tobytes())


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder to work in, and a data folder beside it with 60 images."""
    draw = np.random.default_rng(0)
    folder = tmp_path / "data" / "fashion-mnist"
    folder.mkdir(parents=True)
    for part in ("train", "t10k"):
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(
            idx(draw.integers(0, 256, (60, 28, 28)))
        )
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(idx(np.arange(60) % 10))
    monkeypatch.setenv("FEDSIFT_DATA", str(tmp_path / "data"))
    monkeypatch.setattr("fedsift.data.folder.DEBIAN", tmp_path / "debian")
    monkeypatch.setattr("fedsift.reproduce.runner.loaded", loaded.__wrapped__)
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return work


SMALL = ["--task", "cnn-fashion-mnist", "--setting", "iid", "--quick", "--rounds", "2"]


def test_table_1_is_made_with_csv_and_json_and_not_run_twice(here, capsys):
    words = ["reproduce", "table1", *SMALL, "--methods", "fedadam-ssm,onebit-adam"]
    assert main(words) == 0
    assert not set(capsys.readouterr().out) & set("┃│…")  # it fits 80 columns
    runs, results = here / "runs" / "quick", here / "runs" / "quick" / "results"
    rows = list(csv.DictReader((results / "table1.csv").open()))
    assert [row["method"] for row in rows] == ["fedadam-ssm", "onebit-adam"]
    for row in rows:
        folder = RunFolder(runs / "cnn-fashion-mnist" / "iid" / row["method"] / "seed-0")
        history = folder.history()
        assert len(history) == 2 == int(row["rounds"])
        assert float(row["best_accuracy"]) == max(r["accuracy"] for r in history)
        assert (row["seed"], row["target"], row["mibit"]) == ("0", "0.75", "")
        assert row["device"].startswith("cpu")
        assert not folder.checkpoint_file.exists()
    ssm, _ = json.loads((results / "table1.json").read_text())
    assert (ssm["mibit"], ssm["reached"], ssm["seeds"]) == (None, 0, [0])
    assert not ssm["in_paper"]  # its target is another one
    before = {p: p.stat().st_mtime_ns for p in runs.rglob("metrics.jsonl")}
    assert main(words) == 0
    assert {p: p.stat().st_mtime_ns for p in runs.rglob("metrics.jsonl")} == before


def test_a_stopped_run_goes_on_to_the_same_end(here):
    (run,) = plan(Pin.of("table1"), Wanted(TASKS[0], "iid", ("fedadam-ssm",), 1, 3, quick=True))

    def stop(record):
        if record["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        carry_out(run, here / "broken", stop)
    assert not is_done(run, here / "broken")
    seen = []
    carry_out(run, here / "broken", seen.append)
    carry_out(run, here / "whole", lambda record: None)
    assert [record["round"] for record in seen] == [3]
    assert is_done(run, here / "broken")
    broken, whole = (RunFolder(here / name / run.path).history() for name in ("broken", "whole"))
    for a, b in zip(broken, whole, strict=True):
        assert {**a, "seconds": 0} == {**b, "seconds": 0}


def test_more_rounds_than_before_are_played_and_fewer_are_not(here):
    words = ["reproduce", "table1", *SMALL[:-1], "2", "--methods", "fedadam"]
    assert main(words) == 0
    assert main([*words[:-3], "3", *words[-2:]]) == 0
    folder = RunFolder(here / "runs/quick/cnn-fashion-mnist/iid/fedadam/seed-0")
    assert len(folder.history()) == 3
    assert main(words) == 0
    assert len(folder.history()) == 3


def test_a_line_that_has_more_rounds_is_cut_to_those_of_the_others(here):
    words = [*SMALL[:-1], "2", "--methods", "fedadam-ssm"]
    assert main(["reproduce", "table1", *words]) == 0
    path = here / "runs/quick/cnn-fashion-mnist/iid/fedadam-ssm/seed-0"
    assert len(RunFolder(path).history()) == 2
    (path / DIVERGED).write_text("in round 3")
    assert main(["reproduce", "fig8", *SMALL[:-1], "1"]) == 0
    lines = json.loads((here / "runs/quick/results/fig8.json").read_text())
    assert [line["rounds"] for line in lines] == [1] * len(lines)
    usual = next(line for line in lines if line["method"] == "fedadam-ssm")
    assert usual["best_accuracy"] == RunFolder(path).history()[0]["accuracy"]
    assert not usual["diverged"]


def test_a_folder_with_another_run_is_refused(here, capsys):
    words = ["reproduce", "table1", *SMALL, "--methods", "fedadam"]
    assert main(words) == 0
    file = here / "runs/quick/cnn-fashion-mnist/iid/fedadam/seed-0/config.toml"
    file.write_text(file.read_text().replace("clients = 10", "clients = 9"))
    assert main([*words[:-3], "3", *words[-2:]]) == 2
    assert "--out" in capsys.readouterr().err


def test_a_run_ends_at_its_target_if_that_is_enough(here):
    (run,) = plan(Pin.of("table1"), Wanted(TASKS[0], "iid", ("fedadam-ssm",), 1, 4, quick=True))
    easy = replace(run, target=0.001)
    carry_out(easy, here, lambda record: None, stop_at_target=True)
    assert len(RunFolder(here / run.path).history()) == 1
    assert is_done(easy, here, stop_at_target=True)
    assert not is_done(easy, here)
    summary = json.loads(RunFolder(here / run.path).summary_file.read_text())
    assert summary["rounds"] == 1


def test_a_run_that_diverges_is_a_result(here):
    (run,) = plan(Pin.of("table1"), Wanted(TASKS[0], "iid", ("fedadam",), 1, 4, quick=True))
    wild = replace(run, config=replace(run.config, settings={"lr": 1e38, "local_steps": 30}))
    carry_out(wild, here, lambda record: None)
    assert is_done(wild, here)
    assert "diverged in round" in (here / run.path / DIVERGED).read_text()


def test_figure_1_counts_every_coordinate_of_every_client(here):
    assert main(["reproduce", "fig1", *SMALL]) == 0
    (file,) = (here / "runs" / "quick").rglob("updates.json")
    found = json.loads(file.read_text())
    for role in "wmv":
        assert sum(found["counts"][role]) + found["zeros"][role] == 10 * 21_840
    told = json.loads((here / "runs/quick/results/fig1.json").read_text())["cnn-fashion-mnist"]
    assert told["ΔW"]["mean_log10"] > told["ΔM"]["mean_log10"] > told["ΔV"]["mean_log10"]
    assert (here / "runs/quick/results/fig1-cnn-fashion-mnist.png").stat().st_size > 5000


def test_figures_are_drawn_alike_from_the_same_runs(here):
    words = ["reproduce", "fig8", *SMALL]
    assert main(words) == 0
    results = here / "runs" / "quick" / "results"
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


def test_figure_4_has_all_its_settings(here):
    assert main(["reproduce", "fig4", *SMALL[:2], "--quick", "--rounds", "1"]) == 0
    lines = json.loads((here / "runs/quick/results/fig4.json").read_text())
    found = {(line["method"], line["setting"]) for line in lines}
    wanted = {"iid", "noniid", "theta-1", "theta-0.5"}
    assert found == {(name, s) for name in ("fedadam-ssm", "fedadam") for s in wanted}
    assert (here / "runs/quick/results/fig4-cnn-fashion-mnist.svg").exists()


def test_tasks_whose_data_is_not_here_are_left_out_unless_named(here, capsys):
    words = ["reproduce", "fig5", "--setting", "iid", "--quick", "--rounds", "1"]
    assert main(words) == 0
    assert "vgg11-cifar10 is left out: its data is not here" in capsys.readouterr().err
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
def test_bad_input_is_one_line(words, phrase, here, capsys):
    assert main(["reproduce", *words]) == 2
    said = capsys.readouterr().err.splitlines()
    assert phrase in said[-1]
    assert said[-1].startswith("fedsift: ")


# The comparison of sift.

SIFT_TASKS = Pin.of("sift").tasks


def test_the_comparison_of_sift_shares_table_1s_runs_and_adds_two_transformers():
    assert SIFT_TASKS[3:] == ("vit-tiny-cifar10", "char-lm")
    shared = paths("sift", methods=("fedadam-ssm", "fedadam"), seeds=1) & paths("table1")
    assert len(shared) == 3 * 2 * 2
    for task, setting in [(task, s) for task in SIFT_TASKS for s in ("iid", "noniid")]:
        configs = [run.config for run in plan(Pin.of("sift"), Wanted(task, setting, seeds=1))]
        for key in ("dataset", "model", "partition", "clients", "batch_size", "lr"):
            assert len({c.flat()[key] for c in configs}) == 1


def test_a_language_model_is_federated_by_document():
    runs = plan(Pin.of("sift"), Wanted("char-lm", seeds=1))
    assert {(run.setting, run.config.partition) for run in runs} == {
        ("iid", "iid"), ("noniid", "documents"),
    }  # fmt: skip


def test_several_tasks_can_be_named():
    both = plan(Pin.of("table1"), Wanted("cnn-fashion-mnist,vgg11-cifar10", seeds=1))
    assert {run.task for run in both} == {"cnn-fashion-mnist", "vgg11-cifar10"}


def outcome(label, seed, *rounds):
    """A run whose rounds have an accuracy, paper bits, bytes up and bytes down."""
    (run,) = plan(Pin.of("sift"), Wanted(TASKS[0], "iid", (label,), 1))
    keys = ("accuracy", "uplink_bits_paper", "uplink_bytes", "downlink_bytes")
    history = [
        {"round": n, **dict(zip(keys, values, strict=True))} for n, values in enumerate(rounds, 1)
    ]
    return Outcome(replace(run, config=replace(run.config, seed=seed)), history, {}, False)


def test_the_first_model_is_told_by_itself():
    record = (0.81, 8e6, 0.9e6, 3e6)
    with_model = replace(outcome("fedadam-ssm", 0, record), parameters=250_000)
    (told,) = costs([[with_model]])
    assert told["first_model"] == 1.0
    assert told["target"]["down"]["mean"] == pytest.approx(2.0)
    assert told["target"]["both"]["mean"] == pytest.approx(2.9)


def test_traffic_is_counted_to_the_target_and_to_fedadams_best():
    easy, best = (0.81, 8e6, 0.9e6, 3e6), (0.9, 80e6, 9e6, 30e6)
    ssm = [outcome("fedadam-ssm", seed, easy, best) for seed in (0, 1)]
    adam = [outcome("fedadam", 0, (0.85, 0, 2e6, 4e6)), outcome("fedadam", 1, (0.95, 0, 2e6, 4e6))]
    ours = [
        outcome("sift", 0, (0.82, 0, 0.1e6, 0.2e6), (0.86, 0, 0.3e6, 0.6e6)),
        outcome("sift", 1, (0.10, 0, 0.1e6, 0.2e6), (0.81, 0, 0.3e6, 0.6e6)),
    ]
    of_ssm, of_adam, of_sift = costs([ssm, adam, ours])
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
    (told,) = costs([[outcome("sift", 0, (0.9, 0, 1e6, 1e6))]])
    assert told["harder"] == {
        "accuracy": None, "reached": 0, "of": 0, "round": None, "up": None, "down": None,
        "both": None, "ratio_up": None, "ratio_both": None,
    }  # fmt: skip
    assert told["target"]["up"] == {"mean": 1.0, "sd": None}


def test_the_comparison_is_made_with_table_and_figure(here, capsys):
    assert main(["reproduce", "sift", *SMALL]) == 0
    results = here / "runs" / "quick" / "results"
    names = {f"sift-cnn-fashion-mnist-iid.{kind}" for kind in ("csv", "png", "svg")}
    assert {path.name for path in results.iterdir()} == {"sift.json", "sift.csv", *names}
    rows = {row["method"]: row for row in csv.DictReader((results / "sift.csv").open())}
    assert set(rows) >= {"fedadam-ssm", "fedadam", "sift"}
    history = RunFolder(here / "runs/quick/cnn-fashion-mnist/iid/fedadam/seed-0").history()
    best = max(history, key=lambda record: record["accuracy"])
    assert float(rows["fedadam"]["harder_target"]) == best["accuracy"]
    assert float(rows["fedadam"]["harder_up"]) == pytest.approx(best["uplink_bytes"] / 1e6)
    rounds = best["downlink_bytes"] - 4 * 21_840  # without the first model
    assert float(rows["fedadam"]["harder_down"]) == pytest.approx(rounds / 1e6)
    assert "FedAdam's best" in capsys.readouterr().out


def test_only_a_quick_run_is_tested_on_few_samples(here, monkeypatch):
    monkeypatch.setattr("fedsift.reproduce.runner.QUICK_TEST", 7)
    assert len(loaded.__wrapped__("fashion-mnist", True).test[1]) == 7
    assert len(loaded.__wrapped__("fashion-mnist", False).test[1]) == 60
    assert {run.quick for run in plan(Pin.of("sift"), Wanted(quick=True))} == {True}
    assert {run.quick for run in plan(Pin.of("sift"), Wanted())} == {False}


# The core command.

CORE = ["table1", *SMALL, "--seeds", "1", "--out", "there"]
FAST = ["--methods", "fedadam-ssm,fedadam"]


def test_a_run_with_other_settings_is_not_taken_for_the_planned_one(here, capsys):
    words = [*CORE, "--methods", "fedadam-ssm"]
    core_main(words)
    full = [word for word in ["reproduce", *words] if word != "--quick"]
    assert main(full) == 2  # the quick run has fewer clients
    said = capsys.readouterr().err.splitlines()[-1]
    assert "fedadam-ssm/seed-0 holds a run with other settings (clients" in said
    config = here / "there/cnn-fashion-mnist/iid/fedadam-ssm/seed-0/config.toml"
    lines = config.read_text().splitlines(keepends=True)
    config.write_text("".join(line for line in lines if not line.startswith("density")))
    with pytest.raises(SystemExit):  # an earlier fedsift, before the method had this setting
        core_main(words)
    assert "(density)" in capsys.readouterr().err


def test_a_figure_of_one_method_says_that_it_needs_another(here, capsys):
    assert main(["reproduce", "fig2", *SMALL, "--methods", "fedadam-ssm"]) == 0
    assert "fig2 compares: it needs one more method" in capsys.readouterr().out


def test_one_failed_run_does_not_keep_the_others_from_being_done(here, monkeypatch, capsys):
    def fail_once(run, *rest):
        if run.label == "fedadam-ssm":
            raise RuntimeError("out of\nmemory")
        return carry_out(run, *rest)

    monkeypatch.setattr("fedsift.reproduce.together.carry_out", fail_once)
    with pytest.raises(SystemExit, match="1 of 2 runs failed"):
        core_main([*CORE, *FAST])
    said = capsys.readouterr().err.splitlines()
    assert said[0].endswith("fedadam-ssm/seed-0: FAILED: RuntimeError: out of memory")
    assert said[1].startswith("[2/2] cnn-fashion-mnist/iid/fedadam/seed-0: 2 rounds, accuracy")


def test_a_time_limit_stops_a_run_that_the_same_command_goes_on_with(here, monkeypatch, capsys):
    minutes = iter(range(1000))
    clock = SimpleNamespace(monotonic=lambda: 60 * next(minutes))
    monkeypatch.setattr("fedsift.reproduce.__main__.time", clock)
    monkeypatch.setattr("fedsift.reproduce.together.time", clock)
    core_main([*CORE, *FAST, "--minutes", "2"])  # looks at its start, and after each round
    assert "the time is up: 2 runs are left" in capsys.readouterr().err
    folder = RunFolder(here / "there/cnn-fashion-mnist/iid/fedadam-ssm/seed-0")
    assert len(folder.history()) == 1
    assert folder.checkpoint_file.exists()
    core_main([*CORE, *FAST])
    assert len(folder.history()) == 2
    assert len(list((here / "there").rglob("summary.json"))) == 2
    core_main([*CORE, *FAST])
    assert capsys.readouterr().err.count("2 rounds") == 2  # and nothing is done twice


def test_a_killed_process_is_told_in_a_line_and_the_same_command_goes_on(here, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        core_main([*CORE, *FAST, "--jobs", "0"])
    assert "jobs must be at least 1" in capsys.readouterr().err

    def kill(*_):
        raise BrokenProcessPool

    with monkeypatch.context() as patch:
        patch.setattr("fedsift.reproduce.together.Future.result", kill)
        with pytest.raises(SystemExit, match="2 of 2 runs failed"):
            core_main([*CORE, *FAST, "--jobs", "2"])
    assert capsys.readouterr().err.count("FAILED: a process was killed") == 2
    core_main([*CORE, *FAST])


def test_runs_side_by_side_are_the_runs_one_by_one(here, capsys):
    core_main([*CORE, *FAST])
    core_main([*CORE[:-1], "beside", *FAST, "--jobs", "2"])
    assert capsys.readouterr().err.count("2 rounds, accuracy") == 4
    for method in FAST[1].split(","):
        path = f"cnn-fashion-mnist/iid/{method}/seed-0"
        alone, beside = (RunFolder(here / out / path).history() for out in ("there", "beside"))
        for record in (*alone, *beside):
            record.pop("seconds")
        assert alone == beside


def test_ctrl_c_ends_runs_side_by_side_with_their_rounds(here):
    words = ["table1", *SMALL[:-2], "--rounds", "500", "--seeds", "1", "--jobs", "2"]
    source = Path(__file__).parents[2] / "src"
    process = subprocess.Popen(
        [sys.executable, "-m", "fedsift.reproduce", *words],
        env={**os.environ, "PYTHONPATH": str(source), "FEDSIFT_DATA": str(here.parent / "data")},
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    quick = here / "runs" / "quick"
    deadline = time.monotonic() + 60
    while len(list(quick.rglob("metrics.jsonl"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    said = process.communicate(timeout=30)[1]
    assert process.returncode == 130
    assert said.splitlines()[-1] == "stopped: the same command goes on from here"
    assert "Traceback" not in said
    assert len(list(quick.rglob("config.toml"))) == 2


def test_what_is_refused_leaves_no_folder_to_go_on_with(here, capsys):
    words = ["reproduce", "table1", *SMALL, "--methods", "fedsgd", "--precision", "tf32"]
    assert main(words) == 2
    assert "needs a GPU" in capsys.readouterr().err
    assert not list(here.rglob("config.toml"))


def test_names_that_share_runs_have_them_done_once(here, capsys):
    core_main(["fig2", *CORE, "--methods", "fedadam"])
    assert capsys.readouterr().err.count("fedadam/seed-0: 2 rounds") == 1


CORE_ONLY = """
import sys

absent = "typer rich click plotly matplotlib sklearn scipy".split()

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in absent:
            raise ImportError(name + " is not here")

sys.meta_path.insert(0, Block())
from fedsift.reproduce.__main__ import main
main({words!r})
"""


def test_the_runs_need_nothing_but_the_core(here):
    words = ["table1", *SMALL, "--methods", "fedadam-ssm", "--seeds", "1", "--out", "there"]
    script = CORE_ONLY.format(words=words)
    source = Path(__file__).parents[2] / "src"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": str(source), "FEDSIFT_DATA": str(here.parent / "data")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "fedadam-ssm/seed-0: 2 rounds" in done.stderr
    assert main(["reproduce", "table1", "--quick", "--no-run", "--out", "there"]) == 0


@pytest.mark.parametrize(
    ("words", "phrase"),
    [
        (["table1", "--task", "char-lm"], "'char-lm' is no task of this one; choose one of: cnn-"),
        (["table1", "--quick", "--seeds", "0"], "seeds must be at least 1"),
        ([], "name what to make: one of table1, fig1"),
    ],
)
def test_what_cannot_be_meant_is_refused(words, phrase, here, capsys):
    assert main(["reproduce", *words]) == 2
    assert phrase in capsys.readouterr().err


def test_the_core_command_refuses_bad_input_in_its_own_words(here, capsys):
    with pytest.raises(SystemExit) as end:
        core_main(["fig2", "--task", "cnn"])
    assert end.value.code == 2
    assert "unknown task 'cnn'" in capsys.readouterr().err
