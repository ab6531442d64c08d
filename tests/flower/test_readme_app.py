"""README's diff, applied to an app in the form of Flower's PyTorch quickstart."""

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from flwr.app import Context, RecordDict
from inline import InlineGrid, InlineNode
from readme import apply_readme, copy_app

from fedsift.flower import exchange

NODES, ROUNDS = 10, 6
CONFIG = {
    "num-server-rounds": ROUNDS, "fraction-evaluate": 0.5, "local-epochs": 2, "learning-rate": 0.1,
    "batch-size": 32,
}  # fmt: skip


@pytest.fixture
def app(tmp_path, monkeypatch):
    """A copy of the app, which runs in the current folder."""
    folder = copy_app(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    monkeypatch.setattr(exchange, "POLL_SECONDS", 0.0)
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "pytorchapp"]:
        del sys.modules[name]


def run():
    """Run the app in this process, and return the accuracy of the model that it saves."""
    torch.manual_seed(0)
    client = import_module("pytorchapp.client_app").app
    server = import_module("pytorchapp.server_app").app
    grid = InlineGrid((InlineNode(client, n, NODES) for n in range(NODES)), CONFIG)
    server(grid, Context(1, 1, {}, RecordDict(), CONFIG))
    task = import_module("pytorchapp.task")
    model = task.Net()
    model.load_state_dict(torch.load("final_model.pt"))
    return task.test(model, task.load_test_data(), "cpu")[1]


def test_the_app_learns_without_fedsift(app):
    assert run() > 0.8


def test_the_app_learns_with_the_diff_of_the_readme(app):
    apply_readme(app)
    assert run() > 0.8
    lines = Path("run", "metrics.jsonl").read_text().splitlines()
    history = [json.loads(line) for line in lines]
    assert [record["clients"] for record in history] == [NODES] * ROUNDS
    evaluations = [record["evaluation"] for record in history]
    assert [(x["clients"], x["problems"]) for x in evaluations] == [(NODES // 2, {})] * ROUNDS
    assert evaluations[-1]["metrics"]["eval_acc"] > 0.8
    summary = json.loads(Path("run", "summary.json").read_text())
    assert summary["final_accuracy"] > 0.8
    assert all(record["accuracy"] < record["accuracy_top3"] for record in history)
    dense = 4 * summary["parameters"] * ROUNDS
    assert summary["uplink_bytes"] < dense / 55
    assert summary["downlink_bytes"] < dense / 5
