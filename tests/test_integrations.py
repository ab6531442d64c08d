"""Rounds in Weights & Biases, MLflow and TensorBoard, each in its offline mode."""

import pytest
import torch
from torch import nn

import fedsift
from fedsift.integrations import mlflow_logger, tensorboard_logger, wandb_logger

ROUNDS = 3


def simulate(on_round):
    """Train on two clients, and return the records that were logged."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(40, 3, generator=draw)
    y = (x.sum(1) > 0).long()
    model, clients = nn.Linear(3, 2), [(x[:20], y[:20]), (x[20:], y[20:])]
    history = fedsift.simulate(
        model, clients, test=(x, y), rounds=ROUNDS, on_round=on_round
    ).history
    return [record for record in history if record["round"] > 0]


def test_weights_and_biases(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(project="federated", dir=tmp_path) as run:
        history = simulate(wandb_logger(run))
        run.log({}, commit=True)  # W&B commits a step when the next one begins or the run ends
        last = {name: run.summary[name] for name in ("_step", "accuracy", "loss", "uplink_bytes")}
    assert last == {**{name: history[-1].get(name) for name in last}, "_step": ROUNDS}
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def test_mlflow(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    with mlflow.start_run() as run:
        history = simulate(mlflow_logger(run))
    for name in ("accuracy", "loss", "uplink_bytes"):
        found = mlflow.MlflowClient().get_metric_history(run.info.run_id, name)
        assert [(point.step, point.value) for point in found] == [
            (record["round"], record[name]) for record in history
        ]


def test_tensorboard(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        history = simulate(tensorboard_logger(writer))
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    found = [(event.step, event.value) for event in events.Scalars("loss")]
    assert found == [(record["round"], pytest.approx(record["loss"])) for record in history]
