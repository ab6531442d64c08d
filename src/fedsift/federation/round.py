"""One round of a federation: the only place where its order is written.

cohort → local training → frame → checks → weighted mean → broadcast → new global state.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fedsift.algorithms.method import Algorithm, Context, Memory, Phase, required, zeros
from fedsift.codec.errors import FrameError, NotFiniteError
from fedsift.codec.frame import Spec, decode, encoded_size, state_hash
from fedsift.codec.limits import Limits
from fedsift.codec.update import ROLES, Parts, Sum, Update, add_parts, dense, moments
from fedsift.codec.wire import Wire, counted
from fedsift.engine.contract import ClientResult, Engine, Job, Missing, Received, Results
from fedsift.errors import Diverged, TooFewClients
from fedsift.federation.memories import LITTLE, LITTLE_FOR_ALL, Held, Memories, Remembered
from fedsift.seeding import stream
from fedsift.task import (
    Task,
    all_finite,
)
from fedsift.vector import Layout, Moments

MOST_SAMPLES = 1_000_000
"""The most samples that a client elsewhere may say it has, where that is its weight in the mean."""


@dataclass(frozen=True)
class Traffic:
    """What was sent so far: a client's mean totals."""

    uplink_bits_paper: float = 0.0
    uplink_bytes: float = 0.0
    downlink_bytes: float = 0.0


@dataclass(frozen=True)
class Snapshot:
    """Everything that a round changes; a checkpoint holds it, and a round makes the next one."""

    round: int
    state: Moments
    server_memory: Memory
    client_memory: Memories
    traffic: Traffic


@dataclass(frozen=True)
class RoundReport:
    """What a round's record says beside accuracy and traffic.

    ``clients`` counts the updates that were merged, ``rejected`` those that were refused, and
    ``clamped`` the coordinates of V that came out negative and were set to zero. ``problems`` says
    by client why its update is not among the merged.
    """

    clients: int
    rejected: int
    clamped: int
    train_loss: float | None
    problems: Mapping[str, str] = field(default_factory=dict)


OnUpload = Callable[[Sequence[Spec], Update, Sequence[int]], None]
"""Called with uploads that are merged: where they belong, what they hold, and their bytes."""


def unwatched(specs: Sequence[Spec], update: Update, sizes: Sequence[int]) -> None:
    """Take no note of uploads."""


