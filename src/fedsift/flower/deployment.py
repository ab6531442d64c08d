"""A federation whose clients are elsewhere, and the orders that they are sent in a round."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

import torch
from flwr.app import ConfigRecord, Message, MessageType
from torch import Tensor

from fedsift.algorithms.method import Context, LocalUpdate, Memory, Phase, zero_memory
from fedsift.codec.frame import Spec, decode, encode, state_hash
from fedsift.codec.limits import Limits, Shape, shape_of
from fedsift.codec.update import Update
from fedsift.engine.contract import Job
from fedsift.federation.inbox import (
    Inbox,
)
from fedsift.federation.round import (
    Federation,
)
from fedsift.federation.snapshot import (
    Snapshot,
    Traffic,
    full_update,
)
from fedsift.flower.protocol import Kind, Order
from fedsift.flower.store import NO_RECEIPT
from fedsift.vector import Moments, raw_bytes

GRACE_SECONDS = 30.0
"""How much longer than a round its orders live: else Flower answers for a client that is late."""
METADATA_BYTES = 1 << 20
"""Upper bound for everything in a reply but its frame: Flower's records, and a reason."""


@dataclass
class Outbox:
    """The server's :class:`Wire`: encode a broadcast, keep its frame for orders, count bytes."""

    frame: bytes = b""
    base: bytes = b""
    sent: int = 0

    builds_frames: ClassVar[bool] = True

    def send(self, update: Update, spec: Spec, limits: Limits) -> tuple[Update, int]:
        """Return the broadcast as clients decode it, and its bytes."""
        self.frame, self.base = encode(update, spec), spec.base
        return decode(self.frame, spec.layout, limits), len(self.frame)


@dataclass(frozen=True)
class Deployment(Federation):
    """A federation whose clients keep their own memories, and whose traffic is counted as sent."""

    wire: Outbox = field(default_factory=Outbox)

    def initial_snapshot_from(self, w: Tensor) -> Snapshot:
        """Before round 1: nothing was sent yet."""
        return replace(super().initial_snapshot_from(w), traffic=Traffic())

    def upload_limits(self, job: Job, base: bytes) -> Limits:
        """What every upload of a round must be like; strangers' must also have the right shape."""
        return replace(super().upload_limits(job, base), shape=self.expected_shape(job))

    def expected_shape(self, job: Job) -> Shape:
        """What every honest upload of this round looks like, found by sending nothing at all."""
        nothing = Moments.start(torch.zeros_like(job.state.w)[None])
        memory = zero_memory(self.algorithm.client_memory, 1, job.state.w)
        context = Context(self.task.layout, job.round, self.task.seed, (0,))
        parts, _ = job.phase.send(context, LocalUpdate(nothing, nothing), memory)
        return shape_of(Update(parts, (1.0,)))

    def max_reply_bytes(self, job: Job) -> int:
        """Upper bound for an honest reply: twice its values and mask uncompressed, and metadata."""
        layout, shape = self.task.layout, self.expected_shape(job)
        kept = ((layout.d if k is None else k) * len(roles) for roles, k, _ in shape)
        mask = -(-layout.d // 8) * len(shape)
        return 2 * (sum(kept) * layout.dtype.itemsize + mask) + METADATA_BYTES

    def cohort_memory(self, snapshot: Snapshot, cohort: tuple[int, ...]) -> dict[int, Memory]:
        """In place of each member's memory, the receipt of the upload that it dates from."""
        return {n: snapshot.client_memory.get(n, {}) for n in cohort}

    def count_traffic(
        self, before: Traffic, phase: Phase, inbox: Inbox, broadcast_bytes: int
    ) -> Traffic:
        """Add this round's traffic: the orders that were sent, not the broadcast to come."""
        sent, self.wire.sent = self.wire.sent, 0
        down_so_far = before.downlink_bytes + sent / len(self.task.clients)
        return replace(super().count_traffic(before, phase, inbox, 0), downlink_bytes=down_so_far)


@dataclass
class Node:
    """What the server knows of a SuperNode: which client it is, and the state that it holds."""

    client: int | None = None
    held: bytes = b""


@dataclass(frozen=True)
class Orders:
    """One round's orders: what changed to nodes that hold the last state, everything to others."""

    federation: Deployment
    snapshot: Snapshot
    nodes: dict[int, Node]
    seconds: float
    config: ConfigRecord

    @property
    def round(self) -> int:
        """The round that is ordered."""
        return self.snapshot.round + 1

    @cached_property
    def cohort(self) -> tuple[int, ...]:
        """The clients that are to train."""
        return self.federation.cohort(self.round)

    @cached_property
    def state(self) -> bytes:
        """The hash of the state from which the round starts."""
        return state_hash(self.snapshot.state)

    @property
    def max_reply_bytes(self) -> int:
        """The size above which a reply to these orders is refused."""
        phase = self.federation.algorithm.phase(self.round)
        return self.federation.max_reply_bytes(Job(self.round, phase, self.snapshot.state, (), {}))

    @cached_property
    def everything(self) -> bytes:
        """The frame with all of the state."""
        spec = self.federation.frame_spec(self.snapshot.round, bytes(8))
        return encode(full_update(self.snapshot.state), spec)

    def concerns(self, node: int) -> bool:
        """Whether a node is one of the cohort, or may be, as it is not known yet."""
        about = self.nodes.get(node)
        return about is None or about.client is None or about.client in self.cohort

    def message(self, node: int) -> Message:
        """A node's order; its bytes are counted."""
        about = self.nodes.get(node, Node())
        kind, frame = self.news(about)
        self.federation.wire.sent += len(frame)
        records = self.order(about, kind, frame).records(self.config)
        return Message(
            content=records, dst_node_id=node, message_type=MessageType.TRAIN,
            ttl=self.seconds + GRACE_SECONDS, group_id=str(self.round),
        )  # fmt: skip

    def news(self, about: Node) -> tuple[Kind, bytes]:
        """What a node lacks to hold the state."""
        outbox = self.federation.wire
        if about.held == self.state:
            return "none", b""
        if about.held and about.held == outbox.base:
            return "delta", outbox.frame
        return "full", self.everything

    def order(self, about: Node, kind: Kind, frame: bytes) -> Order:
        """The order to that node."""
        federation, task = self.federation, self.federation.task
        cohort = list(self.cohort) if about.client is None else [about.client]
        keeps = bool(federation.algorithm.client_memory)
        return Order(
            round=self.round,
            run=federation.run_id,
            state=self.state,
            kind=kind,
            cohort=cohort,
            receipts=[self.receipt(client) for client in cohort] if keeps else [],
            algorithm=repr(federation.algorithm),
            seed=task.seed,
            batch_size=task.batch_size or 0,
            seconds=self.seconds,
            frame=frame,
        )

    def receipt(self, client: int) -> bytes:
        """The client's last upload that was merged."""
        memory = self.snapshot.client_memory.get(client)
        return raw_bytes(memory["receipt"]) if memory else NO_RECEIPT
