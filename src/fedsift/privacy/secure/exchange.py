"""The whole protocol in one process, for simulations: every message is built, sent and counted."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from fedsift.privacy.secure.client import SecureClient
from fedsift.privacy.secure.integers import Integers
from fedsift.privacy.secure.messages import SecureStage
from fedsift.privacy.secure.server import Replies, Request, SecureServer, SecureSum
from fedsift.privacy.secure.settings import SecureTraffic


@dataclass
class StageBytes:
    """The bytes of each stage's messages, over all clients: requests go down, replies up."""

    up: dict[SecureStage, int] = field(default_factory=dict)
    down: dict[SecureStage, int] = field(default_factory=dict)

    def count(self, request: Request, replies: Replies) -> None:
        """Add the messages of a stage."""
        for found, messages in ((self.down, request.messages), (self.up, replies)):
            size = sum(map(len, messages.values()))
            found[request.stage] = found.get(request.stage, 0) + size

    def per_client(self, clients: int) -> SecureTraffic:
        """Return the means per client by the stages' names."""
        return SecureTraffic(
            {stage.name.lower(): size / clients for stage, size in self.up.items()},
            {stage.name.lower(): size / clients for stage, size in self.down.items()},
        )


Ask = Callable[[Request], Replies]
"""Sends the requests of a stage, and returns the replies of the clients that are not lost."""


def run_exchange(
    server: SecureServer,
    round: int,
    cohort: Sequence[int],
    n: int,
    largest: int,
    ask: Ask,
    sizes: StageBytes,
    absent: Collection[int] = (),
    basis: bytes = b"",
) -> SecureSum:
    """Run the protocol for a round, and count its messages in ``sizes``.

    Lost clients do not get the requests that follow.
    """
    protocol = server.sum_round(round, cohort, n, largest, absent, basis)
    replies: Replies | None = None
    while True:
        try:
            request = next(protocol) if replies is None else protocol.send(replies)
        except StopIteration as end:
            found: SecureSum = end.value
            return found
        replies = ask(request)
        sizes.count(request, replies)


def reply_of(
    client: SecureClient,
    stage: SecureStage,
    request: bytes,
    codes: Callable[[], Integers],
    basis: bytes = b"",
) -> bytes:
    """Return a client's reply to a request, or raise ``Refusal``."""
    if stage is SecureStage.MASKED:
        return client.mask(request, codes(), basis)
    methods: Mapping[SecureStage, Callable[[bytes], bytes]] = {
        SecureStage.KEYS: client.keys,
        SecureStage.SHARES: client.deal_shares,
        SecureStage.CONSENT: client.consent,
        SecureStage.REVEAL: client.reveal,
        SecureStage.RECOVER: client.recover,
    }
    return methods[stage](request)
