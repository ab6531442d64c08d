"""The command line: the files of a run, refused input, and exit codes."""

import errno
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest
import torch
import typer
from filelock import FileLock
from safetensors.torch import load_file

import fedsift
from fedsift.algorithms import METHODS
from fedsift.cli import catalog
from fedsift.cli.bench import show_timings
from fedsift.cli.entry import app, main
from fedsift.cli.options import DEFAULTS, run_parameters
from fedsift.cli.timings import Timing
from fedsift.codec.errors import FrameError
from fedsift.data import DATASETS
from fedsift.federation.inbox import Inbox
from fedsift.models import MODELS
from fedsift.runs import RunConfig, RunFolder, federation_of
from fedsift.runs.checkpoint import load_checkpoint
from fedsift.runs.compare import dense_fedadam_bytes
from fedsift.runs.disk import replace_file
from fork_server import ForkedPython

QUICK = ("--clients", "4", "--rounds", "3", "--local-steps", "1")
FULL = {"iid": (), "skewed": ("--partition", "dirichlet", "--theta", "0.1")}
FLAGS = (
    "--algorithm", "--dataset", "--model", "--clients", "--rounds", "--local-steps",
    "--batch-size", "--lr", "--density", "--partition", "--theta", "--participation", "--dropout",
    "--min-clients", "--seed", "--device", "--config", "--out", "--tensorboard",
)  # fmt: skip
SUMMARY = {
    "algorithm", "dataset", "model", "parameters", "clients", "rounds", "final_accuracy",
    "best_accuracy", "uplink_bits_paper", "uplink_bytes", "downlink_bytes", "seconds",
    "seconds_per_round",
}  # fmt: skip
METRICS = {
    "round", "accuracy", "loss", "uplink_bits_paper", "uplink_bytes", "downlink_bytes", "seconds"
}  # fmt: skip


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def start(*words, **options):
    """Run the command in its own process, with the code under test."""
    source = Path(fedsift.__file__).parents[1]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(source)}
    return subprocess.Popen([sys.executable, "-m", "fedsift", *words], env=env, **options)


def in_a_process(*words, cwd):
    """Its exit code and what it said on stderr."""
    process = ForkedPython("-m", "fedsift", *words, cwd=cwd)
    said = process.communicate(timeout=60)[1]
    return process.returncode, said


