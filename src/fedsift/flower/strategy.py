"""The strategy that stands where FedAvg stood: ``FedSift(algorithm, clients, folder)``.

Replies are merged in the cohort's order, so that sums have the same bits as in a simulation. A
reply that is early waits as the small frame it came as.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from logging import INFO, WARNING
from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from flwr.supercore import log
from torch import Tensor, nn

from fedsift.algorithms.method import Algorithm
from fedsift.codec.frame import CHECKSUM_BYTES
from fedsift.disk import replace_file
from fedsift.engine.task import Elsewhere, Job, Missing, Received, Task
from fedsift.federation import TooFewClients, cohort_size
from fedsift.flower.arrays import flat, named
from fedsift.flower.deployment import Deployment, Node, Orders
from fedsift.flower.protocol import Answer, Malformed
from fedsift.report.html import report_on
from fedsift.runs.config import RunConfig
from fedsift.runs.folder import Checkpoint, RunFolder
from fedsift.runs.run import summarise
from fedsift.runs.uploads import Uploads
from fedsift.simulation import play

POLL_SECONDS = 0.5
"""Between two looks into the SuperLink."""

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
    participation
        The share of clients that train in a round.
    min_clients
        A round with fewer updates than this stops the run; it can be continued.
    enough
        So many replies end a round, without waiting for the others; None waits for all.
    wait
        Seconds to wait for SuperNodes: for all at first, in later rounds for ``min_clients``.
    seed
        Fixes cohorts and mini-batches.
    dataset, model
        Their names in the run's summary and report.

    """

    def __init__(
        self,
        algorithm: Algorithm,
        clients: int,
        folder: str | Path,
        *,
        batch_size: int | None = 64,
        participation: float = 1.0,
        min_clients: int = 1,
        enough: int | None = None,
        wait: float = 300.0,
        seed: int = 0,
        dataset: str = "your own",
        model: str = "your own",
    ) -> None:
        if clients < 1:
            raise ValueError(f"clients must be at least 1, got {clients}")
        if not 0 < participation <= 1:
            raise ValueError(f"participation must be in (0, 1], got {participation}")
        if not 0 <= min_clients <= cohort_size(participation, clients):
            raise ValueError(f"min_clients must be from 0 to the cohort's size, got {min_clients}")
        if enough is not None and not max(1, min_clients) <= enough <= clients:
            raise ValueError(f"enough must be from min_clients to {clients}, got {enough}")
        self.algorithm, self.clients = algorithm, clients
        self.batch_size, self.seed, self.participation = batch_size, seed, participation
        self.min_clients, self.enough, self.wait = min_clients, enough, wait
        self.path, self.dataset, self.model = Path(folder), dataset, model
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
        self.grid, self.timeout, self.evaluate_fn = grid, timeout, evaluate_fn
        self.layout, w = flat(initial_arrays)
        self.result = Result(arrays=initial_arrays)
        self.summary()
        config = self.config(num_rounds)
        self.folder = open_folder(self.path, config)
        with self.folder.locked():
            arrays = self.begin(w)
            while self.snapshot.round < num_rounds:
                round = self.snapshot.round + 1
                log(INFO, "[ROUND %s/%s]", round, num_rounds)
                messages = self.configure_train(round, arrays, train_config or ConfigRecord(), grid)
                arrays, metrics = self.aggregate_train(round, self.exchange(messages))
                self.result.train_metrics_clientapp[round] = metrics
            self.finish(config)
        return self.result

    def config(self, rounds: int) -> RunConfig:
        """What defines the run."""
        return RunConfig(
            algorithm=self.algorithm.name,
            clients=self.clients,
            rounds=rounds,
            batch_size=self.batch_size or 0,
            partition="by node",
            participation=self.participation,
            min_clients=self.min_clients,
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
        loss, nowhere = nn.functional.cross_entropy, Elsewhere(self.clients, {})
        task = Task(nn.Module(), loss, nowhere, None, self.batch_size, self.seed, self.layout)
        share, least = self.participation, self.min_clients
        self.uploads = Uploads(self.layout.d)
        self.federation = Deployment(
            task, self.algorithm, self, share, min_clients=least, on_upload=self.uploads.take
        )
        saved = self.folder.load(self.federation, "cpu")
        if saved:
            log(INFO, "%s holds %s rounds: going on", self.path, saved.snapshot.round)
        checkpoint = saved or Checkpoint(self.federation.first_from(w), 0.0)
        self.snapshot, self.seconds = checkpoint.snapshot, checkpoint.seconds
        self.history = self.folder.rewind(self.snapshot.round)
        self.result.arrays = named(self.layout, self.snapshot.state.w)
        return self.result.arrays

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """The round's orders, once enough nodes are connected."""
        nodes = self.connected(server_round)
        self.orders = Orders(self.federation, self.snapshot, self.nodes, self.timeout, config)
        self.problems: dict[int, str] = {}
        return [self.orders.message(node) for node in nodes if self.orders.concerns(node)]

    def connected(self, round: int) -> list[int]:
        """The nodes that are there: waits for all clients at first, later for ``min_clients``."""
        least = max(1, self.min_clients)
        needed = least if self.nodes else self.clients
        until = time.monotonic() + self.wait
        while len(nodes := sorted(self.grid.get_node_ids())) < needed and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
        if len(nodes) < least:
            raise TooFewClients(
                f"{len(nodes)} of at least {least} SuperNodes are connected after {self.wait:g} s: "
                "start more of them, or wait longer; then start the same run to continue it"
            )
        return nodes

    def exchange(self, messages: Iterable[Message]) -> Iterator[Message]:
        """Send orders and yield replies as they come, until all, or enough, or time is up.

        A node that turns out to be behind is sent everything.
        """
        until = time.monotonic() + self.timeout
        self.asked: dict[str, int] = {}
        waiting, updates = self.push(messages), 0
        while waiting:
            is_last = time.monotonic() > until
            for reply in self.grid.pull_messages([id for id in self.asked if id in waiting]):
                waiting.discard(reply.metadata.reply_to_message_id)
                node, answer = self.read(reply)
                if answer and answer.outcome == "behind":
                    waiting |= self.push([self.orders.message(node, everything=True)])
                    continue
                yield reply
                updates += answer is not None and answer.outcome == "update"
                if updates == self.enough:
                    waiting, self.unheard = set(), "the round had enough replies"
                    break
            if is_last:
                return
            time.sleep(POLL_SECONDS if waiting else 0)

    def push(self, messages: Iterable[Message]) -> set[str]:
        """Send messages, and note which node was asked by which."""
        sent = list(messages)
        ids = self.grid.push_messages(sent)
        asked = {id: m.metadata.dst_node_id for id, m in zip(ids, sent, strict=True)}
        self.asked |= asked
        return set(asked)

    def read(self, reply: Message) -> tuple[int, Answer | None]:
        """The node that replied, and its answer; None, with the problem noted, if it has none."""
        node = self.asked[reply.metadata.reply_to_message_id]
        if reply.has_error():
            self.problems[node] = f"Flower's error {reply.error.code}: {reply.error.reason}"
            return node, None
        try:
            answer = Answer.read(reply.content)
            self.admit(node, answer.client)
        except Malformed as problem:
            self.problems[node] = str(problem)
            return node, None
        return node, answer

    def admit(self, node: int, client: int) -> None:
        """Note which client a node is; it cannot be one that another node is, or become another."""
        about = self.nodes.setdefault(node, Node())
        others = [n for n, other in self.nodes.items() if other.client == client and n != node]
        taken = others and set(others) & set(self.grid.get_node_ids())
        if taken or not 0 <= client < self.clients or about.client not in (None, client):
            raise Malformed(f"it says that it is client {client}, which it cannot be")
        for other in others:
            del self.nodes[other]
        about.client = client

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord, MetricRecord]:
        """Merge the replies as they arrive, and write the round to the run's folder."""
        self.replies, self.unheard = replies, f"no reply within {self.timeout:g} s"
        rounds = play(self.federation, self.snapshot, server_round, self.seconds)
        self.snapshot, record = next(rounds)
        self.seconds = float(record["seconds"])
        record["problems"] |= self.strangers()
        self.folder.append(record, self.uploads.sum_up(server_round))
        self.folder.save(Checkpoint(self.snapshot, self.seconds), self.federation)
        self.history.append(record)
        told = "" if record["accuracy"] is None else f", accuracy {record['accuracy']:.2%}"
        log(INFO, "\t└──> %s updates merged%s", record["clients"], told)
        for who, problem in record["problems"].items():
            log(WARNING, "\t\tclient %s: %s", who, problem)
        metrics = MetricRecord()
        metrics.update({k: v for k, v in record.items() if isinstance(v, int | float)})
        return self.result.arrays, metrics

    def train(self, job: Job) -> Iterator[Received | Missing]:
        """Each member's reply, in the cohort's order: what makes this strategy an engine."""
        early: dict[int, Received | Missing] = {}
        waiting = list(job.cohort)
        for reply in self.replies:
            node, answer = self.read(reply)
            if answer is None:
                continue
            early[answer.client] = self.taken(node, answer)
            while waiting and waiting[0] in early:
                yield early.pop(waiting.pop(0))
        for client in waiting:
            yield early.get(client) or Missing(client, self.why(client))

    def taken(self, node: int, answer: Answer) -> Received | Missing:
        """An answer as the federation takes it."""
        if answer.outcome in ("update", "absent"):
            self.nodes[node].held = self.orders.state
        if answer.outcome != "update":
            return Missing(answer.client, answer.reason or answer.outcome)
        receipt = torch.frombuffer(bytearray(answer.frame[-CHECKSUM_BYTES:]), dtype=torch.uint8)
        return Received(answer.client, answer.frame, {"receipt": receipt}, answer.loss)

    def why(self, client: int) -> str:
        """Why nothing came from a client."""
        node = next((n for n, about in self.nodes.items() if about.client == client), None)
        if node is not None and node in self.problems:
            return self.problems[node]
        if node is not None and node in self.asked.values():
            return self.unheard
        return "no node is this client"

    def strangers(self) -> dict[str, str]:
        """What became of the nodes that were asked and are no client yet."""
        unknown = {n for n in self.asked.values() if self.nodes.get(n, Node()).client is None}
        return {f"node {n}": self.problems.get(n, self.unheard) for n in sorted(unknown)}

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
        """Write the summary and the report."""
        summary = summarise(config, self.federation, self.history)
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


def open_folder(path: Path, config: RunConfig) -> RunFolder:
    """A new run's folder, or the same run's where it stopped; it may be given more rounds."""
    folder = RunFolder(path)
    if folder.config_file.exists():
        rounds = folder.config().rounds
        if folder.holds(replace(config, rounds=rounds)) and config.rounds > rounds:
            replace_file(folder.config_file, config.toml().encode())
        return folder
    return RunFolder.create(path, config)


def number(value: object) -> float | None:
    """A metric, if it is a number."""
    return float(value) if isinstance(value, int | float) else None
