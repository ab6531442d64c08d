"""The result of a simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fedsift.algorithms.buffers import client_values
from fedsift.federation.snapshot import Snapshot
from fedsift.report.collect import ReportedRun
from fedsift.report.html import write_report
from fedsift.runs.folder import column
from fedsift.runs.run import environment_on, results_of
from fedsift.simulation import Record
from fedsift.vector import Layout, State


@dataclass(frozen=True, repr=False)
class Result:
    """The result of a simulation: the trained model and the metrics of each round.

    ``history`` has one record per round, the first of which is round 0, the initial model.
    ``settings`` describes the run as its config.toml would.
    """

    snapshot: Snapshot
    history: list[Record]
    layout: Layout
    weights: Tensor
    """The trained model's parameters as a flat vector, followed by the buffers that training
    changes. Most methods return the global W."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    labels: Sequence[Sequence[int]] = ()
    """The number of samples of each class on each client; empty without class labels."""

    @property
    def state(self) -> State:
        """The global state: flat vectors in the model's parameter order, such as ``state.w``."""
        return self.snapshot.state

    @property
    def accuracy(self) -> float | None:
        """The test accuracy of the last round that was evaluated; None without class labels."""
        return next(reversed(column(self.history, "accuracy")), None)

    def load_into(self, model: nn.Module, client: int | None = None) -> None:
        """Set a model's parameters, and the buffers that training changes, to the trained ones.

        With a client, to those with which this client uses the model: it has its own normalization
        layers if ``buffers="local"``.
        """
        memory = None if client is None else self.snapshot.client_memory.get(client)
        values = client_values(self.layout, self.state, self.weights, memory)
        self.layout.write(values, model)

    def report(self, path: str | Path) -> None:
        """Write a self-contained HTML report of this run."""
        summary = {
            **self.settings,
            **results_of(self.history, self.layout.d),
            "environment": environment_on(self.weights.device.type),
        }
        run = ReportedRun(summary, self.history, labels=self.labels)
        title = f"{self.settings['algorithm']} on {self.settings['dataset']}"
        write_report([run], Path(path), title)

    def __repr__(self) -> str:
        accuracy = "" if self.accuracy is None else f"accuracy={self.accuracy:.4f}, "
        sent = self.snapshot.traffic.uplink_bytes
        return (
            f"Result(rounds={self.snapshot.round}, {accuracy}uplink_bytes={sent:.0f} per client, "
            f"parameters={self.layout.d})"
        )
