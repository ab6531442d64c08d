"""The ClientApp: catch up with the global state, train, send one frame, remember.

Flower starts a process for each message, so this module imports little, and what must outlive the
process is on disk before the answer leaves.
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

import torch
from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.supercore import log
from torch import nn

from fedsift.adam import AdamStep
from fedsift.algorithms.method import Algorithm, Memory, Phase, from_global, zero_memory
from fedsift.codec.errors import FrameError
from fedsift.codec.frame import Spec, decode, encode, state_hash
from fedsift.codec.limits import Limits
from fedsift.engine.client import LocalSteps, local_steps, one_thread, train_client
from fedsift.engine.contract import Job
from fedsift.federation.round import (
    apply_broadcast,
    run_id,
)
from fedsift.federation.snapshot import (
    state_from,
)
from fedsift.flower.protocol import Answer, Order
from fedsift.flower.store import NO_RECEIPT, Kept, Store, receipt_of
from fedsift.task import Data, Loss, RemoteClients, Task, check_model
from fedsift.vector import Layout, Moments

RunConfig = dict[str, bool | float | int | str]
MakeAlgorithm = Callable[[RunConfig], Algorithm]
Train = Callable[[nn.Module, torch.optim.Optimizer, Data, ConfigRecord], float]
"""A training loop of one's own: model, optimizer, data and the server's train_config to the mean
loss. The optimizer is a :class:`fedsift.Adam` that holds the global moments."""


def client_app(
    make_model: Callable[[], nn.Module],
    load_data: Callable[[int, int], Data],
    algorithm: Algorithm | MakeAlgorithm,
    *,
    train: Train | None = None,
    loss: Loss = nn.functional.cross_entropy,
    state_dir: Path | None = None,
) -> ClientApp:
    """A Flower ClientApp that trains with a fedsift algorithm.

    Parameters
    ----------
    make_model
        Makes the model; its parameters are replaced by the server's.
    load_data
        From the node's ``partition-id`` and ``num-partitions`` to its data, tensors (x, y).
    algorithm
        The server's algorithm, or a function that makes it from the app's run config.
    train
        A training loop of your own; without it, the algorithm's local steps are taken.
    loss
        From the model's output and y to a scalar.
    state_dir
        Where the client's state is kept; a folder ``fedsift`` in Flower's own by default.

    """
    work = Work(make_model, load_data, algorithm, train, loss, state_dir)
    app = ClientApp()

    @app.train()
    def _(message: Message, context: Context) -> Message:
        return Message(content=work.answer(message, context).records(), reply_to=message)

    return app


@dataclass(frozen=True)
class Work:
    """What a client does with an order."""

    make_model: Callable[[], nn.Module]
    load_data: Callable[[int, int], Data]
    algorithm: Algorithm | MakeAlgorithm
    train: Train | None
    loss: Loss
    state_dir: Path | None

    def answer(self, message: Message, context: Context) -> Answer:
        """The client's answer, also where its training fails."""
        order = Order.read(message.content)
        client, clients = place_of(context)
        config = message.content.config_records["config"]
        try:
            with one_thread(), deadline(order.seconds):
                algorithm = self.make_algorithm(context.run_config)
                steps = self.steps(algorithm, order.round, config)
                return self.obey(order, algorithm, client, clients, steps)
        except Exception as problem:
            log(ERROR, "client %s failed in round %s", client, order.round, exc_info=problem)
            return Answer(client, "failed", reason=f"{type(problem).__name__}: {problem}")

    def obey(
        self, order: Order, algorithm: Algorithm, client: int, clients: int, steps: LocalSteps
    ) -> Answer:
        """Catch up, train, keep, send."""
        model = self.make_model()
        check_model(model)
        layout = Layout.of(model)
        check_run(order, algorithm, layout)
        store = Store(self.folder() / order.run.hex() / f"client-{client}")
        kept = store.load(layout)
        state = caught_up(order, algorithm, layout, kept.state)
        if state is None:
            return Answer(client, "behind")
        kept = replace(kept, state=state)
        if client not in order.cohort:
            store.save(layout, kept)
            return Answer(client, "absent")
        here = RemoteClients(clients, {client: self.load_data(client, clients)})
        task = Task(model, self.loss, here, None, order.batch_size or None, order.seed, layout)
        loss, frame, kept = trained(order, algorithm, task, client, kept, steps)
        store.save(layout, kept)
        return Answer(client, "update", loss, len(here[client][0]), frame=frame)

    def make_algorithm(self, config: RunConfig) -> Algorithm:
        """The algorithm, made from the run config where it is a function of it."""
        return self.algorithm if isinstance(self.algorithm, Algorithm) else self.algorithm(config)

    def folder(self) -> Path:
        """Where clients keep their files."""
        flower = Path(os.environ.get("FLWR_HOME", Path.home() / ".flwr"))
        return self.state_dir or flower / "fedsift"

    def steps(self, algorithm: Algorithm, round: int, config: ConfigRecord) -> LocalSteps:
        """How the model is trained: by the algorithm, or by the user's own loop."""
        if self.train is None:
            return local_steps
        if not takes_adam_steps(algorithm.phase(round)):
            raise ValueError(
                f"{algorithm.name} does not take the paper's Adam steps in round {round}: "
                "leave out train="
            )
        return partial(own_steps, self.train, config)


