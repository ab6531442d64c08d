"""A federation whose clients are on other machines: checks of uploads, and traffic as sent."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedsift.algorithms.method import Context, LocalUpdate, Phase, zero_memory
from fedsift.codec.frame import Spec, decode, encode
from fedsift.codec.limits import Limits, Shape, shape_of
from fedsift.codec.update import Update
from fedsift.engine.contract import Job
from fedsift.federation.inbox import Inbox
from fedsift.federation.round import Federation
from fedsift.federation.snapshot import Snapshot, Traffic

METADATA_BYTES = 1 << 20
"""Upper bound for everything in a reply except its frame: Flower's records, and a reason."""


@dataclass
class BroadcastWire:
    """The server's :class:`Wire`: keeps the last broadcast for the next requests.

    ``base`` is the hash of the state to which the broadcast is applied. ``bytes_sent`` counts the
    frames in the requests of the current round.
    """

    frame: bytes = b""
    base: bytes = b""
    bytes_sent: int = 0

    builds_frames: ClassVar[bool] = True

    def send(self, update: Update, spec: Spec, limits: Limits) -> tuple[Update, int]:
        """Return the broadcast as clients decode it, and its size in bytes."""
        self.frame, self.base = encode(update, spec), spec.base
        return decode(self.frame, spec.layout, limits), len(self.frame)


@dataclass(frozen=True)
class Deployment(Federation):
    """A federation of remote clients, which keep their own memories."""

    wire: BroadcastWire = field(default_factory=BroadcastWire)

    def initial_snapshot_from(self, w: Tensor) -> Snapshot:
        """Return the snapshot before round 1. Its traffic is zero, as nothing was sent yet."""
        return replace(super().initial_snapshot_from(w), traffic=Traffic())

    def upload_limits(self, job: Job, base: bytes) -> Limits:
        """Return what every upload of a round must satisfy, including its exact shape."""
        return replace(super().upload_limits(job, base), shape=self.expected_shape(job))

    def expected_shape(self, job: Job) -> Shape:
        """Return the shape of every correct upload of a round, by sending an update of zeros."""
        zeros = job.state.map(lambda x: torch.zeros_like(x)[None])
        memory = zero_memory(self.algorithm.client_memory, self.task.layout, job.state.w)
        context = Context.of(self.task, job.round, job.state, (0,))
        parts, _ = job.phase.send(context, LocalUpdate(zeros, zeros), memory)
        return shape_of(Update(parts, (1.0,)))

    def max_reply_bytes(self, job: Job) -> int:
        """Return an upper bound for a correct reply.

        It is twice the size of the uncompressed values and mask, plus the metadata.
        """
        layout, shape = self.task.layout, self.expected_shape(job)
        num_values = sum(
            len(roles) * (layout.length(roles[0]) if k is None else k) for roles, k, _ in shape
        )
        mask_bytes = -(-layout.d // 8) * len(shape)
        return 2 * (num_values * layout.dtype.itemsize + mask_bytes) + METADATA_BYTES

    def count_traffic(
        self, before: Traffic, phase: Phase, inbox: Inbox, broadcast_bytes: int
    ) -> Traffic:
        """Add a round's traffic: its uploads, and the requests sent at its start.

        The broadcast is counted in the next round, when requests carry it.
        """
        sent, self.wire.bytes_sent = self.wire.bytes_sent, 0
        down_so_far = before.downlink_bytes + sent / len(self.task.clients)
        return replace(super().count_traffic(before, phase, inbox, 0), downlink_bytes=down_so_far)
