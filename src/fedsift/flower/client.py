"""The ClientApp: update the global state, train, send one frame, store what the next round needs.

Flower starts a process per message. This module therefore imports little, and writes everything
that must outlive the process to disk before the reply is sent.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from logging import ERROR, WARNING
from pathlib import Path
from typing import Any

import torch
from flwr.app import ConfigRecord, Message
from flwr.app import Context as NodeContext
from flwr.clientapp import ClientApp
from flwr.supercore import log
from torch import nn

from fedsift.adam import AdamStep
from fedsift.algorithms.buffers import BUFFERS, with_buffers
from fedsift.algorithms.method import (
    Algorithm,
    Context,
    Memory,
    Phase,
    from_global,
    zero_memory,
)
from fedsift.codec.errors import FrameError
from fedsift.codec.frame import Spec, decode, encode, state_hash
from fedsift.codec.limits import Limits
from fedsift.engine.client import LocalTraining, Trained, local_steps, train_client
from fedsift.engine.contract import Job
from fedsift.errors import require_choice
from fedsift.federation.round import apply_broadcast, run_id
from fedsift.federation.snapshot import state_from
from fedsift.flower.protocol import TrainReply, TrainRequest
from fedsift.flower.store import NO_RECEIPT, ClientState, ClientStore, receipt_of
from fedsift.task import (
    Loss,
    RemoteClients,
    Task,
    Transform,
    check_model,
    check_task,
    statistics_of,
)
from fedsift.task.samples import Data, DatasetItems, as_data, size_of
from fedsift.task.synthetic import sample_shapes_of
from fedsift.task.threads import one_thread
from fedsift.vector import Layout, State

AppConfig = dict[str, bool | float | int | str]
"""The run config of a Flower app."""
MakeAlgorithm = Callable[[AppConfig], Algorithm]
Train = Callable[[nn.Module, torch.optim.Optimizer, Any, ConfigRecord], float]
"""Your own training loop: (model, optimizer, data, config) -> mean loss. The data is a pair (x, y)
of tensors, or your Dataset. The optimizer is a
:class:`fedsift.Adam` that holds the global moments. The config is the server's ``train_config`` and
the round, as ``server-round``."""


def client_app(
    make_model: Callable[[], nn.Module],
    load_data: Callable[[int, int], Any],
    algorithm: Algorithm | MakeAlgorithm,
    *,
    train: Train | None = None,
    loss: Loss = nn.functional.cross_entropy,
    transform: Transform | None = None,
    buffers: str = "average",
    state_dir: Path | None = None,
) -> ClientApp:
    """Return a Flower ClientApp that trains with a fedsift algorithm.

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
    state_dir
        Folder for the client's state between rounds; by default ``fedsift`` in Flower's folder.

    """
    require_choice("buffers", buffers, BUFFERS)
    trainer = ClientTrainer(
        make_model, load_data, algorithm, train, loss, transform, buffers, state_dir
    )
    app = ClientApp()

    @app.train()
    def _(message: Message, context: NodeContext) -> Message:
        reply = trainer.reply_to(message, context)
        return Message(content=reply.to_records(), reply_to=message)

    return app


@dataclass(frozen=True)
class ClientTrainer:
    """Answers train requests, with the arguments of :func:`client_app`."""

    make_model: Callable[[], nn.Module]
    load_data: Callable[[int, int], Any]
    algorithm: Algorithm | MakeAlgorithm
    train: Train | None
    loss: Loss
    transform: Transform | None
    buffers: str
    state_dir: Path | None

    def reply_to(self, message: Message, context: NodeContext) -> TrainReply:
        """Return the reply to a message; if training fails, the reason."""
        request = TrainRequest.from_records(message.content)
        client, clients = partition_of(context)
        config = message.content.config_records["config"]
        try:
            with one_thread(), deadline(request.seconds):
                algorithm = self.make_algorithm(context.run_config)
                steps = self.local_steps(algorithm, request.round, config)
                return self.train_round(request, algorithm, client, clients, steps)
        except Exception as problem:
            log(ERROR, "client %s failed in round %s", client, request.round, exc_info=problem)
            return TrainReply(client, "failed", reason=f"{type(problem).__name__}: {problem}")

    def train_round(
        self,
        request: TrainRequest,
        algorithm: Algorithm,
        client: int,
        clients: int,
        steps: LocalTraining,
    ) -> TrainReply:
        """Update the client's state, train if it is in the cohort, and store the new state."""
        model = self.make_model()
        check_model(model)
        is_frozen = self.buffers == "frozen"
        layout = Layout.of(model).with_buffers(model, () if is_frozen else statistics_of(model))
        algorithm = with_buffers(algorithm, layout, self.buffers)
        task = Task(
            model, self.loss, RemoteClients(clients, {}), None, request.batch_size or None,
            request.seed, layout, self.transform, is_frozen=is_frozen,
        )  # fmt: skip
        if algorithm.makes_samples:
            shapes = sample_shapes_of(replace(task, clients=[self.local_data(task, client)]))
            layout = layout.with_sample_shapes(shapes)
        layout = algorithm.layout_for(layout)
        check_request(request, algorithm, layout)
        task = replace(task, layout=layout)
        store = ClientStore(self.folder() / request.run.hex() / f"client-{client}")
        stored = store.load(layout)
        state = updated_state(request, algorithm, task, stored.state)
        if state is None:
            return TrainReply(client, "behind")
        stored = replace(stored, state=state)
        if client not in request.cohort:
            store.save(layout, stored)
            return TrainReply(client, "absent")
        local = self.local_data(task, client)
        task = replace(task, clients=RemoteClients(clients, {client: local}))
        if self.train is None:
            check_other_buffers(replace(task, clients=[local]))
        loss, frame, stored = train_and_encode(request, algorithm, task, client, stored, steps)
        store.save(layout, stored)
        return TrainReply(client, "update", loss, size_of(local), frame=frame)

    def local_data(self, task: Task, client: int) -> Data:
        """Return a client's data."""
        given = self.load_data(client, len(task.clients))
        return as_data("the client", given, "cpu", task.layout.dtype)

    def make_algorithm(self, config: AppConfig) -> Algorithm:
        """Return the algorithm, made from the app's run config if it is given as a function."""
        return self.algorithm if isinstance(self.algorithm, Algorithm) else self.algorithm(config)

    def folder(self) -> Path:
        """Return the folder of all clients' files."""
        flower = Path(os.environ.get("FLWR_HOME", Path.home() / ".flwr"))
        return self.state_dir or flower / "fedsift"

    def local_steps(self, algorithm: Algorithm, round: int, config: ConfigRecord) -> LocalTraining:
        """Return the function that trains: the algorithm's steps, or the user's own loop."""
        if self.train is None:
            return local_steps
        if not takes_adam_steps(algorithm.phase(round)):
            raise ValueError(
                f"{algorithm.name} does not take the paper's Adam steps in round {round}, which "
                "custom training loops need: remove train="
            )
        return partial(custom_steps, self.train, config)


