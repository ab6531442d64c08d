"""Secure aggregation in a simulation: every message of the protocol is built, and counted.

The values of the roles that a method's phase declares as ``summed`` travel masked. Everything else
that a client sends travels in an ordinary frame, together with the masked values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from fedsift.codec.frame import encoded_size
from fedsift.codec.update import Role, Update, vector_for
from fedsift.codec.value_blocks import Integer
from fedsift.engine.contract import ClientResult, Job, Results
from fedsift.federation.inbox import Inbox, Reply
from fedsift.federation.private_rounds import noisy_codes, settings_with_noise
from fedsift.privacy.secure import Refusal, SecureSettings, SecureSumStopped
from fedsift.privacy.secure.client import SecureClient
from fedsift.privacy.secure.exchange import StageBytes, reply_of, run_exchange
from fedsift.privacy.secure.integers import Integers
from fedsift.privacy.secure.messages import SecureStage
from fedsift.privacy.secure.server import Replies, Request, SecureServer, SecureSum
from fedsift.privacy.secure.settings import SecureTraffic
from fedsift.seeding import stream
from fedsift.vector import State

if TYPE_CHECKING:
    from fedsift.federation.round import Federation

Codes = npt.NDArray[np.integer]
LostAt = Mapping[int, SecureStage]
"""The first stage at which a client no longer replies."""
LOSSES = tuple(SecureStage)[:-1]
"""The stages at which a simulated client may be lost. None is lost at the last, which is rare."""


class SecureRounds:
    """Secure aggregation in a simulated run: its server and its clients, with their keys.

    Keys are not part of a snapshot. Which of them exist follows from the cohorts and losses so far,
    so a resumed run first repeats the earlier rounds without values.
    """

    def __init__(self, federation: Federation) -> None:
        secure = federation.secure or SecureSettings()
        self.federation, self.settings = federation, settings_with_noise(secure, federation.noise)
        self.start()

    def start(self) -> None:
        """Start without any keys."""
        self.round, self.clients = 0, dict[int, SecureClient]()
        self.server = SecureServer(self.federation.run_id, self.settings)

    def collect(self, job: Job, inbox: Inbox, replies: Iterable[Reply]) -> SecureTraffic:
        """Take a round's uploads, with the values of the summed roles as a secure sum."""
        if not (roles := job.phase.summed):
            inbox.take_in_order(replies, self.federation.lost_clients(job.round, job.cohort))
            return SecureTraffic()
        self.advance_to(job.round)
        uploads, codes, largest = separated(replies, roles)
        largest = job.phase.largest or largest
        if (noise := self.federation.noise) is not None:
            seed, largest = self.federation.task.seed, noise.largest(largest)
            codes = {u: noisy_codes(noise, x, seed, job.round, u) for u, x in codes.items()}
        exchange = SecureExchange(self, job.round, self.losses(job.round, job.cohort))
        total = exchange.run(codes, largest)
        for client in sorted(exchange.uploaded - total.weights.keys()):
            spec = replace(inbox.spec, client=client)
            inbox.size += encoded_size(uploads[client].update, spec)
        inbox.take_in_order(uploads[client] for client in codes if client in total.weights)
        inbox.size += sum(exchange.sizes.up.values())
        lost = {str(u): why for u, why in total.problems.items() if u not in total.weights}
        inbox.problems.update(lost)
        add_sum(inbox.total.total, roles, total.total)
        return exchange.sizes.per_client(len(self.federation.task.clients))

    def advance_to(self, round: int) -> None:
        """Repeat the rounds before this one, as far as keys are concerned."""
        if self.round >= round:
            self.start()
        phase = self.federation.algorithm.phase
        for past in (n for n in range(self.round + 1, round) if phase(n).summed):
            cohort = self.federation.cohort(past)
            exchange = SecureExchange(self, past, self.losses(past, cohort))
            exchange.run(dict.fromkeys(cohort, np.zeros(0, np.int8)), 1)

    def losses(self, round: int, cohort: tuple[int, ...]) -> LostAt:
        """Draw the stage at which each of a round's lost clients is lost."""
        lost = self.federation.lost_clients(round, cohort)
        draw = stream(self.federation.task.seed, "lost stage", round)
        stages = draw.integers(len(LOSSES), size=len(cohort))
        return {n: LOSSES[at] for n, at in zip(cohort, stages, strict=True) if n in lost}

    def client(self, number: int) -> SecureClient:
        """Return a client, which makes its keys when it is first used."""
        if number not in self.clients:
            weight = int(self.federation.weight(number))
            client = SecureClient(self.federation.run_id, number, weight, self.settings)
            self.clients[number] = client
        return self.clients[number]


