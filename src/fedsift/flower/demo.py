"""A run's configuration as a Flower app: what ``fedsift run`` simulates, over a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tomli_w
import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedsift.runs.config import RunConfig
from fedsift.task import RemoteClients, Task
from fedsift.task.samples import TensorPair

TIMEOUT_SECONDS = 600.0


METRICS_PORT = "metrics-port"
"""The key of the app's configuration for a port that serves metrics; 0 for none."""


def write_app(folder: Path, config: RunConfig, out: Path, metrics_port: int | None = None) -> None:
    """Write the three files of the app, which Flower packs and sends to every node."""
    settings = {**config.flat(), "out": str(out.absolute()), METRICS_PORT: metrics_port or 0}
    project: dict[str, Any] = {
        "project": {"name": "fedsift-demo", "version": "1.0.0", "dependencies": []},
        "tool": {"flwr": {"app": {
            "publisher": "fedsift",
            "components": {"serverapp": "server_app:app", "clientapp": "client_app:app"},
            "config": settings,
        }}},
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text(tomli_w.dumps(project))
    for side in ("server", "client"):
        line = f"from fedsift.flower.demo import {side}\n\napp = {side}()\n"
        (folder / f"{side}_app.py").write_text(line)


def config_of(context: Context) -> RunConfig:
    """Return the run's configuration from that of the app."""
    others = ("out", METRICS_PORT)
    values = {key: value for key, value in context.run_config.items() if key not in others}
    return RunConfig.from_values(values)


def server() -> ServerApp:
    """Return the ServerApp, with the model, test set and algorithm of the simulation."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        from fedsift.data import load
        from fedsift.engine import Reference
        from fedsift.flower.arrays import arrays_of, vector_from_arrays
        from fedsift.flower.strategy import FedSift
        from fedsift.models import build

        config = config_of(context)
        dataset = load(config.dataset)
        model = build(config.model, dataset.shape, config.seed, dataset.dtype)
        layout, _ = vector_from_arrays(arrays_of(model))
        clients = RemoteClients(0, {})
        task = Task(model, dataset.loss, clients, dataset.test, None, config.seed, layout)
        engine = Reference(task)

        def evaluate(round: int, arrays: ArrayRecord) -> MetricRecord:
            accuracy, mean_loss = engine.evaluate(vector_from_arrays(arrays)[1])
            return MetricRecord({"accuracy": accuracy or 0.0, "loss": mean_loss or 0.0})

        strategy = FedSift(
            config.make_algorithm(),
            config.clients,
            str(context.run_config["out"]),
            batch_size=config.batch_size or None,
            weights=config.chosen_weights(),
            participation=config.participation,
            min_clients=config.min_clients,
            max_norm_ratio=config.max_norm_ratio,
            buffers=config.buffers,
            keep_checkpoints=config.keep_checkpoints,
            seed=config.seed,
            metrics_port=int(context.run_config.get(METRICS_PORT, 0)) or None,
            dataset=config.dataset,
            model=config.model,
            partition=config.partition,
            theta=config.theta,
        )
        strategy.start(grid, arrays_of(model), config.rounds, TIMEOUT_SECONDS, evaluate_fn=evaluate)

    return app


def client() -> ClientApp:
    """Return the ClientApp, with the client's model and data of the simulation."""
    from fedsift.flower.client import client_app

    app = ClientApp()

    @app.train()
    def train(message: Any, context: Context) -> Any:
        from fedsift.data import load, partition_indices
        from fedsift.models import build

        config = config_of(context)
        dataset = load(config.dataset)

        def load_data(partition: int, partitions: int) -> TensorPair:
            x, y = dataset.train
            rows = partition_indices(
                config.partition, dataset.labels, partitions, config.seed, config.theta
            )
            selected = torch.from_numpy(rows[partition])
            return x[selected], y[selected]

        inner_app = client_app(
            lambda: build(config.model, dataset.shape, config.seed, dataset.dtype),
            load_data,
            config.make_algorithm(),
            loss=dataset.loss,
            buffers=config.buffers,
        )
        return inner_app(message, context)

    return app
