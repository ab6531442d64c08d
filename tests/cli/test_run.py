"""What a run leaves behind, and where its settings come from."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import torch
from commands import QUICK, metrics_of, start, summary_of, without_seconds
from safetensors.torch import load_file

from fedsift.algorithms import METHODS
from fedsift.cli.entry import main
from fedsift.codec.errors import FrameError
from fedsift.federation.inbox import Inbox
from fedsift.runs import RunConfig, RunFolder, federation_of
from fedsift.runs.checkpoint import load_checkpoint
from fedsift.runs.compare import dense_fedadam_bytes

SUMMARY = {
    "algorithm", "dataset", "model", "parameters", "clients", "rounds", "final_accuracy",
    "best_accuracy", "uplink_bits_paper", "uplink_bytes", "downlink_bytes", "seconds",
    "seconds_per_round",
}  # fmt: skip


METRICS = {
    "round", "accuracy", "loss", "uplink_bits_paper", "uplink_bytes", "downlink_bytes", "seconds"
}  # fmt: skip


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


def test_a_runs_config_reproduces_the_run(quick_run, cwd):
    assert main(["run", "--config", str(quick_run / "config.toml"), "--out", "other"]) == 0
    again = cwd / "other"
    assert without_seconds(metrics_of(again)) == without_seconds(metrics_of(quick_run))
    assert (again / "config.toml").read_text() == (quick_run / "config.toml").read_text()


def test_the_closing_table_and_the_path_of_the_report_are_printed(cwd, capsys):
    assert main(["run", *QUICK, "--out", "out"]) == 0
    said = capsys.readouterr().out
    summary = summary_of(cwd / "out")
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


def test_rejected_updates_are_printed_and_an_empty_round_gives_a_warning(cwd, capsys, monkeypatch):
    def refuse(*_):
        raise FrameError("not in order")

    monkeypatch.setattr(Inbox, "_decoded", refuse)
    assert main(["run", *QUICK, "--out", "out"]) == 0
    said = capsys.readouterr()
    assert [(r["clients"], r["rejected"]) for r in metrics_of(cwd / "out")[1:]] == [(0, 4)] * 3
    assert summary_of(cwd / "out")["rejected"] == 12
    assert "12 updates; metrics.jsonl has the reasons" in said.out
    assert said.err.count("warning: round 1 merged no update: client 0: not in order") == 1
    assert said.err.count("merged no update") == 1
    assert said.out.count("4 rejected") == 3


def test_without_a_terminal_each_round_is_one_line(cwd, capsys):
    assert main(["run", *QUICK, "--out", "out"]) == 0
    said = capsys.readouterr()
    assert not said.err
    lines = [line for line in said.out.splitlines() if " round " in line]
    records = metrics_of(cwd / "out")[1:]
    assert len(lines) == len(records) == 3
    for line, record in zip(lines, records, strict=True):
        assert line.startswith(f"fedadam-ssm round {record['round']}/3 · accuracy ")
        up, down = record["uplink_bytes"], record["downlink_bytes"]
        assert f" · {up / 1e3:.1f} kB up, {down / 1e6:.2f} MB down per client · " in line
        assert re.search(r" s$| s · ends [\d: -]+$", line)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", said.out)


def test_a_terminal_gets_a_bar_and_a_log_lines_at_once(cwd):
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
    (folder,) = (cwd / "runs").iterdir()
    command = f"fedsift resume {Path('runs') / folder.name}"
    assert shown.decode().splitlines()[-1].endswith(f"continue with: {command}")
    assert process.returncode == 143


def read_terminal(descriptor):
    """What a process wrote to its terminal; Linux gives an error at the end."""
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:
        return b""


def test_dense_fedadam_sends_three_floats_per_parameter_and_round(cwd):
    words = ["--algorithm", "fedadam", "--participation", "0.5", "--out", "out"]
    assert main(["run", *QUICK, *words]) == 0
    summary = summary_of(cwd / "out")
    dense = dense_fedadam_bytes(summary["parameters"], 3, clients=4, participation=0.5)
    assert summary["uplink_bytes"] == pytest.approx(dense, rel=0.01)
    assert summary["uplink_bits_paper"] == 8 * dense


def test_a_path_with_brackets_is_printed_unchanged(cwd, capsys):
    assert main(["run", *QUICK, "--rounds", "1", "--out", "lr[small]"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"report: {Path('lr[small]/report.html')}"
    assert (cwd / "lr[small]" / "report.html").exists()


def test_two_runs_without_out_get_a_folder_each(cwd):
    assert main(["run", *QUICK, "--rounds", "1"]) == 0
    assert main(["run", *QUICK, "--rounds", "1"]) == 0
    assert len(list((cwd / "runs").iterdir())) == 2


def test_flags_override_the_config_file_which_overrides_the_defaults(cwd):
    (cwd / "a.toml").write_text("clients = 3\nrounds = 2\nlr = 0.01\nseed = 7\nlocal_steps = 1\n")
    words = ["--config", "a.toml", "--rounds", "1", "--lr", "0.02", "--out", "out"]
    assert main(["run", *words]) == 0
    config = tomllib.loads((cwd / "out" / "config.toml").read_text())
    assert (config["rounds"], config["lr"]) == (1, 0.02)
    assert (config["clients"], config["seed"]) == (3, 7)
    assert (config["batch_size"], config["density"]) == (64, 0.05)


def test_the_folder_of_a_run_may_be_named_in_its_config_file(cwd):
    (cwd / "a.toml").write_text('out = "there"\nclients = 2\nrounds = 1\nlocal-steps = 1\n')
    assert main(["run", "--config", "a.toml"]) == 0
    assert summary_of(cwd / "there")["rounds"] == 1


def test_config_keys_may_have_dashes_or_underscores(cwd):
    (cwd / "a.toml").write_text('local-steps = 1\nbatch_size = 8\nalgorithm = "fedadam_top"\n')
    assert main(["run", "--config", "a.toml", "--rounds", "1", "--out", "out"]) == 0
    config = tomllib.loads((cwd / "out" / "config.toml").read_text())
    assert (config["local_steps"], config["batch_size"]) == (1, 8)
    assert config["algorithm"] == "fedadam-top"


@pytest.mark.parametrize("algorithm", METHODS)
def test_every_algorithm_runs_by_its_name(algorithm, cwd):
    words = ["--algorithm", algorithm, "--clients", "2", "--rounds", "2", "--batch-size", "4"]
    assert main(["run", *words, "--out", "out"]) == 0
    state = load_file(cwd / "out" / "checkpoint.safetensors")
    assert all(bool(torch.isfinite(x).all()) for x in state.values())
    assert summary_of(cwd / "out")["algorithm"] == algorithm


def test_batch_size_0_takes_the_whole_local_set(cwd):
    assert main(["run", *QUICK, "--batch-size", "0", "--out", "whole"]) == 0
    assert main(["run", *QUICK, "--batch-size", "1438", "--out", "large"]) == 0
    whole, large = metrics_of(cwd / "whole"), metrics_of(cwd / "large")
    assert without_seconds(whole) == without_seconds(large)