def partition_of(context: NodeContext) -> tuple[int, int]:
    """Return a node's client number, and the number of clients, from its configuration."""
    try:
        numbers = (context.node_config[key] for key in ("partition-id", "num-partitions"))
        client, clients = map(int, numbers)
    except KeyError:
        raise ValueError(
            "start this SuperNode with --node-config 'partition-id=N num-partitions=M'"
        ) from None
    return client, clients


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


def train_and_encode(
    request: TrainRequest,
    algorithm: Algorithm,
    task: Task,
    client: int,
    stored: ClientState,
    steps: LocalTraining,
) -> tuple[float, bytes, ClientState]:
    """Train one round; return the loss, the frame to send, and the state to store."""
    assert stored.state is not None
    receipts = dict(zip(request.cohort, request.receipts, strict=False))
    receipt = receipts.get(client, NO_RECEIPT)
    memory = memory_after(receipt, algorithm, task.layout, stored)
    phase = algorithm.phase(request.round)
    job = Job(request.round, phase, stored.state, (client,), {client: memory}, request.weights)
    result = train_client(task, job, client, steps)
    spec = Spec(task.layout, algorithm.name, request.round, client, request.run, request.state)
    frame = encode(result.update, spec)
    after = stored.with_memories(
        {receipt: memory, receipt_of(frame): result.memory}, request.memories
    )
    return result.loss, frame, after


def takes_adam_steps(phase: Phase) -> bool:
    """Whether local training is what :class:`fedsift.Adam` does, from the global moments."""
    return isinstance(phase.step, AdamStep) and phase.local_start is from_global


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


def check_request(request: TrainRequest, algorithm: Algorithm, layout: Layout) -> None:
    """Refuse a request that does not match the client's algorithm and model."""
    if request.algorithm != repr(algorithm):
        raise ValueError(
            f"the server runs {request.algorithm}, this client {algorithm!r}: use the same "
            "algorithm and settings on both sides"
        )
    seed, batch_size = request.seed, request.batch_size or None
    if request.run != run_id(layout, algorithm, seed, batch_size, request.weights):
        raise ValueError(
            "the server's model has different parameters than this client's, another setting "
            "buffers, or another input_shape: pass fedsift.flower.arrays_of(model) to the server"
        )


def updated_state(
    request: TrainRequest, algorithm: Algorithm, task: Task, stored: State | None
) -> State | None:
    """Return the global state of a request; None if its delta does not lead to it."""
    name, before, layout = algorithm.name, request.round - 1, task.layout
    limits = Limits(run=request.run, round=before, algorithm=name, max_abs=float("inf"))
    if request.kind == "full":
        full = decode(request.frame, layout, replace(limits, base=bytes(8)))
        state = state_from(full, layout, algorithm.state)
    elif stored is None:
        return None
    elif (base := state_hash(stored)) == request.state:
        return stored  # the same request was delivered twice
    else:
        try:
            delta = decode(request.frame, layout, replace(limits, base=base))
        except FrameError:
            return None
        context = Context.of(task, before, stored)
        state, _ = apply_broadcast(algorithm, context, stored, delta.parts)
        if state_hash(state) != request.state:
            log(
                WARNING,
                "this machine computes other bits than the server",
            )
            return None
    if state_hash(state) != request.state:
        raise FrameError("the received state does not have the hash that the server announced")
    return state


def memory_after(
    receipt: bytes, algorithm: Algorithm, layout: Layout, stored: ClientState
) -> Memory:
    """Return the client's memory after the upload with that receipt; zeros before the first."""
    assert stored.state is not None
    if receipt in stored.memories:
        return stored.memories[receipt]
    if receipt != NO_RECEIPT:
        log(WARNING, "the memory after the last merged upload is lost: starting from zeros")
    return zero_memory(algorithm.client_memory, layout, stored.state.w)


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise TimeoutError after this time, as a client that hangs would block its node forever."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def give_up(signum: int, frame: object) -> None:
        raise TimeoutError(f"training did not finish within the round's {seconds:g} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
