"""A request on a client: its state, its memory and its upload, whoever trains the model."""

from __future__ import annotations

import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import reduce
from logging import ERROR, WARNING
from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.app import Context as NodeContext
from flwr.supercore import log
from torch import Tensor

from fedsift.algorithms.buffers import client_values, with_buffers
from fedsift.algorithms.method import (
    Algorithm,
    Context,
    LossGradient,
    Memory,
    no_gradient,
    zero_memory,
)
from fedsift.codec.errors import FrameError
from fedsift.codec.frame import Spec, decode, encode, parse_frame, state_hash
from fedsift.codec.limits import Limits
from fedsift.engine.contract import ClientResult, Job
from fedsift.federation.round import apply_broadcast, run_id
from fedsift.federation.snapshot import state_from
from fedsift.flower.arrays import values_of
from fedsift.flower.deployment import METADATA_BYTES
from fedsift.flower.protocol import RefusedRequest, TrainReply, TrainRequest, printable
from fedsift.flower.store import NO_RECEIPT, ClientState, ClientStore, receipt_of
from fedsift.privacy.secure.settings import SecureSettings, check_can_be_secure
from fedsift.task.threads import one_thread
from fedsift.vector import Layout, State

AppConfig = dict[str, bool | float | int | str]
"""The run config of a Flower app."""
MakeAlgorithm = Callable[[AppConfig], Algorithm]


@dataclass(frozen=True)
class ClientRound:
    """A request on a client, with the method and the layout of the client's model.

    ``algorithm`` is the method with the model's buffers. ``gradient`` computes the gradient of the
    loss, if the model is known. ``config`` is the server's for the user's training loop.
    """

    request: TrainRequest
    method: Algorithm
    algorithm: Algorithm
    layout: Layout
    client: int
    store: ClientStore
    gradient: LossGradient = no_gradient
    secure: SecureSettings | None = None
    config: ConfigRecord = field(default_factory=ConfigRecord)

    @classmethod
    def of(
        cls,
        request: TrainRequest,
        method: Algorithm,
        layout: Layout,
        buffers: str,
        client: int,
        store: ClientStore,
    ) -> ClientRound:
        """Check that a request matches the client's algorithm and model."""
        algorithm = with_buffers(method, layout, buffers)
        layout = algorithm.layout_for(layout)
        check_request(request, algorithm, layout)
        return cls(request, method, algorithm, layout, client, store)

    def train_if_in_cohort(self, train: Callable[[ClientState], TrainReply]) -> TrainReply:
        """Update the client's state, let it train if it is in the cohort, and return its reply."""
        with one_thread():
            stored = self.updated()
        if stored is None:
            return TrainReply(self.client, "behind")
        if self.client not in self.request.cohort:
            self.store.save(self.layout, stored)
            return TrainReply(self.client, "absent")
        return train(stored)

    def updated(self) -> ClientState | None:
        """Return what is stored with the request's global state; None if its delta does not fit."""
        stored = self.store.load(self.layout)
        state = self.updated_state(stored.state)
        return None if state is None else replace(stored, state=state)

    def updated_state(self, stored: State | None) -> State | None:
        """Return the global state of the request; None if its delta does not lead to it."""
        request = self.request
        if request.kind == "full":
            limits = self.limits(bytes(8), request.round - 1)
            full = decode(request.frame, self.layout, limits)
            state = state_from(full, self.layout, self.algorithm.state)
            if state_hash(state) != request.state:
                raise FrameError("the received state does not have the announced hash")
            return state
        if stored is None or state_hash(stored) == request.state:
            return stored  # the same request may be delivered twice
        try:
            state = reduce(self.state_after, request.deltas, stored)
        except FrameError:
            return None
        if state_hash(state) != request.state:
            log(WARNING, "this machine computes other bits than the server")
            return None
        return state

    def state_after(self, state: State, frame: bytes) -> State:
        """Return the state after the broadcast in a frame."""
        delta = decode(frame, self.layout, self.limits(state_hash(state)))
        header, _ = parse_frame(frame)
        context = self.context(header.round, state)
        return apply_broadcast(self.algorithm, context, state, delta.parts)[0]

    def limits(self, base: bytes, round: int | None = None) -> Limits:
        """Return what a frame of the server must satisfy."""
        run, name = self.request.run, self.algorithm.name
        return Limits(run=run, base=base, round=round, algorithm=name, max_abs=float("inf"))

    def context(self, round: int, state: State, clients: tuple[int, ...] = ()) -> Context:
        """Return the context of a round that starts from the given state."""
        return Context(self.layout, round, self.request.seed, clients, state, self.gradient)

    def memory(self, stored: ClientState) -> Memory:
        """Return the client's memory after its last merged upload; zeros before the first."""
        assert stored.state is not None
        receipt = self.receipt
        if receipt in stored.memories:
            return stored.memories[receipt]
        if receipt != NO_RECEIPT:
            log(WARNING, "the memory after the last merged upload is lost: starting from zeros")
        return zero_memory(self.algorithm.client_memory, self.layout, stored.state.w)

    def model_values(self, stored: ClientState, arrays: ArrayRecord | None) -> Tensor:
        """Return the global model as this client uses it: its parameters, then its buffers.

        ``arrays`` hold the model if the method's is not the global W.
        """
        state = stored.state
        assert state is not None
        values = torch.cat([state.w, state.b]) if self.layout.buffers else state.w
        values = values if arrays is None else values_of(self.layout, arrays)
        has_trained = self.receipt != NO_RECEIPT
        memory = stored.memories.get(self.receipt) if has_trained else None
        return client_values(self.layout, state, values, memory)

    @property
    def receipt(self) -> bytes:
        """The receipt of the client's last merged upload."""
        receipts = dict(zip(self.request.cohort, self.request.receipts, strict=False))
        return receipts.get(self.client, NO_RECEIPT)

    def upload(
        self, stored: ClientState, train: Callable[[Job], ClientResult]
    ) -> tuple[ClientResult, bytes]:
        """Train and store what the next round needs; return the result, and its frame to send."""
        assert stored.state is not None
        request, memory = self.request, self.memory(stored)
        phase = self.algorithm.phase(request.round)
        memories = {self.client: memory}
        job = Job(request.round, phase, stored.state, (self.client,), memories, request.weights)
        result = train(job)
        if self.secure:
            result = self.without_summed(result, job)
        frame = encode(result.update, self.spec)
        latest = {self.receipt: memory, receipt_of(frame): result.memory}
        self.store.save(self.layout, stored.with_memories(latest, request.memories))
        return result, frame

    def without_summed(self, result: ClientResult, job: Job) -> ClientResult:
        """Store the values of which the server gets the sum, and return the rest of the result.

        The loss stays here, too.
        """
        from fedsift.flower.secure_client import basis_of, without_summed

        check_can_be_secure(self.method)
        if any("b" in part.values for part in result.update.parts):
            raise RefusedRequest(
                'buffers="average" sends running statistics in the clear: with secure aggregation, '
                'choose buffers="local" or "frozen"'
            )
        result = replace(result, loss=math.nan)
        if not (roles := job.phase.summed):  # in a round in which the method sends no values
            return result
        basis = basis_of(job.state, self.config)
        return without_summed(result, roles, job.round, basis, self.store.folder)

    @property
    def spec(self) -> Spec:
        """The header fields of the client's frame."""
        request, name = self.request, self.algorithm.name
        return Spec(self.layout, name, request.round, self.client, request.run, request.state)


