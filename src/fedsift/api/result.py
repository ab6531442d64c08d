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
from fedsift.runs.config import PythonConfig, read_values
from fedsift.runs.disk import save_tensors
from fedsift.runs.folder import RunFolder, column
from fedsift.runs.records import append_line
from fedsift.runs.run import environment_on, results_of
from fedsift.runs.saved_result import load_snapshot, load_weights, save_snapshot
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

    @property
    def perplexity(self) -> float | None:
        """The test perplexity of the last evaluated round of a language model, otherwise None."""
        return next(reversed(column(self.history, "perplexity")), None)

    @property
    def seconds(self) -> float:
        """The time of all rounds."""
        return float(self.history[-1]["seconds"]) if self.history else 0.0

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
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        run = ReportedRun(self.summary(), self.history, labels=self.labels)
        title = f"{self.settings['algorithm']} on {self.settings['dataset']}"
        write_report([run], Path(path), title)

    def save(self, path: str | Path) -> None:
        """Write the result to a new folder, with the files of a run folder."""
        if RunFolder(Path(path)).config_file.exists():
            raise ValueError(f"{path} already holds a run: save the result in another folder")
        folder = RunFolder.create(Path(path), PythonConfig(self.settings))
        for record in self.history:
            append_line(folder.metrics_file, record)
        folder.write_clients([list(row) for row in self.labels] or None)
        save_tensors(folder.model_file, self.layout.named(self.weights), {})
        save_snapshot(folder, self.snapshot, self.seconds, self.layout)
        folder.write_summary(self.summary())

    @classmethod
    def load(cls, path: str | Path) -> Result:
        """Read a result that :meth:`save` wrote, or the folder of a finished run."""
        folder = RunFolder.open(Path(path))
        snapshot, layout = load_snapshot(folder)
        return cls(
            snapshot,
            folder.records(),
            layout,
            load_weights(folder, layout),
            read_values(folder.config_file),
            folder.labels(),
        )

    def summary(self) -> dict[str, Any]:
        """Return the settings and results, as in summary.json."""
        return {
            **self.settings,
            **results_of(self.history, self.layout.d),
            "environment": environment_on(self.weights.device.type),
        }

    def __repr__(self) -> str:
        quality = "" if self.accuracy is None else f"accuracy={self.accuracy:.4f}, "
        quality += "" if self.perplexity is None else f"perplexity={self.perplexity:.4g}, "
        sent = self.snapshot.traffic.uplink_bytes
        return (
            f"Result(rounds={self.snapshot.round}, {quality}uplink_bytes={sent:.0f} per client, "
            f"parameters={self.layout.d})"
        )
