"""A federation whose clients are on other machines: checks of uploads, and traffic as sent."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from functools import cached_property
from logging import WARNING
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from flwr.supercore import log
from torch import Tensor

from fedsift.algorithms.example_message import example_message
from fedsift.algorithms.method import Context, Phase
from fedsift.codec.frame import Spec, decode, encode
from fedsift.codec.limits import Limits, Shape, shape_of
from fedsift.codec.update import Parts, Update
from fedsift.engine.contract import Job
from fedsift.federation.inbox import Inbox
from fedsift.federation.private_rounds import noisy_mean
from fedsift.federation.round import Federation
from fedsift.federation.snapshot import Snapshot, Traffic
from fedsift.flower.noise import RATE, NoiseDraws, secret_noise
from fedsift.flower.protocol import NUM_EXAMPLES
from fedsift.vector import State

if TYPE_CHECKING:
    from fedsift.flower.secure_rounds import RemoteSecureRounds

METADATA_BYTES = 1 << 20
"""Upper bound for everything in a reply except its frame: Flower's records, and a reason."""


@dataclass
class BroadcastWire:
    """The server's :class:`Wire`: keeps the latest broadcasts for the next requests.

    ``frames`` are the latest broadcasts, by the hash of the state to which each is applied: the
    last one, and as many before it as are together no larger than the weights. ``bytes_sent``
    counts the frames in the requests of the current round.
    """

    frames: dict[bytes, bytes] = field(default_factory=dict)
    bytes_sent: int = 0

    builds_frames: ClassVar[bool] = True

    def send(self, update: Update, spec: Spec, limits: Limits) -> tuple[Update, int]:
        """Return the broadcast as clients decode it, and its size in bytes."""
        frame = self.frames[spec.base] = encode(update, spec)
        self.forget(spec.layout.d * spec.layout.dtype.itemsize)
        return decode(frame, spec.layout, limits), len(frame)

    def forget(self, most: int) -> None:
        """Drop the oldest frames until the others take at most this many bytes."""
        size = sum(map(len, self.frames.values()))
        while size > most and len(self.frames) > 1:
            size -= len(self.frames.pop(next(iter(self.frames))))

    def since(self, state: bytes) -> list[bytes]:
        """Return the broadcasts since the state with that hash; none if it is not known."""
        bases = list(self.frames)
        first = bases.index(state) if state in self.frames else len(bases)
        return [self.frames[base] for base in bases[first:]]


@dataclass(frozen=True)
class Deployment(Federation):
    """A federation of remote clients, which keep their own memories.

    ``weight_key`` names the metric that holds a client's number of samples. ``noise_file``
    counts how often noise was drawn in a private run.
    """

    wire: BroadcastWire = field(default_factory=BroadcastWire)
    weight_key: str = NUM_EXAMPLES
    noise_file: Path = Path(os.devnull)

    def initial_snapshot_from(self, w: Tensor) -> Snapshot:
        """Return the snapshot before round 1. Its traffic is zero, as nothing was sent yet."""
        return replace(super().initial_snapshot_from(w), traffic=Traffic())

    def upload_limits(self, job: Job, base: bytes) -> Limits:
        """Return what every upload of a round must satisfy, including its exact shape."""
        return replace(super().upload_limits(job, base), shape=self.expected_shape(job))

    def expected_shape(self, job: Job) -> Shape:
        """Return the shape of every correct upload of a round; secure sums travel separately."""
        parts, summed = self.example_upload(job), job.phase.summed if self.secure else ()
        kept = tuple(part for part in parts if not set(part.values) & set(summed))
        return shape_of(Update(kept, (1.0,)))

    def example_upload(self, job: Job) -> Parts:
        """Return what a client sends for example: all of them send the same number of values."""
        context = Context.of(self.task, job.round, job.state, (0,))
        return example_message(self.algorithm, context)

    @cached_property
    def secure_rounds(self) -> RemoteSecureRounds:
        """Secure aggregation, with the public keys of the clients."""
        from fedsift.flower.secure_rounds import RemoteSecureRounds

        return RemoteSecureRounds(self)

    def require_enough(self, inbox: Inbox, round: int, lost: int) -> None:
        """Stop the run if too few updates were merged, unless they can never be merged."""
        if self.secure and self.secure_rounds.skipped == round:
            log(WARNING, "round %s is skipped: its values were masked before the restart", round)
        else:
            super().require_enough(inbox, round, lost)

    @property
    def noise_draws(self) -> NoiseDraws:
        """How often noise was drawn in a private run."""
        return NoiseDraws(self.noise_file)

    def mean_update(self, inbox: Inbox, round: int) -> State:
        """Return the mean of a round, with noise that nobody can compute in a private run."""
        if self.privacy is None:
            return super().mean_update(inbox, round)
        self.noise_draws.add(round)
        return noisy_mean(self, inbox.total.total, secret_noise)

    def epsilon(self, rounds: int) -> dict[str, float]:
        """Return what all noisy models so far cost, including those of repeated rounds."""
        if self.privacy is None:
            return {}
        return {"epsilon": self.privacy.spent(self.noise_draws.count_after(rounds), RATE)}

    def may_run(self, round: int) -> bool:
        """Whether the privacy budget allows another noisy model."""
        if self.privacy is None or self.privacy.epsilon is None:
            return True
        draws = self.noise_draws.count_after(round - 1) + 1
        return self.privacy.spent(draws, RATE) <= self.privacy.epsilon

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
        self, before: Traffic, phase: Phase, inbox: Inbox, downlink_bytes: float
    ) -> Traffic:
        """Add a round's traffic: its uploads, and the requests sent at its start.

        The broadcast is counted in the next round, when requests carry it.
        """
        sent, self.wire.bytes_sent = self.wire.bytes_sent, 0
        down_so_far = before.downlink_bytes + sent / len(self.task.clients)
        return replace(super().count_traffic(before, phase, inbox, 0), downlink_bytes=down_so_far)