def answer(message: Message, client: int, work: Callable[[TrainRequest], TrainReply]) -> TrainReply:
    """Return the reply that some work makes of a request within its time, or why there is none."""
    try:
        request = TrainRequest.from_records(message.content)
        with deadline(request.seconds):
            return work(request)
    except (RefusedRequest, FrameError) as problem:  # the server's fault: no traceback
        log(ERROR, "client %s refused the server's request: %s", client, problem)
        return TrainReply(client, "failed", reason=str(problem))
    except Exception as problem:
        log(ERROR, "client %s failed", client, exc_info=problem)
        return TrainReply(client, "failed", reason=f"{type(problem).__name__}: {problem}")


def chosen_algorithm(algorithm: Algorithm | MakeAlgorithm, context: NodeContext) -> Algorithm:
    """Return the algorithm, made from the app's run config if it is given as a function."""
    return algorithm if isinstance(algorithm, Algorithm) else algorithm(context.run_config)


def store_of(folder: Path | None, request: TrainRequest, client: int) -> ClientStore:
    """Return a client's file for a run: in a folder, or in ``fedsift`` in Flower's folder."""
    return ClientStore(client_folder(folder, request.run, client))


def client_folder(folder: Path | None, run: bytes, client: int) -> Path:
    """Return a client's folder for a run."""
    flower = Path(os.environ.get("FLWR_HOME", Path.home() / ".flwr"))
    return (folder or flower / "fedsift") / run.hex() / f"client-{client}"


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


def check_request(request: TrainRequest, algorithm: Algorithm, layout: Layout) -> None:
    """Refuse a request that does not match the client's algorithm and model."""
    if request.algorithm != repr(algorithm):
        here, there = differing_settings(repr(algorithm), printable(request.algorithm))
        raise RefusedRequest(
            f"the server runs {there}, this client {here}: use the same algorithm and settings on "
            "both sides"
        )
    seed, batch_size = request.seed, request.batch_size or None
    if request.run != run_id(layout, algorithm, seed, batch_size, request.weights):
        raise RefusedRequest(
            "the server's model has different parameters than this client's, another setting "
            "buffers, or another input_shape: pass fedsift.flower.arrays_of(model) to the server"
        )
    if len(request.frame) > max_frame_bytes(algorithm, layout):
        size = len(request.frame)
        raise RefusedRequest(f"the server's frame of {size} bytes is too large for this model")


def differing_settings(here: str, there: str) -> tuple[str, str]:
    """Return two algorithms as text, with only those settings that differ.

    >>> differing_settings("sift(lr=0.001, density=0.1)", "sift(lr=0.001, density=0.2)")
    ('sift(density=0.1)', 'sift(density=0.2)')
    """
    (name, _, settings), (other, _, others) = here.partition("("), there.partition("(")
    if name != other:
        return name, other
    own, theirs = settings.removesuffix(")").split(", "), others.removesuffix(")").split(", ")
    return (
        f"{name}({', '.join(x for x in own if x not in theirs)})",
        f"{name}({', '.join(x for x in theirs if x not in own)})",
    )


def max_frame_bytes(algorithm: Algorithm, layout: Layout) -> int:
    """Return an upper bound for a correct server's frame: twice its values in float64."""
    others = [name for name, _ in layout.lengths if name not in algorithm.state]
    num_values = sum(layout.length(name) for name in (*algorithm.state, *others))
    return 2 * 8 * num_values + METADATA_BYTES


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