@dataclass(frozen=True)
class Federation:
    """A task, a method, and who takes part: all that stays the same from round to round."""

    task: Task
    algorithm: Algorithm
    engine: Engine
    participation: float = 1.0
    dropout: float = 0.0
    min_clients: int = 0
    wire: Wire = counted
    on_upload: OnUpload = unwatched
    most_samples: int = MOST_SAMPLES

    def first(self) -> Snapshot:
        """Before round 1: the model's own parameters, which every client is sent."""
        return self.first_from(self.task.layout.read(self.task.model))

    def first_from(self, w: Tensor) -> Snapshot:
        """Before round 1, with these weights."""
        state = Moments.start(w)
        _, size = self.wire(whole(state), self.spec(0, bytes(8)), Limits(max_abs=float("inf")))
        memory = zeros(self.algorithm.server_memory, 1, w)
        return Snapshot(0, state, memory, Held(), Traffic(downlink_bytes=size))

    def model(self, snapshot: Snapshot) -> Tensor:
        """The weights that a snapshot's model has."""
        return self.algorithm.model(snapshot.state, snapshot.server_memory)

    def play(self, before: Snapshot) -> tuple[Snapshot, RoundReport]:
        """One round: the snapshot after it, and what happened in it."""
        round = before.round + 1
        phase = self.algorithm.phase(round)
        cohort = self.cohort(round)
        absent = self.dropped(round, cohort)
        job = Job(round, phase, before.state, cohort, self.memories(before, cohort))
        inbox = self.open_inbox(job, before.client_memory)
        for reply in self.engine.train(job):
            if isinstance(reply, Results):
                inbox.take_all(reply.without(absent))
            elif reply.client not in absent:
                inbox.take(reply)
        if inbox.received < self.min_clients:
            raise TooFewClients(
                f"round {round} has {inbox.received} of at least {self.min_clients} updates: "
                f"{len(absent)} were lost, {inbox.rejected} rejected "
                f"({inbox.told() or 'no problem known'})"
            )
        kept = before.client_memory.replaced(inbox.memory)
        after = replace(before, round=round, client_memory=kept)
        down, clamped = 0, 0
        if inbox.received:
            after, down, clamped = self.merge(after, phase, inbox.total.mean())
        traffic = self.count(before.traffic, phase, inbox, down)
        happened = RoundReport(inbox.received, inbox.rejected, clamped, inbox.loss, inbox.problems)
        return replace(after, traffic=traffic), happened

    def merge(self, snapshot: Snapshot, phase: Phase, mean: Moments) -> tuple[Snapshot, int, int]:
        """The server's half: compress the mean, send it down, apply what was sent.

        ``snapshot`` has this round's number already. Gives the new one, the bytes of the broadcast,
        and how many coordinates of V had to be lifted to zero.
        """
        context = Context(self.task.layout, snapshot.round, self.task.seed, ())
        try:
            sent_down = phase.broadcast(context, mean, snapshot.server_memory)
        except NotFiniteError:
            raise Diverged("the mean update left the finite numbers") from None
        parts, memory = required(sent_down, snapshot.server_memory, "broadcast")
        base = self.base_of(snapshot.state)
        limits = Limits(base=base, round=snapshot.round, max_abs=float("inf"))
        sent = Update(parts, (1.0,))
        received, size = self.wire(sent, self.spec(snapshot.round, base), limits)
        state, clamped = apply_broadcast(phase, snapshot.state, received.parts)
        if not all_finite(*state):
            raise Diverged("the global state left the finite numbers")
        return replace(snapshot, state=state, server_memory=memory), size, clamped

    def open_inbox(self, job: Job, memories: Memories) -> Inbox:
        """Where the round's uploads arrive."""
        base = self.base_of(job.state)
        limits, spec = self.limits(job, base), self.spec(job.round, base)
        return Inbox(self, spec, limits, Sum(job.state), memories)

    def limits(self, job: Job, base: bytes) -> Limits:
        """What every upload of a round must be like."""
        return Limits(run=self.run_id, base=base, round=job.round, algorithm=self.algorithm.name)

    def opened(self, reply: Received, limits: Limits) -> Update:
        """What a client elsewhere has sent, or a :class:`FrameError`."""
        most = self.task.batch_size or self.most_samples
        limits = replace(limits, client=reply.client, min_weight=1, max_weight=most)
        return decode(reply.frame, self.task.layout, limits)

    def base_of(self, state: Moments) -> bytes:
        """The base state's hash; zeros where no frame is built, to save the time."""
        return bytes(8) if self.wire is counted else state_hash(state)

    def spec(self, round: int, base: bytes) -> Spec:
        """The header of this round's frames."""
        return Spec(self.task.layout, self.algorithm.name, round, run=self.run_id, base=base)

    @cached_property
    def run_id(self) -> bytes:
        """Eight bytes that frames of another federation do not have."""
        return run_id(self.task.layout, self.algorithm, self.task.seed, self.task.batch_size)

    def cohort(self, round: int) -> tuple[int, ...]:
        """The clients that train in this round, in ascending order."""
        clients = len(self.task.clients)
        size = cohort_size(self.participation, clients)
        if size == clients:
            return tuple(range(clients))
        draw = stream(self.task.seed, "cohort", round)
        return tuple(sorted(int(n) for n in draw.choice(clients, size, replace=False)))

    def dropped(self, round: int, cohort: tuple[int, ...]) -> frozenset[int]:
        """The cohort's members that train and are then never heard of."""
        draw = stream(self.task.seed, "dropout", round).random(len(cohort))
        return frozenset(n for n, x in zip(cohort, draw, strict=True) if x < self.dropout)

    def memories(self, snapshot: Snapshot, cohort: tuple[int, ...]) -> Mapping[int, Memory]:
        """What each member kept from its last round; zeros at first."""
        names = self.algorithm.client_memory
        return Remembered(snapshot.client_memory, cohort, names, snapshot.state.w)

    @property
    def has_much_memory(self) -> bool:
        """Whether what the clients keep belongs on the disk."""
        clients, layout = len(self.task.clients), self.task.layout
        each = len(self.algorithm.client_memory) * layout.d * layout.dtype.itemsize
        is_all = cohort_size(self.participation, clients) == clients
        return clients * each > (LITTLE_FOR_ALL if is_all else LITTLE)

    def count(self, before: Traffic, phase: Phase, inbox: Inbox, down: int) -> Traffic:
        """Add this round's traffic: uploads as a mean over all clients, the broadcast to each."""
        clients = len(self.task.clients)
        bits = phase.paper_bits(self.task.layout.d) * inbox.sent / clients
        return Traffic(
            before.uplink_bits_paper + bits,
            before.uplink_bytes + inbox.size / clients,
            before.downlink_bytes + down,
        )


