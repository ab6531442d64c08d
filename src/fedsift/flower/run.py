"""A run in progress on a Flower server: what changes from round to round, and its folder."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from logging import INFO, WARNING

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from flwr.supercore import log
from torch import Tensor

from fedsift.federation.snapshot import Snapshot
from fedsift.flower.arrays import arrays_from_vector
from fedsift.flower.deployment import Deployment
from fedsift.flower.engine import RemoteEngine
from fedsift.flower.exchange import Exchange, wait_for_nodes
from fedsift.flower.metrics import metrics_text
from fedsift.flower.requests import NodeStatus, RoundRequests
from fedsift.flower.watch import RunWatch
from fedsift.report.html import report_on
from fedsift.runs.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from fedsift.runs.config import Config
from fedsift.runs.folder import RunFolder
from fedsift.runs.model import save_model
from fedsift.runs.records import append_round, rewind
from fedsift.runs.run import run_summary
from fedsift.runs.uploads import Uploads
from fedsift.simulation import Record, run_rounds


@dataclass
class DeployedRun:
    """A run in progress.

    ``config`` is the configuration in use, even if its file is edited during the run. ``timeout``
    limits each round in seconds, ``wait`` the time to wait for SuperNodes.
    """

    folder: RunFolder
    config: Config
    federation: Deployment
    engine: RemoteEngine
    uploads: Uploads
    checkpoint: Checkpoint
    history: list[Record]
    timeout: float
    wait: float
    nodes: dict[int, NodeStatus] = field(default_factory=dict)
    watch: RunWatch = field(init=False)

    def __post_init__(self) -> None:
        self.watch = RunWatch(self.folder, self.config.rounds, self.history)

    @classmethod
    def restore(
        cls,
        folder: RunFolder,
        federation: Deployment,
        engine: RemoteEngine,
        w: Tensor,
        timeout: float,
        wait: float,
    ) -> DeployedRun:
        """Continue the run in the folder from its checkpoint, or start it with weights ``w``."""
        uploads = Uploads(federation.task.layout.d)
        federation = replace(federation, on_upload=uploads.add)
        saved = load_checkpoint(folder, federation, "cpu")
        if saved:
            last = saved.snapshot.round
            log(INFO, "continuing the run in %s after round %s", folder.path, last)
        checkpoint = saved or Checkpoint(federation.initial_snapshot_from(w), 0.0)
        history = rewind(folder, checkpoint.snapshot.round)
        model = federation.model_weights(checkpoint.snapshot)
        engine.result.arrays = arrays_from_vector(federation.task.layout, model)
        config = folder.config()
        return cls(folder, config, federation, engine, uploads, checkpoint, history, timeout, wait)

    @property
    def snapshot(self) -> Snapshot:
        """The snapshot after the last round."""
        return self.checkpoint.snapshot

    @property
    def result(self) -> Result:
        """The result of ``FedSift.start`` up to the last round."""
        return self.engine.result

    def start_round(self, config: ConfigRecord, grid: Grid) -> list[Message]:
        """Wait for enough nodes, and return the messages to send."""
        needed = max(1, self.federation.min_clients)
        wanted = needed if self.nodes else len(self.federation.task.clients)
        connected = wait_for_nodes(grid, wanted, needed, self.wait, self.watch)
        requests = RoundRequests(
            self.federation, self.snapshot, self.nodes, self.timeout, config,
            memories=1 + self.config.keep_checkpoints,
        )  # fmt: skip
        self.engine.exchange = Exchange(grid, requests, self.watch)
        return [requests.message_to(node) for node in connected if requests.is_needed(node)]

    def merge_replies(self, replies: Iterable[Message]) -> tuple[ArrayRecord, MetricRecord]:
        """Merge the replies of a round as they arrive, and write the round to the folder."""
        self.engine.replies = replies
        round, seconds = self.snapshot.round + 1, self.checkpoint.seconds
        snapshot, record = next(run_rounds(self.federation, self.snapshot, round, seconds))
        record["problems"] |= self.engine.current.problems_of_unknown_nodes()
        self.checkpoint = Checkpoint(snapshot, float(record["seconds"]))
        append_round(self.folder, record, self.uploads.finish_round(round))
        save_checkpoint(self.folder, self.checkpoint, self.federation, self.config)
        self.watch.round_finished(record, self.history[-1] if self.history else None)
        self.history.append(record)
        log_round(record)
        metrics = MetricRecord()
        metrics.update({k: v for k, v in record.items() if isinstance(v, int | float)})
        return self.result.arrays, metrics

    def metrics(self) -> str:
        """Return the run's metrics in Prometheus' text format."""
        return metrics_text(self.watch.status, self.history, len(self.federation.task.clients))

    def finish(self) -> None:
        """Write the model, the summary and the report."""
        save_model(self.folder, self.federation, self.snapshot)
        summary = run_summary(self.folder.config(), self.federation, self.history)
        self.folder.write_summary(summary)
        report_on([self.folder.path], self.folder.report_file)
        log(INFO, "report: %s", self.folder.report_file.absolute())


def log_round(record: Record) -> None:
    """Log how many updates were merged, the accuracy, and the problems of a round."""
    accuracy = record["accuracy"]
    suffix = "" if accuracy is None else f", accuracy {accuracy:.2%}"
    log(INFO, "\t└──> %s updates merged%s", record["clients"], suffix)
    for name, problem in record["problems"].items():
        log(WARNING, "\t\t%s: %s", f"client {name}" if name.isdigit() else name, problem)
