"""One round of a federation: the only place where the order of a round is written.

cohort → local training → frames → checks → weighted mean → broadcast → new global state
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor, nn

from fedsift.algorithms.buffers import client_values, keeps_layers, mean_layers
from fedsift.algorithms.checks import DeclaredMemory, checked_message, checked_state
from fedsift.algorithms.method import Algorithm, Context, Memory, Phase, zero_memory
from fedsift.codec.errors import NotFiniteError
from fedsift.codec.frame import Spec, decode, state_hash
from fedsift.codec.limits import Limits
from fedsift.codec.update import Parts, Update, WeightedSum, accumulate
from fedsift.codec.wire import COUNTED, Wire
from fedsift.engine.contract import Engine, Job, Received
from fedsift.engine.evaluation import NOTHING_ELSE, Evaluation
from fedsift.errors import Diverged, TooFewClients
from fedsift.federation.cohort import cohort_size
from fedsift.federation.inbox import Inbox, OnUpload, SecureCollector, ignore_uploads
from fedsift.federation.memories import CohortMemory, InMemory, memory_fits
from fedsift.federation.norm_bound import MAX_NORM_RATIO, NormBound
from fedsift.federation.private_rounds import distributed_noise, noisy_mean, spent
from fedsift.federation.snapshot import RoundReport, Snapshot, Traffic, full_update
from fedsift.privacy.differential import DifferentialPrivacy, private_roles, seeded_noise
from fedsift.privacy.distributed import DistributedNoise
from fedsift.privacy.robust import Aggregation, RobustSum
from fedsift.privacy.secure import SecureSettings
from fedsift.privacy.secure.settings import SecureTraffic
from fedsift.seeding import stream, torch_seed
from fedsift.task import Task, Weights, check_weights, weight_of
from fedsift.vector import Layout, State, all_finite

MAX_SAMPLES = 1_000_000
"""The largest number of samples that a remote client may report, if that number is its weight."""


@dataclass(frozen=True)
class Federation:
    """A task, a method and its clients: everything that stays the same between rounds.

    Parameters
    ----------
    task
        The model, the loss and the data.
    algorithm
        A method from ``fedsift.algorithms``.
    engine
        Runs the local training of a round, and evaluates the model.
    participation
        The fraction of clients in each round's cohort.
    dropout
        The probability that a client in the cohort trains but its update is lost.
    min_clients
        Raise :class:`TooFewClients` if a round merges fewer updates than this.
    wire
        How messages travel. Some wires only compute sizes, others encode and decode frames.
    on_upload
        Called with every upload that is merged. It cannot change the training.
    evaluation
        What is measured of the global model besides its accuracy and loss, and how often.
    max_samples
        The largest number of samples that a remote client may report, if its weight depends on it.
    max_norm_ratio
        Reject an update if the L2 norm of its W is more than this many times the usual norm.
        0 or None disables the bound.
    weights
        The clients' weights in the mean: ``"batch"``, their mini-batch sizes; ``"examples"``, their
        numbers of samples; ``"equal"``; or None for the method's own.
    aggregation
        ``"mean"``, or the ``"median"`` or ``"trimmed"`` mean of each coordinate, in which all
        clients have equal weights.
    privacy
        Differential privacy; None for none. With it, each client joins each cohort independently,
        and ``max_norm_ratio`` has no effect, because updates are clipped.
    secure
        Secure aggregation of what the method's phase declares as ``summed``; None for none. With
        it, ``max_norm_ratio`` has no effect, because the server sees no single update.

    """

    task: Task
    algorithm: Algorithm
    engine: Engine
    participation: float = 1.0
    dropout: float = 0.0
    min_clients: int = 0
    wire: Wire = COUNTED
    on_upload: OnUpload = ignore_uploads
    max_samples: int = MAX_SAMPLES
    max_norm_ratio: float | None = MAX_NORM_RATIO
    weights: Weights | None = None
    evaluation: Evaluation = NOTHING_ELSE
    privacy: DifferentialPrivacy | None = None
    aggregation: Aggregation = "mean"
    secure: SecureSettings | None = None

    def __post_init__(self) -> None:
        check_weights(self.weights)
        if self.privacy and self.weighting != "equal":
            raise ValueError('differential privacy needs equal weights: pass weights="equal"')
        if (self.privacy or self.secure) and self.aggregation != "mean":
            raise ValueError("privacy and secure sums need the sum: use aggregation='mean'")
        if self.privacy:
            private_roles(self.algorithm, self.privacy)
        if self.algorithm.layout_for(self.task.layout) != self.task.layout:
            raise ValueError("the task's layout must be made by algorithm.layout_for(layout)")

    def initial_snapshot(self) -> Snapshot:
        """Return the snapshot before round 1: every client has received the model's parameters."""
        return self.initial_snapshot_from(self.task.layout.read(self.task.model))

    def initial_snapshot_from(self, values: Tensor) -> Snapshot:
        """Return the snapshot before round 1, with the given parameters and buffers."""
        state = self.algorithm.initial_state(self.task.layout, values)
        limits = Limits(max_abs=float("inf"))
        _, size = self.wire.send(full_update(state), self.frame_spec(0, bytes(8)), limits)
        memory = self.algorithm.initial_server_memory(self.task.layout, state.w)
        return Snapshot(0, state, memory, InMemory(), Traffic(downlink_bytes=size))

    def model_weights(self, snapshot: Snapshot) -> Tensor:
        """Return the weights to evaluate and to return to the user, followed by the buffers.

        If clients keep their own layers, these are the mean over the clients of the last round.
        """
        values = self.algorithm.model(snapshot.state, snapshot.server_memory)
        known = [n for n in self.cohort(snapshot.round) if n in snapshot.client_memory]
        if not known or not keeps_layers(self.algorithm):
            return values
        memory = mean_layers(snapshot.client_memory[n] for n in known)
        return client_values(self.task.layout, snapshot.state, values, memory)

    def client_weights(self, snapshot: Snapshot, client: int) -> Tensor:
        """Return the weights and buffers with which a client uses the model.

        They differ from those of :meth:`model_weights` if clients keep their own layers.
        """
        values = self.algorithm.model(snapshot.state, snapshot.server_memory)
        memory = snapshot.client_memory.get(client)
        return client_values(self.task.layout, snapshot.state, values, memory)

    @property
    def clients_keep_layers(self) -> bool:
        """Whether clients have normalization layers of their own, which they never send."""
        return keeps_layers(self.algorithm)

    def trained_model(self, snapshot: Snapshot) -> nn.Module:
        """Return a copy of the model with the weights to evaluate, in evaluation mode."""
        return self._model_with(self.model_weights(snapshot))

    def client_model(self, snapshot: Snapshot, client: int) -> nn.Module:
        """Return a copy of the model as a client uses it: with its own buffers, if it has any."""
        return self._model_with(self.client_weights(snapshot, client))

    def _model_with(self, w: Tensor) -> nn.Module:
        model = copy.deepcopy(self.task.model)
        self.task.layout.write(w, model)
        return model.eval()

    def run_round(self, before: Snapshot) -> tuple[Snapshot, RoundReport]:
        """Run one round; return the snapshot after it and a report of what happened."""
        job = self.job_after(before)
        round, phase = job.round, job.phase
        lost = self.lost_clients(round, job.cohort)
        inbox = self.open_inbox(job, before)
        replies = self.engine.train(job) if job.cohort else ()
        secure = SecureTraffic()
        if self.secure:
            secure = self.secure_rounds.collect(job, inbox, replies)
        else:
            inbox.take_in_order(replies, lost)
        self.require_enough(inbox, round, len(lost))
        memories = before.client_memory.replaced(inbox.memory)
        norms = before.norms.after(inbox.norms)
        receipts = {**before.receipts, **inbox.receipts}
        after = replace(before, round=round, client_memory=memories, norms=norms, receipts=receipts)
        broadcast_bytes, clamped = 0, 0
        if inbox.merged or (self.privacy and not self.noise):  # that nobody did is private, too
            after, broadcast_bytes, clamped = self.broadcast(after, phase, inbox)
        downlink_bytes = broadcast_bytes + sum(secure.downlink.values())
        traffic = self.count_traffic(before.traffic, phase, inbox, downlink_bytes)
        loss = None if self.privacy or self.secure else inbox.loss  # it would be in the clear
        report = RoundReport(inbox.merged, inbox.rejected, clamped, loss, inbox.problems, secure)
        return replace(after, traffic=traffic), report

    @cached_property
    def secure_rounds(self) -> SecureCollector:
        """Secure aggregation, with the keys of server and clients."""
        from fedsift.federation.secure_round import SecureRounds

        return SecureRounds(self)

    def job_after(self, before: Snapshot) -> Job:
        """Return the local training of the round after a snapshot."""
        round = before.round + 1
        phase, cohort = self.algorithm.phase(round), self.cohort(round)
        memory = self.cohort_memory(before, cohort)
        return Job(round, phase, before.state, cohort, memory, self.weighting)

    def broadcast(
        self, snapshot: Snapshot, phase: Phase, inbox: Inbox
    ) -> tuple[Snapshot, int, int]:
        """Compress the mean of the merged updates, send it to the clients, and apply what was sent.

        ``snapshot`` already has the number of this round. Returns the new snapshot, the size of the
        broadcast in bytes, and how many coordinates of V were clamped to zero.
        """
        share = inbox.merged / len(self.task.clients)
        context = Context.of(self.task, snapshot.round, snapshot.state)
        context = replace(context, merged_share=share)
        try:
            mean = self.mean_update(inbox, snapshot.round)
            message = phase.broadcast(context, mean, DeclaredMemory(snapshot.server_memory))
        except NotFiniteError:
            raise Diverged("the mean update is not finite") from None
        parts, memory = checked_message(message, snapshot.server_memory, "broadcast")
        base = self.base_hash(snapshot.state)
        limits = Limits(base=base, round=snapshot.round, max_abs=float("inf"))
        sent = Update(parts, (1.0,))
        received, size = self.wire.send(sent, self.frame_spec(snapshot.round, base), limits)
        state, clamped = apply_broadcast(self.algorithm, context, snapshot.state, received.parts)
        if not all_finite(*state):
            raise Diverged("the global state is not finite")
        return replace(snapshot, state=state, server_memory=memory), size, clamped

    def mean_update(self, inbox: Inbox, round: int) -> State:
        """Return the weighted mean of the merged updates, with the noise of a private run."""
        if self.privacy is None or self.noise:
            return inbox.total.mean()
        seed = torch_seed(self.task.seed, "privacy", round)
        return noisy_mean(self, inbox.total.total, seeded_noise(seed))

    @cached_property
    def noise(self) -> DistributedNoise | None:
        """The noise that clients add to secure sums in a private run."""
        return distributed_noise(self)

    def epsilon(self, rounds: int) -> dict[str, float]:
        """Return the privacy cost ε of some rounds as a column of the metrics, if it is bounded."""
        return {} if self.privacy is None else {"epsilon": spent(self, rounds)}

    def may_run(self, round: int) -> bool:
        """Whether the privacy budget allows another round."""
        budget = None if self.privacy is None else self.privacy.epsilon
        return budget is None or spent(self, round) <= budget

    def require_enough(self, inbox: Inbox, round: int, lost: int) -> None:
        """Stop the run if too few updates were merged."""
        if inbox.merged < min(self.min_clients, len(inbox.job.cohort)):
            raise TooFewClients(
                f"round {round} merged {inbox.merged} updates, but needs at least "
                f"{self.min_clients}: {lost} were lost, {inbox.rejected} rejected "
                f"({inbox.problem_summary() or 'no problem was reported'})"
            )

    def open_inbox(self, job: Job, before: Snapshot) -> Inbox:
        """Return an empty inbox for the uploads of a round."""
        base = self.base_hash(job.state)
        limits, spec = self.upload_limits(job, base), self.frame_spec(job.round, base)
        bound = self.norm_bound(before)
        zeros, robust = self.algorithm.zero_update(self.task.layout, job.state.w), self.aggregation
        total = WeightedSum(zeros) if robust == "mean" else RobustSum(zeros, robust)
        return Inbox(self, job, spec, limits, total, before.client_memory, bound)

    def norm_bound(self, before: Snapshot) -> NormBound:
        """Return the bound on the norms of a round's updates."""
        ratio = 0.0 if self.privacy or self.secure else self.max_norm_ratio or 0.0
        return NormBound(ratio, before.norms)

    def upload_limits(self, job: Job, base: bytes) -> Limits:
        """Return what every upload of a round must satisfy."""
        return Limits(run=self.run_id, base=base, round=job.round, algorithm=self.algorithm.name)

    def decode_upload(self, reply: Received, limits: Limits) -> Update:
        """Decode the frame of a remote client, or raise a :class:`FrameError`."""
        samples = self.max_samples
        most = weight_of(self.weighting, samples, self.task.batch_size or samples)
        limits = replace(limits, client=reply.client, min_weight=1, max_weight=most)
        return decode(reply.frame, self.task.layout, limits)

    def merged_parts(self, job: Job, clients: tuple[int, ...], update: Update) -> Update:
        """Return what is merged of the uploads of some clients."""
        context = Context.of(self.task, job.round, job.state, clients)
        parts = job.phase.receive(context, job.state, update.parts)
        if self.privacy:
            parts = self.privacy.clipped(parts)
        return update if parts is update.parts else Update(parts, update.weights)

    def base_hash(self, state: State) -> bytes:
        """Return the hash of the base state; zeros, to save time, if no frames are built."""
        return state_hash(state) if self.wire.builds_frames else bytes(8)

    def frame_spec(self, round: int, base: bytes) -> Spec:
        """Return the header fields of a round's frames."""
        return Spec(self.task.layout, self.algorithm.name, round, run=self.run_id, base=base)

    @property
    def weighting(self) -> Weights:
        """What decides the clients' weights in the mean."""
        return self.weights or self.algorithm.weights

    def weight(self, client: int) -> float:
        """Return a client's weight in the mean."""
        return self.task.weight(client, self.weighting)

    @cached_property
    def run_id(self) -> bytes:
        """Eight bytes that identify the frames of this federation."""
        task = self.task
        return run_id(task.layout, self.algorithm, task.seed, task.batch_size, self.weighting)

    def cohort(self, round: int) -> tuple[int, ...]:
        """Draw the clients that train in a round, in ascending order.

        If the server adds noise, each client takes part with the same probability, independently.
        """
        clients = len(self.task.clients)
        if self.privacy and not self.secure:
            draws = stream(self.task.seed, "private cohort", round).random(clients)
            return tuple(n for n, x in enumerate(draws) if x < self.participation)
        size = cohort_size(self.participation, clients)
        if size == clients:
            return tuple(range(clients))
        draw = stream(self.task.seed, "cohort", round)
        return tuple(sorted(int(n) for n in draw.choice(clients, size, replace=False)))

    def lost_clients(self, round: int, cohort: tuple[int, ...]) -> frozenset[int]:
        """Draw the clients in the cohort whose update is lost."""
        draw = stream(self.task.seed, "dropout", round).random(len(cohort))
        return frozenset(n for n, x in zip(cohort, draw, strict=True) if x < self.dropout)

    def cohort_memory(self, snapshot: Snapshot, cohort: tuple[int, ...]) -> Mapping[int, Memory]:
        """Return each member's memory from its last round; zeros in its first."""
        names = self.algorithm.client_memory
        zeros = zero_memory(names, self.task.layout, snapshot.state.w)
        return CohortMemory(snapshot.client_memory, cohort, zeros)

    @property
    def memory_lengths(self) -> dict[str, int]:
        """The length of each vector that a client remembers."""
        layout = self.task.layout
        return {name: layout.length(name) for name in self.algorithm.client_memory}

    @property
    def needs_memory_file(self) -> bool:
        """Whether the clients' memories are too large to be held in RAM."""
        clients, layout = len(self.task.clients), self.task.layout
        per_client = sum(self.memory_lengths.values()) * layout.dtype.itemsize
        all_train = cohort_size(self.participation, clients) == clients
        return not memory_fits(clients * per_client, all_train)

    def count_traffic(
        self, before: Traffic, phase: Phase, inbox: Inbox, downlink_bytes: float
    ) -> Traffic:
        """Add a round's traffic: the mean upload over all clients, and what each receives."""
        clients = len(self.task.clients)
        bits = self.algorithm.paper_bits(phase, self.task.layout) * inbox.sent / clients
        return Traffic(
            before.uplink_bits_paper + bits,
            before.uplink_bytes + inbox.size / clients,
            before.downlink_bytes + downlink_bytes,
        )


def run_id(
    layout: Layout, algorithm: Algorithm, seed: int, batch_size: int | None, weights: Weights
) -> bytes:
    """Return a hash of the model's layout, the method, the seed, the batch size and the weights."""
    about = (layout.fingerprint(), repr(algorithm), seed, batch_size, weights)
    return hashlib.blake2b(repr(about).encode(), digest_size=8).digest()


def apply_broadcast(
    algorithm: Algorithm, context: Context, state: State, parts: Parts
) -> tuple[State, int]:
    """Return the state after a broadcast, and how many coordinates of V were clamped to zero.

    The server and the clients both compute this, from the same bytes.
    """
    received = algorithm.zero_update(context.layout, state.w)
    accumulate(received, parts)
    returned = algorithm.phase(context.round).apply(context, state, received)
    after = checked_state(returned, state, "apply")
    if "v" not in after:
        return after, 0
    clamped = int((after.v < 0).sum())
    return after.replace(v=after.v.clamp_min(0)), clamped
