"""The ClientApp of :func:`client_app`: it trains with the steps of the method.

Flower starts a process per message. This module therefore imports little.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from flwr.app import ConfigRecord, Message, MessageType
from flwr.app import Context as NodeContext
from flwr.clientapp import ClientApp
from torch import nn

from fedsift.adam import AdamStep
from fedsift.algorithms.buffers import BUFFERS
from fedsift.algorithms.method import Algorithm
from fedsift.engine.client import LocalTraining, Trained, local_steps, train_client
from fedsift.engine.contract import Job
from fedsift.errors import require_choice
from fedsift.flower.client_round import (
    ClientRound,
    MakeAlgorithm,
    answer,
    chosen_algorithm,
    client_folder,
    partition_of,
    store_of,
)
from fedsift.flower.own_training import takes_adam_steps
from fedsift.flower.protocol import RefusedRequest, TrainReply, TrainRequest
from fedsift.flower.store import ClientState
from fedsift.privacy.secure.settings import SecureSettings, settings_from
from fedsift.task import (
    Loss,
    RemoteClients,
    Task,
    Transform,
    check_model,
    check_task,
    statistics_of,
)
from fedsift.task.samples import DatasetItems, as_data, size_of
from fedsift.task.synthetic import sample_shapes_of
from fedsift.task.threads import one_thread
from fedsift.vector import Layout, State

Train = Callable[[nn.Module, torch.optim.Optimizer, Any, ConfigRecord], float]
"""Your own training loop: (model, optimizer, data, config) -> mean loss. The data is a pair (x, y)
of tensors, or your Dataset. The optimizer is a
:class:`fedsift.Adam` that holds the global moments. The config is the server's ``train_config`` and
the round, as ``server-round``."""
LoadData = Callable[[int, int], Any]
"""Returns a client's data, given the node's ``partition-id`` and ``num-partitions``."""


def client_app(
    make_model: Callable[[], nn.Module],
    load_data: LoadData,
    algorithm: Algorithm | MakeAlgorithm,
    *,
    train: Train | None = None,
    loss: Loss = nn.functional.cross_entropy,
    transform: Transform | None = None,
    buffers: str = "average",
    load_test: LoadData | None = None,
    secure: bool | SecureSettings = False,
    state_dir: Path | None = None,
) -> ClientApp:
    """Return a Flower ClientApp that trains with a fedsift algorithm.

    An app that has train and evaluate functions of its own needs :func:`fedsift.flower.sifted`
    instead.

    Parameters
    ----------
    make_model
        Returns the model. Its parameters are replaced by the server's.
    load_data
        Returns the client's data, given the node's ``partition-id`` and ``num-partitions``: a pair
        (x, y) of tensors, NumPy arrays, or nested dicts and tuples of them, or a torch ``Dataset``.
    algorithm
        The algorithm of the server, or a function that makes it from the app's run config.
    train
        Your own training loop. By default the algorithm's local steps are taken.
    loss
        Returns a scalar, given the model's output and y.
    transform
        Applied to the inputs of each training batch; not used by ``train``.
    buffers
        What happens to running statistics, as in the server's :class:`FedSift`.
    load_test
        Returns the client's test data, like ``load_data``. The client reports the global model's
        ``accuracy`` and ``loss`` on it. By default, clients do not evaluate.
    secure
        Aggregate securely, as the server's :class:`FedSift` does: the client sends what is summed
        only masked, whatever the server asks for.
    state_dir
        Folder for the client's state between rounds; by default ``fedsift`` in Flower's folder.

    """
    require_choice("buffers", buffers, BUFFERS)
    trainer = ClientTrainer(
        make_model, load_data, algorithm, train, loss, transform, buffers, load_test,
        settings_from(secure), state_dir,
    )  # fmt: skip
    app = ClientApp()

    def handle(message: Message, context: NodeContext) -> Message:
        reply = trainer.reply_to(message, context)
        return Message(content=reply.to_records(), reply_to=message)

    app.train()(handle)
    if load_test is not None:
        app.evaluate()(handle)
    if trainer.secure:
        app.query()(trainer.answer_query)
    return app


@dataclass(frozen=True)
class ClientTrainer:
    """Answers requests, with the arguments of :func:`client_app`."""

    make_model: Callable[[], nn.Module]
    load_data: LoadData
    algorithm: Algorithm | MakeAlgorithm
    train: Train | None
    loss: Loss
    transform: Transform | None
    buffers: str
    load_test: LoadData | None
    secure: SecureSettings | None
    state_dir: Path | None

    def reply_to(self, message: Message, context: NodeContext) -> TrainReply:
        """Return the reply to a message; if training or evaluating fails, the reason."""
        client, clients = partition_of(context)

        def work(request: TrainRequest) -> TrainReply:
            round, task = self.prepare(request, context, client, clients)
            if message.metadata.message_type == MessageType.EVALUATE:
                return self.evaluate_round(round, task, message)
            return self.train_round(round, task, message)

        with one_thread():
            reply = answer(message, client, work)
        return replace(reply, evaluates=self.load_test is not None)

    def prepare(
        self, request: TrainRequest, context: NodeContext, client: int, clients: int
    ) -> tuple[ClientRound, Task]:
        """Return the round on this client, and the task without its data."""
        algorithm = chosen_algorithm(self.algorithm, context)
        model = self.make_model()
        check_model(model)
        is_frozen = self.buffers == "frozen"
        layout = Layout.of(model).with_buffers(model, () if is_frozen else statistics_of(model))
        task = Task(
            model, self.loss, RemoteClients(clients, {}), None, request.batch_size or None,
            request.seed, layout, self.transform, is_frozen=is_frozen,
        )  # fmt: skip
        if algorithm.makes_samples:
            local = with_data(task, client, self.load_data).clients[client]
            shapes = sample_shapes_of(replace(task, clients=[local]))
            layout = layout.with_sample_shapes(shapes)
        store = store_of(self.state_dir, request, client)
        round = ClientRound.of(request, algorithm, layout, self.buffers, client, store)
        task = replace(task, layout=round.layout)
        return replace(round, gradient=task.gradient, secure=self.secure), task

    def answer_query(self, message: Message, context: NodeContext) -> Message:
        """Return the reply to a query of secure aggregation."""
        from fedsift.flower.secure_client import SecureQuery, SecureReply, answer_query

        client, _ = partition_of(context)
        try:
            query = SecureQuery.from_records(message.content)
            folder = client_folder(self.state_dir, query.run, client)
            assert self.secure is not None
            reply = answer_query(query, client, folder, self.secure)
        except RefusedRequest as problem:
            reply = SecureReply(client, reason=str(problem))
        return Message(content=reply.to_records(), reply_to=message)

    def train_round(self, round: ClientRound, task: Task, message: Message) -> TrainReply:
        """Update the client's state, train if it is in the cohort, and store the new state."""
        client = round.client
        config = message.content.config_records.get("config") or ConfigRecord()
        round, steps = replace(round, config=config), self.local_steps(round, config)

        def train(stored: ClientState) -> TrainReply:
            own = with_data(task, client, self.load_data)
            if self.train is None:
                check_other_buffers(replace(own, clients=[own.clients[client]]))
            result, frame = round.upload(stored, lambda job: train_client(own, job, client, steps))
            metrics = {round.request.weight_key: size_of(own.clients[client])}
            return TrainReply(client, "update", result.loss, frame=frame, metrics=metrics)

        return round.train_if_in_cohort(train)

    def evaluate_round(self, round: ClientRound, task: Task, message: Message) -> TrainReply:
        """Update the client's state, and measure the global model on the client's test data."""
        from fedsift.engine.reference import Reference

        stored = round.updated()
        if stored is None:
            return TrainReply(round.client, "behind")
        round.store.save(round.layout, stored)
        assert self.load_test is not None
        task = with_data(task, round.client, self.load_test)
        test = task.clients[round.client]
        values = round.model_values(stored, message.content.array_records.get("arrays"))
        accuracy, loss = Reference(replace(task, test=test)).evaluate(values)
        metrics = {"accuracy": accuracy, "loss": loss, round.request.weight_key: size_of(test)}
        known = {name: float(x) for name, x in metrics.items() if x is not None}
        return TrainReply(round.client, "evaluated", metrics=known)

    def local_steps(self, round: ClientRound, config: ConfigRecord) -> LocalTraining:
        """Return the function that trains: the algorithm's steps, or the user's own loop."""
        if self.train is None:
            return local_steps
        number = round.request.round
        if not takes_adam_steps(round.method.phase(number)):
            raise ValueError(
                f"{round.method.name} does not take the paper's Adam steps in round {number}, "
                "which custom training loops need: remove train="
            )
        return partial(custom_steps, self.train, config)


