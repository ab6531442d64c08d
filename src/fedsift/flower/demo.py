"""A run's configuration as a Flower app: what ``fedsift run`` simulates, over real sockets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tomli_w
import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedsift.runs.config import RunConfig
from fedsift.task import Data

TIMEOUT_SECONDS = 600.0


def write_app(folder: Path, config: RunConfig, out: Path) -> None:
    """Write the app's three files: Flower packs them and sends them to every node."""
    settings = {**config.flat(), "out": str(out.absolute())}
    about: dict[str, Any] = {
        "project": {"name": "fedsift-demo", "version": "1.0.0", "dependencies": []},
        "tool": {"flwr": {"app": {
            "publisher": "fedsift",
            "components": {"serverapp": "server_app:app", "clientapp": "client_app:app"},
            "config": settings,
        }}},
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text(tomli_w.dumps(about))
    for side in ("server", "client"):
        line = f"from fedsift.flower.demo import {side}\n\napp = {side}()\n"
        (folder / f"{side}_app.py").write_text(line)


def config_of(context: Context) -> RunConfig:
    """The run's configuration, from the app's."""
    values = {key: value for key, value in context.run_config.items() if key != "out"}
    return RunConfig.from_values(values)


def server() -> ServerApp:
    """The ServerApp: the same model, test set and algorithm as in the simulation."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        from fedsift.data import load
        from fedsift.engine import Reference
        from fedsift.flower.arrays import arrays_of, flat
        from fedsift.flower.strategy import FedSift
        from fedsift.models import build
        from fedsift.task import RemoteClients, Task
        from fedsift.vector import Layout

        config = config_of(context)
        dataset = load(config.dataset)
        model = build(config.model, dataset.shape, config.seed, dataset.dtype)
        layout = Layout.of(model)
        nowhere = RemoteClients(0, {})
        task = Task(model, dataset.loss, nowhere, dataset.test, None, config.seed, layout)
        engine = Reference(task)

        def evaluate(round: int, arrays: ArrayRecord) -> MetricRecord:
            accuracy, mean = engine.evaluate(flat(arrays)[1])
            return MetricRecord({"accuracy": accuracy or 0.0, "loss": mean or 0.0})

        strategy = FedSift(
            config.make_algorithm(),
            config.clients,
            str(context.run_config["out"]),
            batch_size=config.batch_size or None,
            participation=config.participation,
            min_clients=config.min_clients,
            max_norm_ratio=config.max_norm_ratio,
            seed=config.seed,
            dataset=config.dataset,
            model=config.model,
            partition=config.partition,
            theta=config.theta,
        )
        strategy.start(grid, arrays_of(model), config.rounds, TIMEOUT_SECONDS, evaluate_fn=evaluate)

    return app


def client() -> ClientApp:
    """The ClientApp: its share of the data is the one that the simulation deals to it."""
    from fedsift.flower.client import client_app

    app = ClientApp()

    @app.train()
    def train(message: Any, context: Context) -> Any:
        from fedsift.data import load, partition_indices
        from fedsift.models import build

        config = config_of(context)
        dataset = load(config.dataset)

        def share(partition: int, partitions: int) -> Data:
            x, y = dataset.train
            rows = partition_indices(
                config.partition, dataset.labels, partitions, config.seed, config.theta
            )
            mine = torch.from_numpy(rows[partition])
            return x[mine], y[mine]

        inner = client_app(
            lambda: build(config.model, dataset.shape, config.seed, dataset.dtype),
            share,
            config.make_algorithm(),
            loss=dataset.loss,
        )
        return inner(message, context)

    return app
