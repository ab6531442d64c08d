"""The Flower mod :func:`sifted`: apps with train and evaluate functions of their own."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.app import Context as NodeContext
from flwr.clientapp.typing import ClientAppCallable, Mod
from torch import Tensor

from fedsift.algorithms.method import Algorithm
from fedsift.engine.client import Trained, client_result
from fedsift.engine.contract import ClientResult, Job
from fedsift.errors import require_choice
from fedsift.flower.arrays import arrays_from_vector, values_of
from fedsift.flower.client_round import (
    ClientRound,
    MakeAlgorithm,
    answer,
    chosen_algorithm,
    partition_of,
    store_of,
)
from fedsift.flower.own_training import check_own_training, round_optimizer
from fedsift.flower.protocol import RECORD, TrainReply, TrainRequest, numbers_in
from fedsift.flower.store import ClientState
from fedsift.task import weight_of
from fedsift.task.threads import one_thread

BUFFERS = ("average", "local")
"""What may happen to running statistics. Only the app's own code could freeze them."""
LOSSES = ("train_loss", "loss")
"""The names of the metric that counts as a client's loss."""


def sifted(
    algorithm: Algorithm | MakeAlgorithm,
    *,
    buffers: str = "average",
    state_dir: Path | None = None,
) -> Mod:
    """Return a Flower mod that lets an app's own functions train with a fedsift algorithm.

    ``ClientApp(mods=[sifted(algorithm)])`` keeps its ``@app.train()`` and ``@app.evaluate()``
    functions: they receive the model as ``message.content["arrays"]``, and the server's
    ``train_config`` or ``evaluate_config`` as ``message.content["config"]``. What travels is the
    compressed update. The server's strategy must be :class:`fedsift.flower.FedSift`.

    Methods that only need ΔW work with any optimizer: ``fedavg``, ``fedsgd``, ``sparse_fedsgd``,
    ``fedopt``, and any of them in ``compressed``. Methods that average Adam's moments need
    :func:`fedsift.flower.optimizer_for`. Others refuse: use :func:`fedsift.flower.client_app`.

    Parameters
    ----------
    algorithm
        The algorithm of the server, or a function that makes it from the app's run config.
    buffers
        What happens to running statistics, as in the server's strategy: ``"average"`` or
        ``"local"``.
    state_dir
        Folder for the client's state between rounds; by default ``fedsift`` in Flower's folder.

    """
    require_choice("buffers", buffers, BUFFERS)
    return SiftedApp(algorithm, buffers, state_dir)


@dataclass(frozen=True)
class SiftedApp:
    """The mod, with the arguments of :func:`sifted`."""

    algorithm: Algorithm | MakeAlgorithm
    buffers: str
    state_dir: Path | None

    def __call__(
        self, message: Message, context: NodeContext, call_next: ClientAppCallable
    ) -> Message:
        """Answer a message with the app's own function."""
        category = message.metadata.message_type.partition(".")[0]
        if category not in (MessageType.TRAIN, MessageType.EVALUATE):
            return call_next(message, context)
        if RECORD not in message.content.config_records:
            raise ValueError("the mod sifted needs fedsift.flower.FedSift as the server's strategy")
        client, _ = partition_of(context)
        app = OwnFunction(message, context, call_next)

        def work(request: TrainRequest) -> TrainReply:
            round = self.round(request, client, context)
            if round is None:
                return TrainReply(client, "behind")
            return evaluate(round, app) if category == MessageType.EVALUATE else train(round, app)

        reply = replace(answer(message, client, work), evaluates=True)
        return Message(content=reply.to_records(), reply_to=message)

    def round(self, request: TrainRequest, client: int, context: NodeContext) -> ClientRound | None:
        """Return the round on this client; None if the client does not know the model's layout."""
        store = store_of(self.state_dir, request, client)
        layout = request.layout or store.known_layout()
        if layout is None:
            return None
        algorithm = chosen_algorithm(self.algorithm, context)
        check_own_training(algorithm, request.round)
        return ClientRound.of(request, algorithm, layout, self.buffers, client, store)


def train(round: ClientRound, app: OwnFunction) -> TrainReply:
    """Update the client's state, and let the app train if the client is in the cohort."""

    def trained(stored: ClientState) -> TrainReply:
        result, frame = round.upload(stored, lambda job: trained_by_app(round, app, job))
        return TrainReply(round.client, "update", result.loss, frame=frame, metrics=app.metrics)

    return round.train_if_in_cohort(trained)


def evaluate(round: ClientRound, app: OwnFunction) -> TrainReply:
    """Update the client's state, and let the app evaluate the global model."""
    with one_thread():
        stored = round.updated()
    if stored is None:
        return TrainReply(round.client, "behind")
    round.store.save(round.layout, stored)
    values = round.model_values(stored, app.message.content.array_records.get("arrays"))
    app.call(arrays_from_vector(round.layout, values))
    return TrainReply(round.client, "evaluated", metrics=app.metrics)


def trained_by_app(round: ClientRound, app: OwnFunction, job: Job) -> ClientResult:
    """Return the result of a round in which the app's own function trains."""
    request, layout, memory = round.request, round.layout, job.memory[round.client]
    start = job.phase.local_start(job.state.map(lambda x: x[None]), memory)
    values = torch.cat([start.w[0], start.b[0]]) if layout.buffers else start.w[0]
    with round_optimizer(round.method, layout, job.phase, start) as optimizer:
        reply = app.call(arrays_from_vector(layout, values))
        end = optimizer.end(start)
    w, b = layout.split(trained_values(round, reply))
    end = end.replace(w=w[None], **({"b": b[None]} if layout.buffers else {}))
    samples = number_of_samples(app.metrics, request.weight_key)
    weight = weight_of(request.weights, samples, min(request.batch_size or samples, samples))
    loss = next((app.metrics[name] for name in LOSSES if name in app.metrics), float("nan"))
    context = round.context(request.round, job.state, (round.client,))
    with one_thread():
        trained = Trained(end, memory, loss)
        return client_result(job.phase, context, start, trained, float(weight))


def trained_values(round: ClientRound, reply: RecordDict) -> Tensor:
    """Return the values of the model in a reply, which must be its only arrays."""
    records = list(reply.array_records.values())
    if len(records) != 1:
        raise ValueError(f"the train function must reply with one ArrayRecord, got {len(records)}")
    return values_of(round.layout, records[0])


def number_of_samples(metrics: dict[str, float], key: str) -> float:
    """Return the number of samples that the app reports, which is the client's weight.

    >>> number_of_samples({"num-examples": 100.0}, "num-examples")
    100.0
    """
    if not metrics.get(key, 0) > 0:
        raise ValueError(f"the function must reply with a MetricRecord with a positive {key!r}")
    return metrics[key]


@dataclass
class OwnFunction:
    """The app's own function for a message. ``metrics`` are the numbers that it replied with."""

    message: Message
    context: NodeContext
    call_next: ClientAppCallable
    config: ConfigRecord = field(init=False)
    metrics: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.config = self.message.content.config_records.get("config") or ConfigRecord()

    def call(self, arrays: ArrayRecord) -> RecordDict:
        """Call the function with a model, and return the content of its reply."""
        self.message.content = RecordDict({"arrays": arrays, "config": self.config})
        reply = self.call_next(self.message, self.context)
        if reply.has_error():
            raise RuntimeError(reply.error.reason)
        records: list[MetricRecord] = list(reply.content.metric_records.values())
        if len(records) != 1:
            raise ValueError(f"the function must reply with one MetricRecord, got {len(records)}")
        self.metrics = numbers_in(records[0])
        return reply.content
