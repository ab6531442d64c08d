"""A run in progress on a Flower server: what changes from round to round, and its folder."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from logging import INFO, WARNING

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from flwr.supercore import log
from torch import Tensor

from fedsift.engine.evaluation import OWN_COLUMNS
from fedsift.federation.snapshot import Snapshot
from fedsift.flower.arrays import arrays_from_vector
from fedsift.flower.deployment import Deployment
from fedsift.flower.engine import RemoteEngine
from fedsift.flower.evaluation import (
    ClientEvaluation,
    EvaluateRequests,
    evaluating_nodes,
    weighted_means,
)
from fedsift.flower.exchange import Exchange, wait_for_nodes
from fedsift.flower.metrics import metrics_text
from fedsift.flower.requests import NodeStatus, RoundRequests
from fedsift.flower.superlink import connected_nodes
from fedsift.flower.watch import RunWatch
from fedsift.progress.text import epsilon_text
from fedsift.report.html import report_on
from fedsift.runs.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from fedsift.runs.config import Config
from fedsift.runs.folder import RunFolder
from fedsift.runs.model import save_model
from fedsift.runs.records import append_round, rewind
from fedsift.runs.run import run_summary
from fedsift.runs.uploads import Uploads
from fedsift.simulation import Record, run_rounds
from fedsift.simulation.loop import finite_or_none

COLUMNS = frozenset((*OWN_COLUMNS, "accuracy", "loss", "evaluation", "secure"))
"""Columns of metrics.jsonl that are not metrics of ``evaluate_fn`` with a name of their own."""


@dataclass
class DeployedRun:
    """A run in progress.

    ``config`` is the configuration in use, even if its file is edited during the run. ``timeout``
    limits each round in seconds, ``wait`` the time to wait for SuperNodes, and ``min_nodes`` is the
    number to wait for. ``record`` is that of the last round, and ``evaluation`` its evaluation by
    the clients.
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
    min_nodes: int | None
    nodes: dict[int, NodeStatus] = field(default_factory=dict)
    record: Record = field(default_factory=dict)
    evaluation: ClientEvaluation | None = None
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
        min_nodes: int | None,
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
        restore_metrics(engine.result, history)
        return cls(
            folder, folder.config(), federation, engine, uploads, checkpoint, history,
            timeout, wait, min_nodes,
        )  # fmt: skip

    @property
    def snapshot(self) -> Snapshot:
        """The snapshot after the last round."""
        return self.checkpoint.snapshot

    @property
    def result(self) -> Result:
        """The result of ``FedSift.start`` up to the last round."""
        return self.engine.result

    def may_continue(self) -> bool:
        """Whether the privacy budget, if there is one, allows another round."""
        may = self.federation.may_run(self.snapshot.round + 1)
        if not may:
            log(INFO, "the privacy budget allows no further round")
        return may

    def start_round(self, config: ConfigRecord, grid: Grid) -> list[Message]:
        """Wait for enough nodes, and return the messages to send."""
        needed = self.min_nodes or max(1, self.federation.min_clients)
        clients = len(self.federation.task.clients)
        wanted = needed if self.nodes or self.min_nodes else clients
        connected = wait_for_nodes(grid, wanted, needed, self.wait, self.watch)
        requests = self.requests(RoundRequests, config)
        self.engine.exchange = Exchange(grid, requests, self.watch)
        return [requests.message_to(node) for node in connected if requests.is_needed(node)]

    def requests(self, kind: type[RoundRequests], config: ConfigRecord) -> RoundRequests:
        """Return the requests to clients after the last round."""
        memories = 1 + self.config.keep_checkpoints
        return kind(self.federation, self.snapshot, self.nodes, self.timeout, config, memories)

    def merge_replies(self, replies: Iterable[Message]) -> tuple[ArrayRecord, MetricRecord]:
        """Merge the replies of a round as they arrive."""
        self.engine.replies = replies
        round, seconds = self.snapshot.round + 1, self.checkpoint.seconds
        snapshot, record = next(run_rounds(self.federation, self.snapshot, round, seconds))
        exchange = self.engine.current
        record["problems"] |= exchange.problems_of_unknown_nodes()
        self.checkpoint = Checkpoint(snapshot, float(record["seconds"]))
        merged = {n: x for n, x in exchange.metrics.items() if str(n) not in record["problems"]}
        means, _ = weighted_means(merged, self.federation)
        trained = MetricRecord({**numbers_of(record), **means})
        measured = self.result.evaluate_metrics_serverapp.get(round, MetricRecord())
        self.record, self.evaluation = record | own_metrics(measured), None
        return self.result.arrays, trained

    def start_evaluation(
        self, fraction: float, least: int, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Return the messages that ask clients to evaluate the model of the round."""
        connected = connected_nodes(grid) if fraction else ()
        seed, round = self.federation.task.seed, self.snapshot.round
        nodes = evaluating_nodes(self.nodes, connected, fraction, least, seed, round)
        requests = self.requests(EvaluateRequests, config)
        exchange = Exchange(grid, requests, self.watch)
        self.evaluation = ClientEvaluation(exchange) if nodes else None
        return [requests.message_to(node) for node in nodes]

    def merge_evaluations(self, replies: Iterable[Message]) -> MetricRecord | None:
        """Return the weighted means of the clients' metrics; None if no client evaluates."""
        if self.evaluation is None:
            return None
        began = time.perf_counter()
        self.evaluation.take(replies)
        summary = self.record["evaluation"] = self.evaluation.summary()
        self.record["seconds"] += time.perf_counter() - began
        self.checkpoint = replace(self.checkpoint, seconds=float(self.record["seconds"]))
        return MetricRecord(summary["metrics"]) if summary["clients"] else None

    def write_round(self) -> None:
        """Write the last round to the folder."""
        record = self.record
        append_round(self.folder, record, self.uploads.finish_round(record["round"]))
        save_checkpoint(self.folder, self.checkpoint, self.federation, self.config)
        self.watch.round_finished(record, self.history[-1] if self.history else None)
        self.history.append(record)
        log_round(record)

    def metrics(self) -> str:
        """Return the run's metrics in Prometheus' text format."""
        return metrics_text(self.watch.status, self.history, len(self.federation.task.clients))

    def finish(self) -> None:
        """Write the model, the summary and the report."""
        save_model(self.folder, self.federation, self.snapshot)
        summary = run_summary(self.folder.config(), self.federation, self.history)
        summary |= self.federation.epsilon(self.snapshot.round)  # with what was drawn since
        self.folder.write_summary(summary)
        report_on([self.folder.path], self.folder.report_file)
        log(INFO, "report: %s", self.folder.report_file.absolute())


def numbers_of(record: Mapping[str, object]) -> dict[str, int | float]:
    """Return what is a number in a round's metrics."""
    return {key: x for key, x in record.items() if isinstance(x, int | float)}


def own_metrics(measured: Mapping[str, object]) -> dict[str, int | float | None]:
    """Return the numbers that have no column in metrics.jsonl yet; None if JSON has no such number.

    >>> own_metrics({"accuracy": 0.5, "top 3": 0.75, "by class": [0.5, 0.5], "seconds": 3.0})
    {'top 3': 0.75}
    """
    own = {key: x for key, x in numbers_of(measured).items() if key not in COLUMNS}
    return {key: finite_or_none(x) for key, x in own.items()}


def restore_metrics(result: Result, history: Iterable[Record]) -> None:
    """Add the metrics of the rounds of an earlier process, as far as the folder has them."""
    for record in history:
        round, numbers = int(record["round"]), numbers_of(record)
        own = own_metrics(numbers).keys()
        result.train_metrics_clientapp[round] = MetricRecord(
            {key: x for key, x in numbers.items() if key not in own}
        )
        evaluation = record.get("evaluation") or {"clients": 0}
        if evaluation["clients"]:
            result.evaluate_metrics_clientapp[round] = MetricRecord(evaluation["metrics"])
        measured = MetricRecord(
            {key: x for key, x in numbers.items() if key in {"accuracy", "loss", *own}}
        )
        if measured:
            result.evaluate_metrics_serverapp[round] = measured


def log_round(record: Record) -> None:
    """Log how many updates were merged, the accuracy, and the problems of a round."""
    accuracy = record["accuracy"]
    suffix = "" if accuracy is None else f", accuracy {accuracy:.2%}"
    suffix += "".join(f", {text}" for text in epsilon_text(record))
    log(INFO, "\t└──> %s updates merged%s", record["clients"], suffix)
    log_problems(record["problems"])
    if evaluation := record.get("evaluation"):
        metrics = ", ".join(f"{name} {x:.4g}" for name, x in evaluation["metrics"].items())
        log(INFO, "\t└──> %s clients evaluated: %s", evaluation["clients"], metrics)
        log_problems(evaluation["problems"])


def log_problems(problems: Mapping[str, str]) -> None:
    """Log the problems of clients and nodes."""
    for name, problem in problems.items():
        log(WARNING, "\t\t%s: %s", f"client {name}" if name.isdigit() else name, problem)
