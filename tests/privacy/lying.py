"""A server of secure aggregation that sends each client what it likes."""

from collections.abc import Iterable, Mapping

from fedsift.privacy.secure import Refusal, SecureSettings
from fedsift.privacy.secure.messages import MessageHeader, SecureStage, bitmap, client_list, varint
from fedsift.privacy.secure.primitives import is_signed
from privacy.curious import CuriousServer
from privacy.parties import Parties, random_codes

METHODS: Mapping[SecureStage, str] = {
    SecureStage.SHARES: "deal_shares",
    SecureStage.CONSENT: "consent",
    SecureStage.REVEAL: "reveal",
    SecureStage.RECOVER: "recover",
}


class LyingServer:
    """Sends each client what it likes. It holds every masked vector and every signature."""

    def __init__(self, clients: int, weight: int = 1, **settings: int) -> None:
        weights = dict.fromkeys(range(clients), weight)
        self.parties = Parties(weights, SecureSettings(**settings))
        self.clients, self.all = self.parties.clients, tuple(range(clients))
        self.curious = CuriousServer(self.parties)
        self.signatures: dict[int, list[bytes]] = {u: [] for u in self.all}
        self.parties.sum_round(1, random_codes(clients))
        self.refusals: list[str] = []
        self.waiting: dict[int, dict[int, bytes]] = {}
        self.threshold = self.clients[0].group.settings.threshold

    def ask(self, stage: SecureStage, u: int, request: bytes) -> bytes | None:
        """Return a client's reply, None if it refuses; record it."""
        try:
            reply = getattr(self.clients[u], METHODS[stage])(request)
        except Refusal as problem:
            self.refusals.append(str(problem))
            return None
        self.parties.received.setdefault((stage, u), []).append(reply)
        self.curious.note(stage, u)
        return reply

    def mask(
        self,
        u: int,
        round: int,
        attempt: int,
        cohort: Iterable[int],
        bits: int = 8,
        unit: int = 1,
        basis: bytes = b"",
    ) -> bytes | None:
        """Ask for masked values, with the shares that wait for the client, on terms of its own."""
        chosen = bitmap(set(cohort), self.clients[u].group.members)
        request = bytes(MessageHeader(SecureStage.MASKED, round, attempt)) + chosen
        waiting = self.waiting.get(u, {}).values()
        request += varint(bits) + varint(unit) + varint(len(waiting)) + b"".join(waiting)
        codes = random_codes(len(self.all), seed=round)[u]
        try:
            reply = self.clients[u].mask(request, codes, basis)
        except Refusal as problem:
            self.refusals.append(str(problem))
            return None
        self.parties.received.setdefault((SecureStage.MASKED, u), []).append(reply)
        self.curious.note(SecureStage.MASKED, u)
        return reply

    def consent(self, u: int, survivors: Iterable[int]) -> bytes | None:
        now = self.clients[u].current
        request = bytes(MessageHeader(SecureStage.CONSENT, now.round, now.attempt))
        reply = self.ask(SecureStage.CONSENT, u, request + bitmap(set(survivors), now.cohort))
        if reply is not None:
            self.signatures[u].append(reply[3 : 3 + 64])
        return reply

    def reveal(self, u: int) -> bytes | None:
        """Show a client every signature that matches what it was told."""
        client = self.clients[u]
        now, view = client.current, client._view()
        shown = {
            v: signature
            for v in client.group.neighbors
            for signature in self.signatures[v]
            if v in now.survivors and is_signed(client.public[v][32:], signature, view)
        }
        request = bytes(MessageHeader(SecureStage.REVEAL, now.round, now.attempt))
        request += bitmap(shown, client.group.neighbors) + b"".join(shown.values())
        return self.ask(SecureStage.REVEAL, u, request)

    def recover(self, u: int, asked: Iterable[int]) -> bytes | None:
        client = self.clients[u]
        request = bytes(
            MessageHeader(SecureStage.RECOVER, client.current.round, client.current.attempt)
        )
        return self.ask(
            SecureStage.RECOVER, u, request + bitmap(set(asked), client.group.neighbors)
        )

    def deal(
        self, u: int, group: Iterable[int] | None = None, round: int = 9, deliver: bool = False
    ) -> bytes | None:
        """Ask for new shares, and keep them or deliver them with the next request for values."""
        members = self.all if group is None else tuple(group)
        request = bytes(MessageHeader(SecureStage.SHARES, round, 0)) + client_list(members)
        reply = self.ask(SecureStage.SHARES, u, request + client_list([]))
        if reply is not None and deliver:
            sealed = reply[len(reply) - 32 * len(self.clients[u].group.neighbors) :]
            generation = varint(u) + varint(self.clients[u].generation)
            for at, v in enumerate(self.clients[u].group.neighbors):
                share = sealed[32 * at : 32 * at + 32]
                self.waiting.setdefault(v, {})[u] = generation + share
        return reply