def place_of(context: Context) -> tuple[int, int]:
    """Which client a node is, and of how many."""
    try:
        places = (context.node_config[key] for key in ("partition-id", "num-partitions"))
        client, clients = map(int, places)
    except KeyError:
        raise ValueError(
            "start this SuperNode with --node-config 'partition-id=N num-partitions=M'"
        ) from None
    return client, clients


def trained(
    order: Order, algorithm: Algorithm, task: Task, client: int, kept: Kept, steps: LocalSteps
) -> tuple[float, bytes, Kept]:
    """A round's training: the loss, the frame to send, and what to keep from now on."""
    assert kept.state is not None
    receipt = dict(zip(order.cohort, order.receipts, strict=False)).get(client, NO_RECEIPT)
    memory = memory_after(receipt, algorithm, kept)
    phase = algorithm.phase(order.round)
    job = Job(order.round, phase, kept.state, (client,), {client: memory})
    result = train_client(task, job, client, steps)
    spec = Spec(task.layout, algorithm.name, order.round, client, order.run, order.state)
    frame = encode(result.update, spec)
    memories = {receipt: memory, receipt_of(frame): result.memory}
    return result.loss, frame, replace(kept, memories=memories)


def takes_adam_steps(phase: Phase) -> bool:
    """Whether local training is what :class:`fedsift.Adam` does, from the global moments."""
    return isinstance(phase.step, AdamStep) and phase.local_start is from_global


def own_steps(
    train: Train, config: ConfigRecord, task: Task, job: Job, client: int, x: Moments
) -> tuple[Moments, float]:
    """Local training by the user's loop, which moves W, M and V by a fedsift.Adam."""
    from fedsift.optim import Adam

    assert isinstance(job.phase.step, AdamStep)
    task.layout.write(x.w[0], task.model)
    task.model.train()
    trained = (p for p in task.model.parameters() if p.requires_grad)
    optimizer = Adam(trained, **asdict(job.phase.step))
    optimizer.load_moments(x.m[0], x.v[0])
    loss = train(task.model, optimizer, task.clients[client], config)
    end = Moments(task.layout.read(task.model), *optimizer.moments())
    return Moments(*(t[None].to(x.w) for t in end)), float(loss)


def check_run(order: Order, algorithm: Algorithm, layout: Layout) -> None:
    """Refuse to train something else than the server merges."""
    if order.algorithm != repr(algorithm):
        raise ValueError(f"the server runs {order.algorithm}, this client {algorithm!r}")
    if order.run != run_id(layout, algorithm, order.seed, order.batch_size or None):
        raise ValueError(
            "the server's model has other parameters than this client's: give the server "
            "fedsift.flower.arrays_of(model)"
        )


def caught_up(
    order: Order, algorithm: Algorithm, layout: Layout, held: Moments | None
) -> Moments | None:
    """The global state that the order means; None if a delta does not start from what is held."""
    name, before = algorithm.name, order.round - 1
    limits = Limits(run=order.run, round=before, algorithm=name, max_abs=float("inf"))
    if order.kind == "full":
        state = state_from(decode(order.frame, layout, replace(limits, base=bytes(8))), layout)
    elif held is None:
        return None
    elif (own := state_hash(held)) == order.state:
        return held  # the same order, delivered again
    else:
        try:
            news = decode(order.frame, layout, replace(limits, base=own))
        except FrameError:
            return None
        state, _ = apply_broadcast(algorithm.phase(before), held, news.parts)
    if state_hash(state) != order.state:
        raise FrameError("the state that was received is not the one that was meant")
    return state


def memory_after(receipt: bytes, algorithm: Algorithm, kept: Kept) -> Memory:
    """What the client kept after the upload of that receipt; zeros at first."""
    assert kept.state is not None
    if receipt in kept.memories:
        return kept.memories[receipt]
    if receipt != NO_RECEIPT:
        log(WARNING, "the memory after the last upload is gone: it begins at zero again")
    return zero_memory(algorithm.client_memory, 1, kept.state.w)


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Give up after so many seconds, lest a client that hangs blocks its node for ever."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def give_up(signum: int, frame: object) -> None:
        raise TimeoutError(f"not done within the round's {seconds:g} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
