"""The train requests of a round: what each SuperNode needs in order to train."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from flwr.app import ConfigRecord, Message, MessageType, RecordDict

from fedsift.codec.frame import encode, state_hash
from fedsift.engine.contract import Job
from fedsift.federation.snapshot import Snapshot, full_update
from fedsift.flower.deployment import Deployment
from fedsift.flower.protocol import FrameKind, TrainRequest, joined
from fedsift.flower.store import NO_RECEIPT

GRACE_SECONDS = 30.0
"""Seconds that messages live after their round. Flower itself replies to expired messages."""


@dataclass
class NodeStatus:
    """What the server knows about a SuperNode: its client, and the hash of the state it holds.

    ``evaluates`` says whether it can evaluate a model.
    """

    client: int | None = None
    state: bytes = b""
    evaluates: bool = False


@dataclass(frozen=True)
class RoundRequests:
    """The requests of one round.

    Nodes that hold a recent state receive only the changes, others the whole state. ``seconds``
    limits the round, and ``config`` is sent to the clients' own training loops. ``memories`` is the
    number of memories that clients store.
    """

    federation: Deployment
    snapshot: Snapshot
    nodes: dict[int, NodeStatus]
    seconds: float
    config: ConfigRecord
    memories: int

    message_type: ClassVar[str] = MessageType.TRAIN

    @property
    def round(self) -> int:
        """The number of the round."""
        return self.snapshot.round + 1

    @cached_property
    def cohort(self) -> tuple[int, ...]:
        """The clients that train."""
        return self.federation.cohort(self.round)

    @cached_property
    def state(self) -> bytes:
        """The hash of the state from which the round starts."""
        return state_hash(self.snapshot.state)

    @property
    def max_reply_bytes(self) -> int:
        """The size above which a reply is refused."""
        return self.federation.max_reply_bytes(self.job)

    @cached_property
    def job(self) -> Job:
        """The round's job, without its clients, who train elsewhere."""
        phase = self.federation.algorithm.phase(self.round)
        return Job(self.round, phase, self.snapshot.state, (), {}, self.federation.weighting)

    @cached_property
    def full_frame(self) -> bytes:
        """The frame that contains the whole state."""
        spec = self.federation.frame_spec(self.snapshot.round, bytes(8))
        return encode(full_update(self.snapshot.state), spec)

    def is_needed(self, node: int) -> bool:
        """Whether a node's client is in the cohort or not yet known."""
        status = self.nodes.get(node)
        return status is None or status.client is None or status.client in self.cohort

    def message_to(self, node: int) -> Message:
        """Return the message with a node's request, and count the bytes of its frame."""
        status = self.nodes.get(node, NodeStatus())
        kind, frame = self.state_frame(status)
        self.federation.wire.bytes_sent += len(frame)
        return Message(
            content=self.content(self.request(status, kind, frame)), dst_node_id=node,
            message_type=self.message_type, ttl=self.seconds + GRACE_SECONDS,
            group_id=str(self.round),
        )  # fmt: skip

    def content(self, request: TrainRequest) -> RecordDict:
        """Return the content of the message with a request."""
        return request.to_records(self.config)

    def state_frame(self, status: NodeStatus) -> tuple[FrameKind, bytes]:
        """Return the frame or frames that take a node to the state of this round."""
        if status.state == self.state:
            return "none", b""
        frames = self.federation.wire.since(status.state)
        if not frames:
            return "full", self.full_frame
        return ("delta", frames[0]) if len(frames) == 1 else ("deltas", joined(frames))

    def request(self, status: NodeStatus, kind: FrameKind, frame: bytes) -> TrainRequest:
        """Return the request to a node."""
        federation, receipts = self.federation, self.snapshot.receipts
        cohort = list(self.cohort) if status.client is None else [status.client]
        has_memory = bool(federation.algorithm.client_memory)
        return TrainRequest(
            round=self.round,
            run=federation.run_id,
            state=self.state,
            kind=kind,
            cohort=cohort,
            receipts=[receipts.get(n, NO_RECEIPT) for n in cohort] if has_memory else [],
            algorithm=repr(federation.algorithm),
            seed=federation.task.seed,
            batch_size=federation.task.batch_size or 0,
            weights=federation.weighting,
            seconds=self.seconds,
            memories=self.memories,
            frame=frame,
            weight_key=federation.weight_key,
            layout=federation.task.layout if kind == "full" else None,
        )