def with_data(task: Task, client: int, load: LoadData) -> Task:
    """Return a task with a client's data, as the user's function loads it."""
    clients = len(task.clients)
    local = as_data("the client", load(client, clients), "cpu", task.layout.dtype)
    return replace(task, clients=RemoteClients(clients, {client: local}))


def check_other_buffers(task: Task) -> None:
    """Refuse a model in which training changes other buffers than running statistics."""
    known = task.layout.buffers.names if task.layout.buffers else statistics_of(task.model)
    if all(name in known for name, _ in task.model.named_buffers()):
        return
    for name in check_task(task, needs_gradient=False):
        if name not in known:
            raise ValueError(
                f"training changes the buffer {name!r}: on Flower, only running statistics of "
                "normalization layers can be trained"
            )


def custom_steps(
    train: Train, config: ConfigRecord, task: Task, job: Job, client: int, x: State
) -> Trained:
    """Train with the user's loop, whose optimizer updates W, M and V."""
    from fedsift.optim import Adam

    assert isinstance(job.phase.step, AdamStep)
    values = torch.cat([x.w[0], x.b[0]]) if task.layout.buffers else x.w[0]
    task.layout.write(values, task.model)
    task.train_mode(task.model)
    parameters = (p for p in task.model.parameters() if p.requires_grad)
    optimizer = Adam(parameters, **asdict(job.phase.step))
    optimizer.load_moments(x.m[0], x.v[0])
    data = task.clients[client]
    given = data.dataset if isinstance(data, DatasetItems) else data
    loss = train(task.model, optimizer, given, config)
    m, v = optimizer.moments()
    w, b = task.layout.split(task.layout.read(task.model))
    end = x.replace(w=w, m=m, v=v, **({"b": b} if task.layout.buffers else {}))
    trained = end.map(lambda t: t[None].to(x.w) if t.dim() == 1 else t)
    return Trained(trained, job.memory[client], float(loss))
