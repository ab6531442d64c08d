"""The strategy that stands where FedAvg stood: ``FedSift(algorithm, clients, folder)``.

Replies are merged in the cohort's order, so that sums have the same bits as in a simulation. A
reply that is early waits as the small frame it came as.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from logging import INFO, WARNING
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from flwr.supercore import log
from torch import Tensor, nn

from fedsift.algorithms.method import Algorithm
from fedsift.codec.errors import FrameError
from fedsift.codec.limits import Limits
from fedsift.engine.contract import Job, Missing, Received
from fedsift.federation.cohort import (
    check_cohort,
)
from fedsift.federation.norm_bound import MAX_NORM_RATIO, check_max_norm_ratio
from fedsift.federation.round import (
    MAX_SAMPLES,
)
from fedsift.flower.arrays import flat, named
from fedsift.flower.deployment import Deployment, Node, Orders
from fedsift.flower.exchange import Exchange, connected
from fedsift.report.html import report_on
from fedsift.runs.checkpoint import Checkpoint
from fedsift.runs.config import RunConfig
from fedsift.runs.folder import RunFolder
from fedsift.runs.run import summarize
from fedsift.runs.uploads import Uploads
from fedsift.simulation import run_rounds
from fedsift.task import RemoteClients, Task

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]


class FedSift(Strategy):
    """A Flower strategy that runs a fedsift algorithm, and keeps its run in a folder.

    Parameters
    ----------
    algorithm
        A method from ``fedsift.algorithms``, the same as the clients'.
    clients
        How many clients there are in all, one a SuperNode, numbered by ``partition-id``.
    folder
        The run's folder. If it holds the same run already, that run is continued.
    batch_size
        Samples a local step; None takes the whole local set.
    max_samples
        The most that a client may say it has where its whole local set is its batch: its update
        weighs as much.
    participation
        The share of clients that train in a round.
    min_clients
        A round with fewer updates than this stops the run; it can be continued.
    max_norm_ratio
        An update is rejected if the L2 norm of its W is more than this many times the usual norm
        in this and recent rounds. M may be twice as many times as large, V the square of that.
        0 or None: no bound.
    enough
        So many updates end a round, without waiting for the others; None waits for all.
    wait
        Seconds to wait for SuperNodes: for all at first, in later rounds for ``min_clients``.
    seed
        Fixes cohorts and mini-batches.
    dataset, model, partition, theta
        What the run's summary and report say of them; they are settings of the run like others.

    """

    def __init__(
        self,
        algorithm: Algorithm,
        clients: int,
        folder: str | Path,
        *,
        batch_size: int | None = 64,
        max_samples: int = MAX_SAMPLES,
        participation: float = 1.0,
        min_clients: int = 1,
        max_norm_ratio: float | None = MAX_NORM_RATIO,
        enough: int | None = None,
        wait: float = 300.0,
        seed: int = 0,
        dataset: str = "your own",
        model: str = "your own",
        partition: str = "by node",
        theta: float = 0.1,
    ) -> None:
        if clients < 1:
            raise ValueError(f"clients must be at least 1, got {clients}")
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, or None for all, got {batch_size}")
        check_cohort(clients, participation, min_clients)
        check_max_norm_ratio(max_norm_ratio)
        if enough is not None and not max(1, min_clients) <= enough <= clients:
            raise ValueError(f"enough must be from min_clients to {clients}, got {enough}")
        self.algorithm, self.clients = algorithm, clients
        self.batch_size, self.max_samples = batch_size, max_samples
        self.seed, self.participation = seed, participation
        self.min_clients, self.enough, self.wait = min_clients, enough, wait
        self.max_norm_ratio = float(max_norm_ratio or 0)
        self.path, self.dataset, self.model = Path(folder), dataset, model
        self.partition, self.theta = partition, theta
        self.nodes: dict[int, Node] = {}

    def summary(self) -> None:
        """Log what will be run."""
        log(INFO, "\t├──> %r", self.algorithm)
        log(INFO, "\t├──> %s clients, at least %s a round", self.clients, self.min_clients)
        log(INFO, "\t└──> run folder: %s", self.path.absolute())

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> Result:
        """Run the rounds that are still to run, from the folder's checkpoint if there is one.

        A round ends after ``timeout`` seconds at the latest, with the replies that are in.
        ``evaluate_fn`` may return ``accuracy`` and ``loss``: they go into the run's metrics.
        """
        if num_rounds < 1:
            raise ValueError(f"num_rounds must be at least 1, got {num_rounds}")
        if evaluate_config is not None:
            raise ValueError("FedSift's clients do not evaluate: leave out evaluate_config")
        self.timeout, self.evaluate_fn = timeout, evaluate_fn
        self.layout, w = flat(initial_arrays)
        self.result = Result(arrays=initial_arrays)
        self.summary()
        config = self.config(num_rounds)
        self.folder = RunFolder.create_or_extend(self.path, config)
        with self.folder.locked():
            arrays = self.begin(w)
            while self.snapshot.round < num_rounds:
                round = self.snapshot.round + 1
                log(INFO, "[ROUND %s/%s]", round, num_rounds)
                messages = self.configure_train(round, arrays, train_config or ConfigRecord(), grid)
                replies = self.exchange.replies(messages)
                arrays, metrics = self.aggregate_train(round, replies)
                self.result.train_metrics_clientapp[round] = metrics
            self.finish(self.folder.config())
        return self.result

    def config(self, rounds: int) -> RunConfig:
        """What defines the run."""
        return RunConfig(
            algorithm=self.algorithm.name,
            clients=self.clients,
            rounds=rounds,
            batch_size=self.batch_size or 0,
            partition=self.partition,
            theta=self.theta,
            participation=self.participation,
            min_clients=self.min_clients,
            max_norm_ratio=self.max_norm_ratio,
            wire="flower",
            seed=self.seed,
            device="cpu",
            settings=dict(self.algorithm.settings),
            dataset=self.dataset,
            model=self.model,
        )

    def begin(self, w: Tensor) -> ArrayRecord:
        """Take up the run where its checkpoint has left it, or at its beginning."""
        # The model and the data are with the clients: here are only the names and sizes of both.
        loss, nowhere = nn.functional.cross_entropy, RemoteClients(self.clients, {})
        task = Task(nn.Module(), loss, nowhere, None, self.batch_size, self.seed, self.layout)
        share, least = self.participation, self.min_clients
        self.uploads = Uploads(self.layout.d)
        self.federation = Deployment(
            task,
            self.algorithm,
            self,
            share,
            min_clients=least,
            on_upload=self.uploads.take,
            max_samples=self.max_samples,
            max_norm_ratio=self.max_norm_ratio,
        )
        self.saved_config = self.folder.config()
        saved = self.folder.load(self.federation, "cpu")
        if saved:
            log(INFO, "%s holds %s rounds: going on", self.path, saved.snapshot.round)
        checkpoint = saved or Checkpoint(self.federation.initial_snapshot_from(w), 0.0)
        self.snapshot, self.seconds = checkpoint.snapshot, checkpoint.seconds
        self.history = self.folder.rewind(self.snapshot.round)
        self.result.arrays = named(self.layout, self.federation.model_weights(self.snapshot))
        return self.result.arrays

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """The round's orders, once enough nodes are connected."""
        least = max(1, self.min_clients)
        nodes = connected(grid, least if self.nodes else self.clients, least, self.wait)
        orders = Orders(self.federation, self.snapshot, self.nodes, self.timeout, config)
        self.exchange = Exchange(grid, orders)
        return [orders.message(node) for node in nodes if orders.concerns(node)]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord, MetricRecord]:
        """Merge the replies as they arrive, and write the round to the run's folder."""
        self.replies = replies
        rounds = run_rounds(self.federation, self.snapshot, server_round, self.seconds)
        self.snapshot, record = next(rounds)
        self.seconds = float(record["seconds"])
        record["problems"] |= self.exchange.strangers()
        self.folder.append(record, self.uploads.sum_up(server_round))
        checkpoint = Checkpoint(self.snapshot, self.seconds)
        self.folder.save(checkpoint, self.federation, self.saved_config)
        self.history.append(record)
        told = "" if record["accuracy"] is None else f", accuracy {record['accuracy']:.2%}"
        log(INFO, "\t└──> %s updates merged%s", record["clients"], told)
        for who, problem in record["problems"].items():
            log(WARNING, "\t\t%s: %s", f"client {who}" if who.isdigit() else who, problem)
        metrics = MetricRecord()
        metrics.update({k: v for k, v in record.items() if isinstance(v, int | float)})
        return self.result.arrays, metrics

    def train(self, job: Job) -> Iterator[Received | Missing]:
        """Each member's reply, in the cohort's order: what makes this strategy an engine."""
        early: dict[int, Received | Missing] = {}
        waiting, sound = list(job.cohort), 0
        limits = (
            self.federation.upload_limits(job, self.exchange.orders.state) if self.enough else None
        )
        for message in self.replies:
            reply = self.exchange.read(message)
            if reply is None:
                continue
            early[reply.client] = reply
            while waiting and waiting[0] in early:
                yield early.pop(waiting.pop(0))
            sound += limits is not None and self.is_sound(reply, limits)
            if sound == self.enough:
                self.exchange.unheard = "the round had enough replies"
                break
        for client in waiting:
            yield early.get(client) or Missing(client, self.exchange.why(client))

    def is_sound(self, reply: Received | Missing, limits: Limits) -> bool:
        """Whether a reply is one of those that are enough: an update that will be merged."""
        if isinstance(reply, Missing):
            return False
        try:
            update = self.federation.decode_upload(reply, limits)
        except FrameError:
            return False
        bound = self.federation.norm_bound(self.snapshot)
        return not any(map(bound.violation, bound.norms_of(update)))

    def evaluate(self, w: Tensor) -> tuple[float | None, float | None]:
        """Accuracy and loss by the app's own ``evaluate_fn``."""
        self.result.arrays = named(self.layout, w)
        if self.evaluate_fn is None:
            return None, None
        round = self.snapshot.round + 1
        found = self.evaluate_fn(round, self.result.arrays)
        if found is None:
            return None, None
        self.result.evaluate_metrics_serverapp[round] = found
        accuracy, loss = found.get("accuracy"), found.get("loss")
        return number(accuracy), number(loss)

    def finish(self, config: RunConfig) -> None:
        """Write the model, the summary and the report."""
        self.folder.save_model(self.federation, self.snapshot)
        summary = summarize(config, self.federation, self.history)
        self.folder.finish(summary)
        report_on([self.folder.path], self.folder.path / "report.html")
        log(INFO, "report: %s", (self.folder.path / "report.html").absolute())

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """No message: the model is tested at the server, by ``evaluate_fn``."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> None:
        """Nothing to add up, as no client evaluates."""


def number(value: object) -> float | None:
    """A metric, if it is a number."""
    return float(value) if isinstance(value, int | float) else None
