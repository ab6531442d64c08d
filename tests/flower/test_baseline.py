"""The Flower baseline: its table, its bits, and two rounds in Flower's simulation runtime."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from statistics import fmean

import pytest
import torch
from flwr.app import Context, RecordDict
from inline import InlineGrid, InlineNode
from processes import SOURCE, processes_of
from safetensors.torch import load_file

from fedsift.algorithms import METHODS
from fedsift.flower import exchange
from fedsift.flower.local import OFFLINE, command
from fedsift.runs import federation_of
from fedsift.runs.config import RunConfig
from fedsift.simulation import initial_snapshot, run_rounds

ROOT = Path(__file__).parents[2]
BASELINE = ROOT / "baselines" / "fedadam_ssm"
TINY = {"dataset": "digits", "num-clients": 2, "num-server-rounds": 2, "local-steps": 2}
LEARNING_RATE, TARGET = "@lr=0.1", 0.804
SHOWN = ("fedadam-ssm", "fairness-top", "fedadam-top", "fedadam", "fedsgd", "sparse-fedsgd")


def table():
    """Return the lines of README's table, from the committed results."""
    with (ROOT / "reproduce" / "results" / "table1.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["task"] == "cnn-fashion-mnist"]
    yield "| setting | method | rounds | MB | Mibit | final accuracy |"
    yield "|---|---|--:|--:|--:|--:|"
    for setting, name in (("iid", "IID"), ("noniid", "Dirichlet 0.1")):
        for method in SHOWN:
            key = method + LEARNING_RATE * ("sgd" in method)
            found = [r for r in rows if (r["setting"], r["method"]) == (setting, key)]
            assert len(found) == 3
            label = METHODS[method].label + ", lr 0.1" * ("sgd" in method)
            rounds, mb, mibit, accuracy = (
                fmean(float(row[column]) for row in found)
                for column in ("round", "megabytes", "mibit", "final_accuracy")
            )
            numbers = f"{rounds:.0f} | {mb:.3f} | {mibit:.2f} | {accuracy:.1%}"
            yield f"| {name} | {label} | {numbers.replace('%', ' %')} |"


def measured_here():
    """Return README's sentence about the run of ``flwr run .``, from its committed metrics."""
    lines = (BASELINE / "results" / "iid-seed-0.jsonl").read_text().splitlines()
    rounds = [json.loads(line) for line in lines]
    first = next(record for record in rounds if record["accuracy"] >= TARGET)
    mb, mibit = first["uplink_bytes"] / 1e6, first["uplink_bits_paper"] / 2**20
    return (
        f"reached {TARGET:.1%} in round {first['round']} with {mb:.3f} MB and {mibit:.2f} Mibit, "
        f"and {rounds[-1]['accuracy']:.1%} after {len(rounds)} rounds"
    ).replace("%", " %")


def test_the_readme_has_the_committed_results():
    text = (BASELINE / "README.md").read_text(encoding="utf-8")
    assert "\n".join(table()) in text
    assert measured_here() in " ".join(text.split())


def test_the_layout_is_that_of_flowers_baselines():
    about = tomllib.loads((BASELINE / "pyproject.toml").read_text())
    assert about["project"]["name"].replace("-", "_") == BASELINE.name
    for component in about["tool"]["flwr"]["app"]["components"].values():
        module, _, name = component.partition(":")
        assert (BASELINE / f"{module.replace('.', '/')}.py").exists()
        assert name == "app"
    readme = (BASELINE / "README.md").read_text(encoding="utf-8")
    front = readme.split("---")[1]
    assert [line.split(":")[0] for line in front.strip().splitlines()] == [
        "title", "url", "labels", "dataset"
    ]  # fmt: skip
    for key in about["tool"]["flwr"]["app"]["config"]:
        assert f"`{key}`" in readme
    assert (BASELINE / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def config(**changes):
    about = tomllib.loads((BASELINE / "pyproject.toml").read_text())
    return about["tool"]["flwr"]["app"]["config"] | changes


def expected_state():
    """Return the state that ``fedsift run`` reaches with the tiny settings."""
    words = {"dataset": "digits", "clients": 2, "rounds": 2, "local_steps": 2}
    federation = federation_of(RunConfig.from_values(words))
    *_, (snapshot, _) = run_rounds(federation, initial_snapshot(federation), 2)
    return snapshot.state


def assert_same_bits(folder):
    tensors = load_file(folder / "checkpoint.safetensors")
    for name, x in expected_state().items():
        assert torch.equal(tensors[name], x), name


def test_the_baseline_has_the_bits_of_a_simulation(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BASELINE))
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    monkeypatch.setattr(exchange, "POLL_SECONDS", 0.0)
    from fedadam_ssm.client_app import app as client
    from fedadam_ssm.server_app import app as server

    words = config(**TINY, folder=str(tmp_path / "run"))
    grid = InlineGrid((InlineNode(client, n, 2) for n in range(2)), words)
    server(grid, Context(1, 1, {}, RecordDict(), words))
    assert_same_bits(tmp_path / "run")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert all(0 < json.loads(line)["accuracy"] < 1 for line in lines)


@pytest.fixture
def flower_home(tmp_path):
    """A folder of Flower's own. ``flwr run`` leaves a SuperLink behind; it ends with the test."""
    home = tmp_path / "home"
    home.mkdir()
    yield home
    until = time.monotonic() + 60
    while (left := processes_of(home)) and time.monotonic() < until:
        for pid in left:
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.2)
    assert not processes_of(home)


def test_two_rounds_in_flowers_simulation_runtime(flower_home, tmp_path):
    pytest.importorskip("ray")
    settings = {**TINY, "folder": str(tmp_path / "run")}
    words = " ".join(f"{key}={json.dumps(value)}" for key, value in settings.items())
    env = {
        **os.environ, **OFFLINE, "FLWR_HOME": str(flower_home), "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": SOURCE, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }  # fmt: skip
    done = subprocess.run(
        [command("flwr"), "run", str(BASELINE), "--stream", "-c", words, "--federation-config",
         "num-supernodes=2 client-resources-num-cpus=1"],
        env=env, cwd=tmp_path, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert (tmp_path / "run" / "summary.json").exists(), done.stdout + done.stderr
    assert_same_bits(tmp_path / "run")