@dataclass
class SecureExchange:
    """The protocol of one round. ``uploaded`` are the clients that sent masked values."""

    parties: SecureRounds
    round: int
    lost_at: LostAt
    uploaded: set[int] = field(default_factory=set)
    sizes: StageBytes = field(default_factory=StageBytes)

    def run(self, codes: Mapping[int, Codes], largest: int) -> SecureSum:
        """Return the sum; it is empty, with the reason as a problem, if the round stops."""

        def answer(stage: SecureStage, client: int, request: bytes) -> bytes | None:
            if stage >= self.lost_at.get(client, max(SecureStage) + 1):
                return None
            self.uploaded.update([client] if stage is SecureStage.MASKED else [])
            values = partial_codes(codes[client])
            try:
                return reply_of(self.parties.client(client), stage, request, values)
            except Refusal:
                return None

        def ask(request: Request) -> Replies:
            answers = {u: answer(request.stage, u, m) for u, m in request.messages.items()}
            return {u: reply for u, reply in answers.items() if reply is not None}

        n, server = len(next(iter(codes.values()), ())), self.parties.server
        self.parties.round = self.round
        try:
            return run_exchange(server, self.round, sorted(codes), n, largest, ask, self.sizes)
        except SecureSumStopped as problem:
            reasons = dict.fromkeys(codes, f"no secure sum: {problem}") | server.problems
            return SecureSum(np.zeros(n, np.int64), {}, reasons)


def partial_codes(codes: Codes) -> Callable[[], Integers]:
    """Return a function that widens a client's codes when they are masked."""
    return lambda: codes.astype(np.int64)


def separated(
    replies: Iterable[Reply], roles: Sequence[Role]
) -> tuple[dict[int, ClientResult], dict[int, Codes], int]:
    """Return, by client, the upload without some roles and their codes; and the largest code."""
    uploads, codes, largest = dict[int, ClientResult](), dict[int, Codes](), 1
    for reply in replies:
        for result in reply if isinstance(reply, Results) else [reply]:
            assert isinstance(result, ClientResult)  # all clients are on this machine
            kept, found, top = codes_of(result.update, roles)
            uploads[result.client] = replace(result, update=kept, size=None)
            codes[result.client], largest = found, max(largest, top)
    return uploads, codes, largest


def codes_of(update: Update, roles: Sequence[Role]) -> tuple[Update, Codes, int]:
    """Return one client's update without some roles, their codes, and the largest possible code."""
    parts = {role: part for part in update.parts for role in part.values if role in roles}
    coders = [parts[role].values[role].coder for role in roles]
    if not all(isinstance(coder, Integer) for coder in coders):
        raise TypeError("a method's summed values must be sent with the coder Integer")
    codes = [parts[role].values[role].quantized.codes[0].cpu().numpy() for role in roles]
    rest = tuple(part for part in update.parts if not set(part.values) & set(roles))
    largest = max(2 ** (coder.bits - 1) - 1 for coder in coders if isinstance(coder, Integer))
    return Update(rest, update.weights), np.concatenate(codes), largest


def add_sum(total: State, roles: Sequence[Role], values: Integers) -> None:
    """Add a secure sum to the vectors of its roles."""
    at = 0
    for role in roles:
        vector = vector_for(role, total)
        part = torch.from_numpy(values[at : at + len(vector)])
        vector.add_(part.to(vector))
        at += len(vector)