class Inbox:
    """Takes a round's uploads one by one: checks, counts, adds, and forgets each."""

    def __init__(
        self, federation: Federation, spec: Spec, limits: Limits, total: Sum, memories: Memories
    ) -> None:
        self.federation, self.spec, self.limits, self.total = federation, spec, limits, total
        self.memories = memories
        self.memory: dict[int, Any] = {}
        self.problems: dict[str, str] = {}
        self.losses: list[float] = []
        self.received = self.rejected = self.size = 0

    @property
    def loss(self) -> float | None:
        """The mean of the losses that merged clients tell of, as far as they are numbers."""
        numbers = [loss for loss in self.losses if math.isfinite(loss)]
        return sum(loss / len(numbers) for loss in numbers) if numbers else None

    @property
    def sent(self) -> int:
        """Uploads that were sent, merged or not."""
        return self.received + self.rejected

    def told(self) -> str:
        """Every problem in one line."""
        return "; ".join(f"client {client}: {why}" for client, why in self.problems.items())

    def take(self, reply: ClientResult | Received | Missing) -> None:
        """Merge one client's upload, or refuse it."""
        if isinstance(reply, Missing):
            self.problems[str(reply.client)] = reply.reason
            return
        spec = replace(self.spec, client=reply.client)
        try:
            update, size = self._carry(reply, spec)
        except FrameError as problem:
            self.rejected += 1
            self.size += self._size(reply, spec)  # it was sent, if in vain
            self.problems[str(reply.client)] = str(problem)
            return
        memory = {reply.client: reply.memory}
        self._merge([spec], update, [size], [reply.loss], memory)

    def take_all(self, replies: Results) -> None:
        """Merge the uploads of clients that trained together."""
        if self.federation.wire is not counted:
            for reply in replies:
                self.take(reply)
        elif replies.clients:
            specs = [replace(self.spec, client=n) for n in replies.clients]
            memory = {each.client: each.memory for each in replies} if replies.memory else {}
            self._merge(specs, replies.update, replies.sizes, replies.losses, memory)

    def _merge(
        self,
        specs: Sequence[Spec],
        update: Update,
        sizes: Sequence[int],
        losses: Sequence[float],
        memory: Mapping[int, Memory],
    ) -> None:
        self.received += len(specs)
        self.size += sum(sizes)
        self.losses += losses
        self.total.add(update)
        self.federation.on_upload(specs, update, sizes)
        if self.federation.algorithm.client_memory:
            self.memory.update((n, self.memories.keep(kept)) for n, kept in memory.items())

    def _carry(self, reply: ClientResult | Received, spec: Spec) -> tuple[Update, int]:
        federation = self.federation
        if isinstance(reply, Received):
            return federation.opened(reply, self.limits), len(reply.frame)
        if reply.size is not None and federation.wire is counted:
            return reply.update, reply.size
        weight = float(federation.task.weight(reply.client))
        limits = replace(self.limits, client=reply.client, weight=weight)
        return federation.wire(reply.update, spec, limits)

    def _size(self, reply: ClientResult | Received, spec: Spec) -> int:
        if isinstance(reply, Received):
            return len(reply.frame)
        return encoded_size(reply.update, spec)


def run_id(layout: Layout, algorithm: Algorithm, seed: int, batch_size: int | None) -> bytes:
    """Eight bytes that two parties share only if they train the same thing in the same way."""
    about = (layout.fingerprint(), repr(algorithm), seed, batch_size)
    return hashlib.blake2b(repr(about).encode(), digest_size=8).digest()


def whole(state: Moments) -> Update:
    """A state as what is sent to a party that holds none; moments that are all zero stay behind.

    >>> [part.values.keys() for part in whole(Moments.start(torch.ones(2))).parts]
    [dict_keys(['w'])]
    """
    roles = {role: x[None] for role, x in moments(state).items() if role == "w" or bool(x.any())}
    return Update(dense(roles), (1.0,))


def state_of(update: Update, layout: Layout) -> Moments:
    """The state that :func:`whole` was made of, to the sign of its zeros."""
    if any(part.indices is not None for part in update.parts):
        raise FrameError("a whole state leaves no coordinate out")
    found = {role: coded.restore()[0] for p in update.parts for role, coded in p.values.items()}
    zero = torch.zeros(layout.d, dtype=layout.dtype)
    return Moments(*(found.get(role, zero).to(layout.dtype, copy=True) for role in ROLES))


def apply_broadcast(phase: Phase, state: Moments, parts: Parts) -> tuple[Moments, int]:
    """The state after a broadcast, and how many coordinates of V had to be lifted to zero.

    Server and clients both do this, with the same bytes.
    """
    received = Sum(state).total
    add_parts(received, parts)
    after = phase.apply(state, received)
    clamped = int((after.v < 0).sum())
    return after._replace(v=after.v.clamp_min(0)), clamped


def cohort_size(participation: float, clients: int) -> int:
    """How many clients train in a round: the nearest whole number, at least 1, halves upward.

    >>> cohort_size(0.5, 5), cohort_size(0.01, 5)
    (3, 1)
    """
    return max(1, int(participation * clients + 0.5))


def check_cohort(clients: int, participation: float, min_clients: int) -> None:
    """Raise ValueError unless so many clients can take part, and so few be enough.

    >>> check_cohort(clients=5, participation=0.5, min_clients=4)
    Traceback (most recent call last):
    ...
    ValueError: min_clients must be from 0 to the cohort's 3, got 4
    """
    if not 0 < participation <= 1:
        raise ValueError(f"participation must be in (0, 1], got {participation}")
    most = cohort_size(participation, clients)
    if not 0 <= min_clients <= most:
        raise ValueError(f"min_clients must be from 0 to the cohort's {most}, got {min_clients}")
