"""The inbox of a round: it checks, counts and adds up the uploads as they arrive."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fedsift.algorithms.method import Memory
from fedsift.codec.errors import FrameError, NotFiniteError
from fedsift.codec.frame import Spec, encoded_size
from fedsift.codec.limits import Limits
from fedsift.codec.threads import Threads, finished
from fedsift.codec.update import Update, WeightedSum
from fedsift.engine.contract import ClientResult, Job, Missing, Received, Results
from fedsift.federation.memories import Memories
from fedsift.federation.norm_bound import MAX_HELD_BYTES, NormBound, Norms, held_bytes

if TYPE_CHECKING:
    from fedsift.federation.round import Federation

Reply = ClientResult | Results | Received | Missing
"""What an engine yields."""
OnUpload = Callable[[Sequence[Spec], Update, Sequence[int]], None]
"""Called with merged uploads: their headers, their content, and their sizes in bytes."""


def ignore_uploads(specs: Sequence[Spec], update: Update, sizes: Sequence[int]) -> None:
    """Do nothing with uploads."""


@dataclass(frozen=True)
class Arrival:
    """Uploads that arrived together and whose frames are valid.

    ``merged`` is what the method makes of them, and ``norms`` holds the norms of that. ``memory``
    holds, by client, the memory to store if the update is merged; ``receipts`` the receipts of
    clients that store it themselves.
    """

    specs: Sequence[Spec]
    update: Update
    merged: Update
    sizes: Sequence[int]
    losses: Sequence[float]
    memory: Mapping[int, Memory]
    receipts: Mapping[int, bytes]
    norms: Sequence[Norms]

    def select(self, rows: list[int]) -> Arrival:
        """Select some of the uploads."""
        if len(rows) == len(self.specs):
            return self
        specs = [self.specs[row] for row in rows]
        clients = {spec.client for spec in specs}
        return Arrival(
            specs,
            self.update.rows(rows),
            self.merged.rows(rows),
            [self.sizes[row] for row in rows],
            [self.losses[row] for row in rows],
            {n: memory for n, memory in self.memory.items() if n in clients},
            {n: receipt for n, receipt in self.receipts.items() if n in clients},
            [self.norms[row] for row in rows],
        )


@dataclass(frozen=True)
class Refused:
    """An upload that is not merged, the reason, and its size in bytes."""

    client: int
    problem: str
    size: int


Opened = Arrival | Refused | Results | Missing
"""What an engine yielded, with single updates checked."""


class Inbox:
    """Takes a round's uploads one by one, and keeps only their sum.

    An upload with an unusual norm is held back, together with all uploads after it, so that updates
    are added in the order of their arrival. :meth:`_merge_held` decides on them at the end of the
    round, or earlier if they take more than ``MAX_HELD_BYTES``. In round 1, all are held back.
    """

    def __init__(
        self,
        federation: Federation,
        job: Job,
        spec: Spec,
        limits: Limits,
        total: WeightedSum,
        memories: Memories,
        bound: NormBound,
    ) -> None:
        self.federation, self.job, self.total = federation, job, total
        self.spec, self.limits = spec, limits
        self.memories, self.bound = memories, bound
        self.memory: dict[int, Any] = {}
        self.receipts: dict[int, bytes] = {}
        self.problems: dict[str, str] = {}
        self.losses: list[float] = []
        self.norms: list[Norms] = []
        self.held: list[Arrival] = []
        self.merged = self.rejected = self.size = self.held_size = 0
        self.adding: Threads | None = None

    @property
    def loss(self) -> float | None:
        """The mean of the finite losses that the merged clients reported."""
        numbers = [loss for loss in self.losses if math.isfinite(loss)]
        if not numbers:
            return None
        mean, most = sum(loss / len(numbers) for loss in numbers), sys.float_info.max
        return min(max(mean, -most), most)  # rounding can take the largest losses to infinity

    @property
    def sent(self) -> int:
        """Number of uploads that were sent, merged or not."""
        return self.merged + self.rejected

    def problem_summary(self) -> str:
        """Return all problems in one line."""
        return "; ".join(f"client {client}: {why}" for client, why in self.problems.items())

    def take_in_order(self, replies: Iterable[Reply], lost: Collection[int] = ()) -> None:
        """Take the replies of a round except those that are lost.

        Threads check frames while others arrive and while earlier ones are added.
        """
        with Threads() as checking, Threads() as self.adding:
            calls = (self._open(reply, checking) for reply in without_lost(replies, lost))
            for reply in checking.in_order(calls):
                if isinstance(reply, Results):
                    self.take_all(reply)
                elif isinstance(reply, Missing):
                    self.problems[str(reply.client)] = reply.reason
                else:
                    self._take(reply)
            self._merge_held()

    def _open(self, reply: Reply, threads: Threads) -> Future[Opened]:
        """Start to check a frame, or check at once what was trained on this machine."""
        is_frame = isinstance(reply, Received)
        return threads.start(self._opened, reply) if is_frame else finished(self._opened(reply))

    def _opened(self, reply: Reply) -> Opened:
        return self.checked(reply) if isinstance(reply, ClientResult | Received) else reply

    def checked(self, reply: ClientResult | Received) -> Arrival | Refused:
        """Return an upload, decoded and compared with the limits. Does not change the inbox."""
        spec = replace(self.spec, client=reply.client)
        try:
            update, size = self._decoded(reply, spec)
            merged = self.federation.merged_parts(self.job, (reply.client,), update)
        except (FrameError, NotFiniteError) as problem:
            return Refused(reply.client, str(problem), self._size(reply, spec))
        memory = {reply.client: reply.memory} if isinstance(reply, ClientResult) else {}
        receipts = {reply.client: reply.receipt} if isinstance(reply, Received) else {}
        norms = self.bound.norms_of(merged)
        return Arrival([spec], update, merged, [size], [reply.loss], memory, receipts, norms)

    def take_all(self, replies: Results) -> None:
        """Take the uploads of clients that were trained as a stack."""
        if self.federation.wire.builds_frames:
            for reply in replies:
                self._take(self.checked(reply))
        elif replies.clients:
            specs = [replace(self.spec, client=n) for n in replies.clients]
            memory = {result.client: result.memory for result in replies} if replies.memory else {}
            merged = self.federation.merged_parts(self.job, replies.clients, replies.update)
            self._admit(
                Arrival(
                    specs, replies.update, merged, replies.sizes, replies.losses, memory, {},
                    self.bound.norms_of(merged),
                )
            )  # fmt: skip

    def _merge_held(self) -> None:
        """Merge the updates that were held back, except those that are too large."""
        held, self.held, self.held_size = self.held, [], 0
        for arrival in held:
            problems = [self.bound.violation(norms, self.norms) for norms in arrival.norms]
            for spec, size, problem in zip(arrival.specs, arrival.sizes, problems, strict=True):
                if problem:
                    self._reject(spec.client, problem, size)
            self._merge(arrival.select([row for row, why in enumerate(problems) if not why]))

    def _take(self, upload: Arrival | Refused) -> None:
        if isinstance(upload, Refused):
            self._reject(upload.client, upload.problem, upload.size)
        else:
            self._admit(upload)

    def _admit(self, arrival: Arrival) -> None:
        self.norms += arrival.norms
        if not self.held and all(map(self.bound.is_typical, arrival.norms)):
            self._merge(arrival)
            return
        self.held.append(arrival)
        self.held_size += held_bytes(arrival.merged)
        if self.held_size > MAX_HELD_BYTES:
            self._merge_held()

    def _reject(self, client: int, problem: str, size: int) -> None:
        self.rejected += 1
        self.size += size  # rejected updates still count as traffic
        self.problems[str(client)] = problem

    def _merge(self, arrival: Arrival) -> None:
        if not arrival.specs:
            return
        self.merged += len(arrival.specs)
        self.size += sum(arrival.sizes)
        self.losses += arrival.losses
        self.total.add(arrival.merged, self.adding)
        self.federation.on_upload(arrival.specs, arrival.update, arrival.sizes)
        if self.federation.algorithm.client_memory:
            stored = {n: self.memories.keep(memory) for n, memory in arrival.memory.items()}
            self.memory.update(stored)
            self.receipts.update(arrival.receipts)

    def _decoded(self, reply: ClientResult | Received, spec: Spec) -> tuple[Update, int]:
        federation = self.federation
        if isinstance(reply, Received):
            return federation.decode_upload(reply, self.limits), len(reply.frame)
        if reply.size is not None and not federation.wire.builds_frames:
            return reply.update, reply.size
        weight = federation.weight(reply.client)
        limits = replace(self.limits, client=reply.client, weight=weight)
        return federation.wire.send(reply.update, spec, limits)

    def _size(self, reply: ClientResult | Received, spec: Spec) -> int:
        if isinstance(reply, Received):
            return len(reply.frame)
        return encoded_size(reply.update, spec)


def without_lost(replies: Iterable[Reply], lost: Collection[int]) -> Iterator[Reply]:
    """Yield the replies of a round except those of the lost clients."""
    for reply in replies:
        if isinstance(reply, Results):
            yield reply.without(lost)
        elif reply.client not in lost:
            yield reply