def strictly(text):
    """JSON as the standard has it, without NaN or Infinity."""

    def refuse(word):
        raise ValueError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def metrics_of(folder):
    return [strictly(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def summary_of(folder):
    return strictly((folder / "summary.json").read_text())


def without_seconds(records):
    return [{k: v for k, v in record.items() if k != "seconds"} for record in records]


def files_under(path):
    return {p.relative_to(path): p.read_bytes() for p in path.rglob("*") if p.is_file()}


# The command as it is meant: its defaults reach the accuracy that the README promises.


@pytest.fixture(scope="module")
def full_runs(tmp_path_factory):
    """The run folders of FULL and each one's CPU seconds; run once, whatever tests them."""
    base = tmp_path_factory.getbasetemp()
    root = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "full-runs"
    record = root / "cpu-seconds.json"
    with FileLock(f"{root}.lock"):
        if not root.exists():
            record.parent.mkdir()
            record.write_text(json.dumps(run_at_once(root)))
    return {
        name: (next((root / name).glob("runs/*")), seconds)
        for name, seconds in json.loads(record.read_text()).items()
    }


def run_at_once(root):
    running = {}
    for name, words in FULL.items():
        (root / name).mkdir()
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        running[name] = start("run", *words, cwd=root / name, **quiet)
    used = {name: os.wait4(process.pid, 0)[2] for name, process in running.items()}
    return {name: usage.ru_utime + usage.ru_stime for name, usage in used.items()}


def test_the_default_run_ends_with_at_least_97_percent(full_runs):
    folder, _ = full_runs["iid"]
    assert summary_of(folder)["final_accuracy"] >= 0.97


def test_the_default_run_takes_less_than_a_minute(full_runs):
    folder, cpu_seconds = full_runs["iid"]
    seconds = summary_of(folder)["seconds"]
    # Other tests use the machine at the same time. What the run itself would take on two cores is
    # its CPU time, shared by two processes, and a fifth more for what they cannot share.
    assert min(seconds, 1.2 * cpu_seconds / 2) < 60


def test_a_run_on_very_unlike_clients_ends_with_at_least_94_percent(full_runs):
    folder, _ = full_runs["skewed"]
    summary = summary_of(folder)
    assert (summary["partition"], summary["theta"]) == ("dirichlet", 0.1)
    assert summary["final_accuracy"] >= 0.94


def test_the_defaults_are_the_papers(full_runs):
    summary = summary_of(full_runs["iid"][0])
    expected = {
        "algorithm": "fedadam-ssm", "dataset": "digits", "clients": 20, "rounds": 30,
        "local_steps": 30, "density": 0.05, "lr": 0.001, "beta1": 0.9, "beta2": 0.999,
        "eps": 1e-6, "batch_size": 64, "partition": "iid", "participation": 1.0,
    }  # fmt: skip
    assert {key: summary[key] for key in expected} == expected


def test_the_uplink_is_counted_by_the_papers_formula(full_runs):
    summary = summary_of(full_runs["iid"][0])
    d, q = summary["parameters"], 32
    k = round(0.05 * d)
    a_round = min(3 * k * q + d, k * (3 * q + math.log2(d)))
    assert summary["uplink_bits_paper"] == pytest.approx(30 * a_round, rel=1e-12)


# What a run leaves behind.


@pytest.fixture(scope="module")
def quick_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quick") / "run"
    assert main(["run", *QUICK, "--out", str(folder)]) == 0
    return folder


def test_a_run_leaves_only_complete_files(quick_run):
    assert {path.name for path in quick_run.iterdir()} == {
        ".lock",
        "config.toml",
        "metrics.jsonl",
        "uploads.jsonl",
        "clients.json",
        "summary.json",
        "checkpoint.safetensors",
        "checkpoints",
        "model.safetensors",
        "report.html",
    }


def test_the_summary_has_every_documented_key(quick_run):
    summary = summary_of(quick_run)
    metrics = metrics_of(quick_run)
    assert set(summary) >= SUMMARY
    assert summary["final_accuracy"] == metrics[-1]["accuracy"]
    assert summary["best_accuracy"] == max(r["accuracy"] for r in metrics)
    assert summary["seconds_per_round"] == pytest.approx(summary["seconds"] / 3)
    totals = ("uplink_bits_paper", "uplink_bytes", "downlink_bytes", "seconds")
    assert all(summary[key] == metrics[-1][key] for key in totals)


def test_files_have_the_permissions_of_the_umask(quick_run):
    assert len({path.stat().st_mode for path in quick_run.rglob("*") if path.is_file()}) == 1


def test_metrics_have_one_object_per_round_with_every_documented_key(quick_run):
    metrics = metrics_of(quick_run)
    assert [r["round"] for r in metrics] == [0, 1, 2, 3]
    assert all(set(r) >= METRICS for r in metrics)
    for total in ("uplink_bits_paper", "uplink_bytes", "seconds"):
        values = [r[total] for r in metrics]
        assert 0 == values[0] < values[1] < values[2] < values[3]


def test_the_checkpoint_is_of_the_last_round(quick_run):
    config = RunConfig.read(quick_run / "config.toml")
    federation = federation_of(config)
    assert load_checkpoint(RunFolder.open(quick_run), federation, "cpu").snapshot.round == 3
    d = federation.task.layout.d
    assert load_file(quick_run / "checkpoint.safetensors")["w"].shape == (d,)


def test_the_report_shows_the_run_and_needs_no_network(quick_run):
    page = (quick_run / "report.html").read_text()
    assert "fedadam-ssm on digits" in page
    assert f"{100 * summary_of(quick_run)['final_accuracy']:.2f}" in page
    assert 'src="http' not in page


def test_a_runs_config_reproduces_the_run(quick_run, here):
    assert main(["run", "--config", str(quick_run / "config.toml"), "--out", "other"]) == 0
    again = here / "other"
    assert without_seconds(metrics_of(again)) == without_seconds(metrics_of(quick_run))
    assert (again / "config.toml").read_text() == (quick_run / "config.toml").read_text()


def test_the_closing_table_and_the_path_of_the_report_are_printed(here, capsys):
    assert main(["run", *QUICK, "--out", "out"]) == 0
    said = capsys.readouterr().out
    summary = summary_of(here / "out")
    dense = 3 * 4 * 27_430 * 3
    ratio = round(dense / summary["uplink_bytes"])
    assert f"{summary['uplink_bytes'] / 1e3:.1f} kB, {ratio}× fewer than dense FedAdam" in said
    assert f"dense FedAdam would send {dense / 1e6:.2f} MB" in " ".join(said.split())
    assert f"{summary['uplink_bits_paper'] / 2**20:.2f} Mibit" in said
    assert "s/round" in said
    assert f"{100 * summary['final_accuracy']:.2f} %" in said
    assert "27,430 parameters" in said
    assert "4 clients, 3 rounds, data iid" in said
    assert said.splitlines()[-1] == f"report: {Path('out/report.html')}"


def test_rejected_updates_are_printed_and_an_empty_round_gives_a_warning(here, capsys, monkeypatch):
    def refuse(*_):
        raise FrameError("not in order")

    monkeypatch.setattr(Inbox, "_decoded", refuse)
    assert main(["run", *QUICK, "--out", "out"]) == 0
    said = capsys.readouterr()
    assert [(r["clients"], r["rejected"]) for r in metrics_of(here / "out")[1:]] == [(0, 4)] * 3
    assert summary_of(here / "out")["rejected"] == 12
    assert "12 updates; metrics.jsonl has the reasons" in said.out
    assert said.err.count("warning: round 1 merged no update: client 0: not in order") == 1
    assert said.err.count("merged no update") == 1
    assert said.out.count("4 rejected") == 3


def test_without_a_terminal_each_round_is_one_line(here, capsys):
    assert main(["run", *QUICK, "--out", "out"]) == 0
    said = capsys.readouterr()
    assert not said.err
    lines = [line for line in said.out.splitlines() if " round " in line]
    records = metrics_of(here / "out")[1:]
    assert len(lines) == len(records) == 3
    for line, record in zip(lines, records, strict=True):
        assert line.startswith(f"fedadam-ssm round {record['round']}/3 · accuracy ")
        up, down = record["uplink_bytes"], record["downlink_bytes"]
        assert f" · {up / 1e3:.1f} kB up, {down / 1e6:.2f} MB down per client · " in line
        assert re.search(r" s$| s · ends [\d: -]+$", line)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", said.out)


def test_a_terminal_gets_a_bar_and_a_log_lines_at_once(here):
    """Train with stderr in a terminal and stdout in a pipe; read the first line while it runs."""
    controller, terminal = os.openpty()
    process = start(
        "run", *QUICK, "--rounds", "200", stdout=subprocess.PIPE, stderr=terminal, text=True
    )
    os.close(terminal)
    first = process.stdout.readline()
    assert process.poll() is None
    process.terminate()
    rest = process.communicate(timeout=60)[0]
    shown = b""
    while more := read_terminal(controller):
        shown += more
    assert first.startswith("fedadam-ssm round 1/200 · ")
    assert "\x1b" not in first + rest
    assert b"\x1b" in shown
    (folder,) = (here / "runs").iterdir()
    command = f"fedsift resume {Path('runs') / folder.name}"
    assert shown.decode().splitlines()[-1].endswith(f"continue with: {command}")
    assert process.returncode == 143


def read_terminal(descriptor):
    """What a process wrote to its terminal; Linux gives an error at the end."""
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:
        return b""


def test_dense_fedadam_sends_three_floats_per_parameter_and_round(here):
    words = ["--algorithm", "fedadam", "--participation", "0.5", "--out", "out"]
    assert main(["run", *QUICK, *words]) == 0
    summary = summary_of(here / "out")
    dense = dense_fedadam_bytes(summary["parameters"], 3, clients=4, participation=0.5)
    assert summary["uplink_bytes"] == pytest.approx(dense, rel=0.01)
    assert summary["uplink_bits_paper"] == 8 * dense


def test_a_path_with_brackets_is_printed_unchanged(here, capsys):
    assert main(["run", *QUICK, "--rounds", "1", "--out", "lr[small]"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"report: {Path('lr[small]/report.html')}"
    assert (here / "lr[small]" / "report.html").exists()


def test_two_runs_without_out_get_a_folder_each(here):
    assert main(["run", *QUICK, "--rounds", "1"]) == 0
    assert main(["run", *QUICK, "--rounds", "1"]) == 0
    assert len(list((here / "runs").iterdir())) == 2


def test_flags_override_the_config_file_which_overrides_the_defaults(here):
    (here / "a.toml").write_text("clients = 3\nrounds = 2\nlr = 0.01\nseed = 7\nlocal_steps = 1\n")
    words = ["--config", "a.toml", "--rounds", "1", "--lr", "0.02", "--out", "out"]
    assert main(["run", *words]) == 0
    config = tomllib.loads((here / "out" / "config.toml").read_text())
    assert (config["rounds"], config["lr"]) == (1, 0.02)
    assert (config["clients"], config["seed"]) == (3, 7)
    assert (config["batch_size"], config["density"]) == (64, 0.05)


def test_the_folder_of_a_run_may_be_named_in_its_config_file(here):
    (here / "a.toml").write_text('out = "there"\nclients = 2\nrounds = 1\nlocal-steps = 1\n')
    assert main(["run", "--config", "a.toml"]) == 0
    assert summary_of(here / "there")["rounds"] == 1


def test_config_keys_may_have_dashes_or_underscores(here):
    (here / "a.toml").write_text('local-steps = 1\nbatch_size = 8\nalgorithm = "fedadam_top"\n')
    assert main(["run", "--config", "a.toml", "--rounds", "1", "--out", "out"]) == 0
    config = tomllib.loads((here / "out" / "config.toml").read_text())
    assert (config["local_steps"], config["batch_size"]) == (1, 8)
    assert config["algorithm"] == "fedadam-top"


@pytest.mark.parametrize("algorithm", METHODS)
def test_every_algorithm_runs_by_its_name(algorithm, here):
    words = ["--algorithm", algorithm, "--clients", "2", "--rounds", "2", "--batch-size", "4"]
    assert main(["run", *words, "--out", "out"]) == 0
    state = load_file(here / "out" / "checkpoint.safetensors")
    assert all(bool(torch.isfinite(x).all()) for x in state.values())
    assert summary_of(here / "out")["algorithm"] == algorithm


def test_batch_size_0_takes_the_whole_local_set(here):
    assert main(["run", *QUICK, "--batch-size", "0", "--out", "whole"]) == 0
    assert main(["run", *QUICK, "--batch-size", "1438", "--out", "large"]) == 0
    whole, large = metrics_of(here / "whole"), metrics_of(here / "large")
    assert without_seconds(whole) == without_seconds(large)


def test_help_lists_every_documented_flag(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["run", "--help"]) == 0
    said = capsys.readouterr()
    assert all(flag in said.out for flag in FLAGS)
    assert said.err == ""


def test_methods_are_listed_by_their_names(capsys, monkeypatch):
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 400)
    for command in ("run", "compare"):
        assert main([command, "--help"]) == 0
        assert f"{', '.join(sorted(METHODS))}." in capsys.readouterr().out


@pytest.mark.parametrize("words", [["data", "list"], ["bounds"]], ids=" ".join)
def test_tables_have_few_lines_and_fit_a_terminal(words, capsys, monkeypatch):
    monkeypatch.setenv("FEDSIFT_DATA", "data")
    assert main(words) == 0
    said = capsys.readouterr().out
    assert not set(said) & set("┃│…")
    assert max(map(len, said.splitlines())) <= 80


def test_the_bare_command_shows_its_help_without_an_error(capsys):
    main([])
    said = capsys.readouterr()
    assert all(command in said.out for command in ("run", "resume", "compare"))
    assert said.err == ""


def commands_with_arguments(command, *words):
    for name, each in command.commands.items():
        if isinstance(each, click.Group):
            yield from commands_with_arguments(each, *words, name)
        elif any(isinstance(p, click.Argument) for p in each.params):
            yield [*words, name], each


def test_help_explains_every_argument(capsys, monkeypatch):
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 300)
    found = dict.fromkeys(
        ("resume", "rollback", "report", "reproduce", "frame", "data", "deploy"), 0
    )
    for words, command in commands_with_arguments(typer.main.get_command(app)):
        assert main([*words, "--help"]) == 0
        said = capsys.readouterr().out
        for argument in (p for p in command.params if isinstance(p, click.Argument)):
            assert argument.help, f"{words}: {argument.name} (see click in pyproject.toml)"
            assert argument.help in said
            found[words[0]] += 1
    assert all(found.values())


def test_no_arguments_show_the_help(capsys):
    assert main(["--help"]) == 0
    with_option = capsys.readouterr().out
    assert main([]) == 0
    assert capsys.readouterr().out.rstrip() == with_option.rstrip()


HELP_IMPORTS = """
import sys
from time import perf_counter

import typer

began = perf_counter()
from fedsift.cli.entry import app, main

def words_of(command, *words):
    yield [*words, "--help"]
    for name, child in getattr(command, "commands", {}).items():
        yield from words_of(child, *words, name)

main(["--version"])
for words in words_of(typer.main.get_command(app)):
    assert main(words) == 0, words
print(perf_counter() - began, file=sys.stderr)
heavy = {"torch", "numpy", "scipy", "sklearn", "matplotlib", "plotly", "safetensors"}
assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()
"""


def test_no_help_imports_torch_or_takes_long():
    environment = {**os.environ, "PYTHONPATH": str(Path(fedsift.__file__).parents[1])}
    words = [sys.executable, "-c", HELP_IMPORTS]
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "Train a model" in done.stdout
    assert float(done.stderr) < 10  # the help of every command, on a busy machine


def test_the_catalog_is_up_to_date():
    stored = json.loads(catalog.FILE.read_text(encoding="utf-8"))
    built_in = json.loads(json.dumps(catalog.declarations()))
    assert built_in == stored, f"catalog.json is out of date: run {catalog.COMMAND}"


def test_every_field_of_a_configuration_is_an_option():
    names = [parameter.name for parameter in run_parameters(DEFAULTS)]
    assert len(names) == len(set(names))
    settings = {setting for method in METHODS.values() for setting in method.settings}
    assert set(names) == set(DEFAULTS) - {"algorithm"} | settings


def test_an_interruption_ends_with_130_and_no_traceback(monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("fedsift.cli.entry.app", interrupted)
    assert main(["run"]) == 130
    assert capsys.readouterr().err == ""


def test_a_bug_is_not_disguised(monkeypatch):
    def fail(*_, **__):
        raise KeyError("a bug")

    monkeypatch.setattr("fedsift.cli.entry.app", fail)
    with pytest.raises(KeyError):
        main(["run"])


UNKNOWN = {
    "command": (["rnu"], "'run'"),
    "data set": (["run", "--dataset", "cifar10"], "'cifar-10'"),
    "algorithm": (["run", "--algorithm", "fedadam_sm"], "'fedadam-ssm'"),
    "model": (["run", "--model", "vgg-11"], "'vgg11'"),
    "data set to get": (["data", "get", "fashionmnist"], "'fashion-mnist'"),
    "model to time": (["bench", "--models", "resnet"], "'resnet18'"),
    "algorithm to compare": (["compare", "--algorithms", "sfit", "--target", "0.9"], "'sift'"),
}


@pytest.mark.parametrize(("words", "suggestion"), UNKNOWN.values(), ids=UNKNOWN)
def test_an_unknown_name_gets_one_suggestion(words, suggestion, here, capsys):
    refused(words, capsys, f"id you mean {suggestion}?")
    main(words)
    assert capsys.readouterr().err.lower().count("did you mean") == 1


# Bad input: exit code 2, one line that says what would be right, nothing written.

LONG = "x" * 300
BAD_FLAGS = {
    "unknown algorithm": (["--algorithm", "adam"], ["'adam'", *METHODS]),
    "unknown dataset": (["--dataset", "mnist"], ["'mnist'", *DATASETS]),
    "unknown model": (["--model", "mlp"], ["'mlp'", *MODELS]),
    "a model for other data": (["--model", "cnn"], ["1x28x28", "1x8x8", "small-cnn"]),
    "unknown partition": (["--partition", "sorted"], ["'sorted'", "iid", "dirichlet"]),
    "unknown device": (["--device", "tpu"], ["'tpu'", "auto", "cpu", "cuda"]),
    "density 0": (["--density", "0"], ["density", "(0, 1]"]),
    "density 1.5": (["--density", "1.5"], ["density", "(0, 1]", "1.5"]),
    "density nan": (["--density", "nan"], ["density", "(0, 1]", "nan"]),
    "lr negative": (["--lr", "-0.1"], ["lr", "positive"]),
    "lr infinite": (["--lr", "inf"], ["lr", "positive number"]),
    "lr not a number": (["--lr", "fast"], ["lr", "positive number", "'fast'"]),
    "lr not a schedule": (["--lr", "exp(1)"], ["lr", "unknown schedule 'exp'"]),
    "lr below 0 in a schedule": (["--lr", "constant(-1)"], ["lr", "got -1.0 in round 1"]),
    "beta1 1": (["--beta1", "1"], ["beta1", "[0, 1)"]),
    "eps 0": (["--eps", "0"], ["eps", "positive"]),
    "local-steps 0": (["--local-steps", "0"], ["local-steps", "at least 1"]),
    "more clients than samples": (["--clients", "1439"], ["1439", "between 1 and 1438"]),
    "no clients": (["--clients", "0"], ["between 1 and 1438"]),
    "rounds 0": (["--rounds", "0"], ["rounds", "at least 1"]),
    "half a round": (["--rounds", "1.5"], ["--rounds", "integer"]),
    "batch-size negative": (["--batch-size", "-1"], ["batch-size", "at least 1"]),
    "participation 0": (["--participation", "0"], ["participation", "(0, 1]"]),
    "participation 2": (["--participation", "2"], ["participation", "(0, 1]"]),
    "participation nan": (["--participation", "nan"], ["participation", "(0, 1]"]),
    "dropout 1": (["--dropout", "1"], ["dropout", "[0, 1)"]),
    "dropout negative": (["--dropout", "-0.1"], ["dropout", "[0, 1)"]),
    "min-clients above clients": (["--min-clients", "4"], ["min-clients", "cohort's 3"]),
    "unknown wire": (["--wire", "radio"], ["'radio'", "count", "real"]),
    "seed negative": (["--seed", "-1"], ["seed", "at least 0"]),
    "theta 0": (["--partition", "dirichlet", "--theta", "0"], ["theta", "positive"]),
    "theta infinite": (["--partition", "dirichlet", "--theta", "inf"], ["theta", "positive"]),
    "theta where it does nothing": (["--theta", "5"], ["theta", "--partition dirichlet"]),
    "an empty folder name": (["--out", ""], ["--out", "empty"]),
    "an empty data folder": (["--data-dir", ""], ["--data-dir", "empty"]),
    "bits 9": (["--algorithm", "efficient-adam", "--bits", "9"], ["bits", "2 to 8"]),
    "a setting the algorithm has not": (
        ["--algorithm", "fedadam", "--density", "0.1"],
        ["fedadam", "'density'", "local-steps", "lr"],
    ),
    "unknown flag": (["--densty", "0.1"], ["--densty", "--density"]),
    "a flag without its value": (["--rounds"], ["--rounds"]),
    "missing config file": (["--config", "none.toml"], ["none.toml"]),
    "a folder as config file": (["--config", "."], ["."]),
    "a folder name that is too long": (["--out", LONG], [LONG, "long"]),
}


def refused(words, capsys, *phrases):
    """The command ends with 2 and one line on stderr that has the phrases; `here` is as it was."""
    before = files_under(Path.cwd())
    capsys.readouterr()
    code = main(words)
    said = capsys.readouterr()
    assert code == 2
    assert said.out == ""
    assert said.err.count("\n") == 1, said.err
    assert said.err.startswith("fedsift: ")
    assert [phrase for phrase in phrases if phrase not in said.err] == [], said.err
    assert files_under(Path.cwd()) == before


@pytest.mark.parametrize(("words", "phrases"), BAD_FLAGS.values(), ids=BAD_FLAGS)
def test_a_bad_flag_is_refused_and_nothing_is_written(words, phrases, here, capsys):
    refused(["run", "--clients", "3", "--rounds", "1", *words], capsys, *phrases)
    assert list(here.iterdir()) == []


BAD_CONFIGS = {
    "a key spelt in two odd ways": ('"min-clients_" = 1\n"min_clients-" = 2', ["the same key"]),
    "invalid TOML": ("rounds = = 3", ["a.toml", "line 1"]),
    "not even text": (b"\xff\xfe\x00", ["a.toml"]),
    "unknown key": ("round = 3", ["'round'", "rounds", "density"]),
    "unknown section": ("[federation]\nrounds = 3", ["'federation'", "rounds"]),
    "settings is no key": ("settings = {lr = 0.1}", ["'settings'"]),
    "a word for a whole number": ('rounds = "ten"', ["rounds", "whole number", "'ten'"]),
    "a fraction for a whole number": ("clients = 2.5", ["clients", "whole number"]),
    "true for a whole number": ("clients = true", ["clients", "whole number"]),
    "a number for a name": ("dataset = 3", ["dataset", "a string"]),
    "a number for true or false": ("tensorboard = 1", ["tensorboard", "true or false"]),
    "a word for a number": ('lr = "fast"', ["lr", "positive number", "'fast'"]),
    "a list for a number": ("density = [0.1]", ["density", "(0, 1]"]),
    "a list for the algorithm": ('algorithm = ["fedadam"]', ["algorithm", "a string"]),
    "true for a number": ("lr = true", ["lr", "positive number"]),
    "a float for local-steps": ("local-steps = 2.0", ["local-steps", "whole number"]),
    "infinity for local-steps": ("local-steps = inf", ["local-steps", "whole number"]),
    "nan for local-steps": ("local-steps = nan", ["local-steps", "whole number"]),
    "nan for density": ("density = nan", ["density", "(0, 1]"]),
    "a number for a folder": ("out = 5", ["out must be a string", "5"]),
    "a number for the data folder": ("data-dir = 5", ["data-dir must be a string"]),
    "an empty folder name": ('out = ""', ["empty"]),
    "a key in both spellings": ("local_steps = 1\nlocal-steps = 2", ["'local_steps'", "same key"]),
}


@pytest.mark.parametrize(("text", "phrases"), BAD_CONFIGS.values(), ids=BAD_CONFIGS)
def test_a_bad_config_file_is_refused_and_nothing_is_written(text, phrases, here, capsys):
    content = text if isinstance(text, bytes) else text.encode()
    (here / "a.toml").write_bytes(content)
    refused(["run", "--config", "a.toml"], capsys, *phrases)
    assert [path.name for path in here.iterdir()] == ["a.toml"]


def test_a_dataset_with_missing_files_is_refused(here, capsys, monkeypatch):
    monkeypatch.setenv("FEDSIFT_DATA", str(here / "data"))
    refused(["run", "--dataset", "cifar-10"], capsys, str(here / "data"), "FEDSIFT_DATA")


@pytest.mark.parametrize("how", ["flag", "config", "resume", "compare"])
def test_the_data_folder_can_be_given_on_the_command_line(how, here, capsys, monkeypatch):
    monkeypatch.setenv("FEDSIFT_DATA", "elsewhere")
    (here / "a.toml").write_text('data-dir = "there"')
    (here / "there").mkdir()
    (here / "run").mkdir()
    (here / "run" / "config.toml").write_text('dataset = "cifar-10"')
    words = {
        "flag": ["run", "--dataset", "cifar-10", "--data-dir", "there"],
        "config": ["run", "--dataset", "cifar-10", "--config", "a.toml"],
        "resume": ["resume", "run", "--data-dir", "there"],
        "compare": [
            "compare",
            "--dataset",
            "cifar-10",
            "--algorithms",
            "fedsgd",
            "--target",
            "1",
            "--data-dir",
            "there",
        ],
    }
    refused(words[how], capsys, "there is no there/cifar-10-batches-bin")


def test_a_file_cannot_be_the_folder_of_a_run(here, capsys):
    (here / "a.txt").touch()
    words = ["run", "--clients", "3", "--rounds", "1", "--out", "a.txt"]
    refused(words, capsys, "a.txt is a file; name a folder")


def test_a_folder_that_holds_another_run_is_refused_and_left_unchanged(quick_run, here, capsys):
    before = files_under(quick_run)
    words = ["run", *QUICK, "--out", str(quick_run)]
    refused(words, capsys, str(quick_run), "fedsift resume", "--out")
    assert files_under(quick_run) == before


def test_a_folder_with_a_checkpoint_but_no_config_is_not_taken_for_a_new_one(
    quick_run, here, capsys
):
    (here / "out").mkdir()
    checkpoint = (quick_run / "checkpoint.safetensors").read_bytes()
    (here / "out" / "checkpoint.safetensors").write_bytes(checkpoint)
    refused(["run", *QUICK, "--out", "out"], capsys, "out")


@pytest.mark.parametrize("out", ["file", "file/below"])
def test_a_file_in_place_of_the_folder_is_refused(out, here, capsys):
    (here / "file").write_text("mine")
    refused(["run", *QUICK, "--out", out], capsys, str(Path(out)))


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="has no /proc")
def test_an_unwritable_folder_is_refused(here, capsys):
    refused(["run", *QUICK, "--out", "/proc/self"], capsys, "/proc/self")


@pytest.mark.parametrize("name", ["nowhere", "."])
def test_resume_of_a_folder_without_a_run_is_refused(name, here, capsys):
    refused(["resume", name], capsys, f"{Path(name)} holds no run", "config.toml")


OWN = """
from torch import nn

class Two(nn.Sequential):
    def forward(self, x):
        return super().forward(x), x

def five():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 5))

def pair():
    return Two(nn.Flatten(), nn.Linear(64, 10))

def images():
    return nn.Conv2d(1, 10, 3)
"""


@pytest.mark.parametrize("function", ["five", "pair", "images"])
def test_a_user_model_whose_output_does_not_fit_the_labels_is_refused(
    function, here, capsys, monkeypatch
):
    name = f"own_{function}"  # a module is imported once
    (here / f"{name}.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(here))
    sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
    try:
        words = ["run", "--model", f"{name}:{function}", "--out", "out"]
        refused(words, capsys, f"'{name}:{function}'", "labels from 0 to 9")
    finally:
        sys.dont_write_bytecode = before


def test_a_run_cannot_be_shortened(quick_run, here, capsys):
    folder = shutil.copytree(quick_run, here / "shorter")
    text = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(text.replace("rounds = 3", "rounds = 2"))
    refused(["resume", "shorter"], capsys, "sets rounds to 2, but 3 are finished")


def test_a_comparison_refuses_the_folder_of_a_run(quick_run, here, capsys):
    shutil.copytree(quick_run, here / "taken")
    words = ["compare", "--algorithms", "fedadam", "--target", "0.5", *QUICK, "--out", "taken"]
    refused(words, capsys, "taken already holds a run")


def test_the_resume_command_can_be_pasted_into_a_shell(here):
    assert RunFolder(here / "two words").resume_command == f"fedsift resume '{here}/two words'"


DAMAGE = {
    "clients without a table": ("clients.json", '{"labels": 3}', True),
    "clients with ragged rows": ("clients.json", '{"labels": [[1, 2], [3]]}', True),
    "uploads of words": ("uploads.jsonl", '{"round": 1, "uploads": "x", "bytes": {}}\n', False),
    "a summary of no object": ("summary.json", "", False),
    "a summary without its surroundings": ("summary.json", '{"environment": "x"}', False),
    "metrics that are not numbers": ("metrics.jsonl", '{"round": 1, "accuracy": "x"}\n', False),
    "metrics that are not whole": ("metrics.jsonl", '{"round": 1}\n', False),
    "a comparison without a target": ("../compare.csv", "algorithm\nfedadam\n", False),
    "a target that is no number": ("../compare.csv", "target\nabc\n", False),
}


@pytest.mark.parametrize(("file", "text", "works"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_reported_or_omitted(file, text, works, quick_run, here, capsys):
    folder = shutil.copytree(quick_run, here / "runs" / "damaged")
    (folder / file).write_text(text)
    words = ["report", "runs/damaged", "-o", "report.html"]
    if works:
        assert main(words) == 0
    else:
        refused(words, capsys, "runs")


@pytest.mark.parametrize("place", ["folder", "/dev/null"])
def test_a_report_replaces_only_regular_files(place, quick_run, here, capsys):
    (here / "folder").mkdir()
    assert main(["report", str(quick_run), "-o", place]) == 1
    assert "is not a regular file" in capsys.readouterr().err
    assert files_under(here) == {}


def test_a_full_disk_leaves_no_partial_file(here, monkeypatch):
    def full(path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("fedsift.runs.disk.flush_to_disk", full)
    with pytest.raises(OSError, match="No space left"):
        replace_file(here / "report.html", b"...")
    assert list(here.iterdir()) == []


def test_a_report_that_does_not_fit_on_the_disk_can_be_written_later(here, capsys, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("fedsift.cli.training.write_report", full)
    assert main(["run", *QUICK, "--out", "out"]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert "No space left on device; write it later with: fedsift report out" in said
    assert (here / "out" / "summary.json").exists()


def test_1_and_1_0_are_the_same_setting(here):
    whole, real = ({"algorithm": "fedsgd", "lr": x, "participation": x} for x in (1, 1.0))
    ours, theirs = (RunConfig.from_values(values).toml() for values in (whole, real))
    assert ours == theirs
    assert "lr = 1.0" in ours
    with pytest.raises(ValueError, match="lr must be a positive number"):
        RunConfig.from_values({"lr": 10**400})
    with pytest.raises(ValueError, match="theta is too large for a number"):
        RunConfig.from_values({"theta": 10**400})


@pytest.mark.skipif(torch.cuda.is_available(), reason="has CUDA")
def test_cuda_on_a_machine_without_it_is_refused(here, capsys):
    refused(["run", "--device", "cuda"], capsys, "CUDA", "--device cpu")


def test_tensorboard_that_is_not_installed_is_refused(here, capsys, monkeypatch):
    monkeypatch.setattr("fedsift.errors.find_spec", lambda name: None)
    refused(["run", *QUICK, "--tensorboard"], capsys, "pip install", "'.[tensorboard]'")


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="has no /proc")
def test_an_unwritable_report_does_not_suggest_resuming_the_run(quick_run, capsys):
    assert main(["report", str(quick_run), "-o", "/proc/x/report.html"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "/proc/x" in line
    assert "resume" not in line


def test_an_unknown_command_is_refused(here, capsys):
    refused(["train"], capsys, "'train'")


def test_bad_input_ends_a_real_process_with_2_and_one_line(tmp_path):
    code, said = in_a_process("run", "--density", "0", cwd=tmp_path)
    assert (code, said) == (2, "fedsift: density must be in (0, 1], got 0\n")
    assert list(tmp_path.iterdir()) == []


# Divergence: exit code 3, the round named, the last good checkpoint kept.


def test_a_run_that_diverges_ends_a_real_process_with_3_and_keeps_the_last_good_round(tmp_path):
    words = ["--algorithm", "fedsgd", *QUICK, "--lr", "1e30", "--out", "out"]
    code, said = in_a_process("run", *words, cwd=tmp_path)
    assert code == 3
    assert "Traceback" not in said
    assert "diverged in round 2" in said.splitlines()[-1]
    assert "; the checkpoint of round 1 is in out; try a smaller --lr" in said
    folder = RunFolder.open(tmp_path / "out")
    checkpoint = load_checkpoint(folder, federation_of(folder.config()), "cpu")
    assert checkpoint.snapshot.round == 1
    assert bool(torch.isfinite(checkpoint.snapshot.state.w).all())
    assert [r["round"] for r in metrics_of(tmp_path / "out")] == [0, 1]
    assert not (tmp_path / "out" / "summary.json").exists()


def test_resuming_a_diverged_run_reports_the_divergence_again(here, capsys):
    words = ["--algorithm", "fedsgd", *QUICK, "--lr", "1e30", "--out", "out"]
    assert main(["run", *words]) == 3
    before = files_under(here / "out")
    capsys.readouterr()
    assert main(["resume", "out"]) == 3
    assert "diverged in round 2" in capsys.readouterr().err
    assert files_under(here / "out") == before


@pytest.mark.parametrize("algorithm", METHODS)
def test_every_algorithm_that_diverges_ends_with_3_and_names_the_round(algorithm, here, capsys):
    words = ["--algorithm", algorithm, "--clients", "3", "--rounds", "4", "--lr", "1e37"]
    assert main(["run", *words, "--out", "out"]) == 3
    assert "diverged in round" in capsys.readouterr().err.splitlines()[-1]


def test_a_run_that_diverges_in_round_1_mentions_no_checkpoint(here, capsys):
    words = ["--algorithm", "fedsgd", "--clients", "3", "--rounds", "2", "--lr", "1e30"]
    assert main(["run", *words, "--out", "out"]) == 3
    said = capsys.readouterr().err.splitlines()[-1]
    assert "diverged in round 1" in said
    assert "checkpoint" not in said
    assert said.endswith("; try a smaller --lr")


def test_a_missing_data_folder_is_refused(here, capsys):
    assert main(["run", *QUICK, "--data-dir", "nowhere"]) == 2
    assert "there is no data folder nowhere" in capsys.readouterr().err


def test_a_comparison_with_other_settings_lists_the_differences(here, capsys):
    words = ["compare", "--algorithms", "fedadam-ssm,sift", "--target", "0.05", *QUICK]
    assert main([*words, "--out", "out"]) == 0
    assert " 0.00 " not in capsys.readouterr().out  # little traffic is shown with its digits
    assert main([*words, "--out", "out", "--seed", "1"]) == 2
    said = capsys.readouterr().err
    assert "holds another run (seed = 0, not 1): use another folder" in said


def test_a_round_with_too_few_updates_ends_with_3_and_names_the_round(here, capsys):
    words = ["--dropout", "0.5", "--min-clients", "4", *QUICK, "--out", "out"]
    assert main(["run", *words]) == 3
    said = capsys.readouterr().err.splitlines()[-1]
    assert re.search(r"round \d merged [0-3] updates, but needs at least 4: [1-4] were lost", said)
    assert "smaller --dropout" in said
    assert metrics_of(here / "out")[-1]["round"] == int(re.search(r"round (\d)", said)[1]) - 1


# How fast it is.


def test_bench_shows_the_parts_of_a_round(capsys):
    parts = {"round": 2.0, "train": 1.5, "select": 0.3, "merge": 0.2, "evaluate": 0.1}
    work = {"flops": 1e11, "bytes": 1e9, "limit": 0.5}
    show_timings([Timing("cnn", "20 clients", 21_840, "cpu", "fp32", **parts, **work)])
    said = " ".join(capsys.readouterr().out.split())
    for part in ("training 1.5 75.0 %", "merging 0.2 10.0 %", "100 GFLOP", "0.5 25.0 %"):
        assert part in said


def test_bench_as_json_adds_up(capsys):
    words = ["bench", "--models", "small-cnn", "--rounds", "1", "--device", "cpu", "--json"]
    assert main(words) == 0
    result = json.loads(capsys.readouterr().out)
    (row,) = result["timings"]
    assert row["parameters"] == 27_430
    assert row["train"] + row["select"] + row["merge"] == pytest.approx(row["round"])
    assert row["limit"] > 0  # and below the round, where nothing else disturbs both
    assert row["ratio"] == pytest.approx(row["round"] / row["limit"])
    assert {"commit", "torch", "device"} <= result["environment"].keys()


@pytest.mark.parametrize(
    ("words", "phrase"),
    [
        (["--models", "moon"], "unknown model"),
        (["--precision", "bf16", "--device", "cpu"], "precision"),
        (["--rounds", "0"], "at least 1"),
        (["--device", "abacus"], "unknown device"),
    ],
)
def test_bench_refuses_bad_input_in_one_line(words, phrase, capsys):
    assert main(["bench", *words]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert phrase in line
