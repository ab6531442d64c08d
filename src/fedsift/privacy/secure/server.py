"""The server's side of the protocol, apart from how messages travel.

:meth:`SecureServer.sum_round` is a generator: it yields a :class:`Request` to some clients, gets
their replies, and in the end returns the sum. Clients that do not reply, or whose reply is
malformed, are lost from that stage on.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np

from fedsift.codec.header import varint
from fedsift.privacy.secure.attempt import Attempt, Member
from fedsift.privacy.secure.client import SEALED_BYTES, self_mask_key
from fedsift.privacy.secure.graph import neighbors_of
from fedsift.privacy.secure.group import (
    Group,
    require_distinct,
    roster_digest,
    terms_digest,
    view_digest,
)
from fedsift.privacy.secure.integers import (
    Integers,
    Words,
    bits_for,
    from_words,
    unpack_words,
    word_type,
)
from fedsift.privacy.secure.messages import MessageHeader, Reader, SecureStage, bitmap, client_list
from fedsift.privacy.secure.primitives import (
    KEY_BYTES,
    PUBLIC_BYTES,
    SIGNATURE_BYTES,
    TAG_BYTES,
    add_masks,
    agree,
    combine_shares,
    derive,
    is_signed,
    unseal,
)
from fedsift.privacy.secure.refusal import Refusal, SecureSumStopped, require
from fedsift.privacy.secure.settings import SecureSettings


@dataclass(frozen=True)
class Request:
    """What the server sends at a stage, by client."""

    stage: SecureStage
    messages: Mapping[int, bytes]


Replies = Mapping[int, bytes]
"""Replies by client; clients that did not reply are left out."""


@dataclass(frozen=True)
class SecureSum:
    """The weighted sum of the clients' codes; ``weights`` are those of the clients in it."""

    total: Integers
    weights: Mapping[int, int]
    problems: Mapping[int, str]


class SecureServer:
    """The server of a run. It holds no key of its own.

    ``first_attempt`` is the number of each round's first attempt. A server that is started again
    must begin above the attempts it made before. ``max_weight`` is the largest weight that a client
    may have.
    """

    def __init__(
        self,
        run: bytes,
        settings: SecureSettings,
        first_attempt: int = 0,
        max_weight: int = 2**20,
    ) -> None:
        self.run, self.settings = run, settings
        self.first_attempt, self.max_weight = first_attempt, max_weight
        self.members: dict[int, Member] = {}
        self.group, self.edges = Group(), dict[int, tuple[int, ...]]()
        self.problems: dict[int, str] = {}
        self.round, self.basis = 0, b""

    def sum_round(
        self,
        round: int,
        cohort: Sequence[int],
        n: int,
        largest: int,
        absent: Collection[int] = (),
        basis: bytes = b"",
    ) -> Generator[Request, Replies, SecureSum]:
        """Sum n codes of magnitude ``largest`` at most over a cohort.

        ``absent`` clients of the cohort are known to have no values. ``basis`` is a digest of what
        clients computed the codes from. Raise :class:`SecureSumStopped` if too few clients are
        left.
        """
        self.round, self.basis, self.problems = round, basis, {}
        yield from self._collect_keys([u for u in cohort if u not in absent])
        self._form_group([u for u in cohort if u in self.members])
        yield from self._collect_shares(absent)
        present = [u for u in self.group.members if u not in absent]
        ready = [u for u in present if self.members[u].roster == self.group.roster]
        attempt = self._attempt(self.first_attempt, ready, largest)
        try:
            attempt = yield from self._completed(attempt, n, largest)
        except SecureSumStopped:
            self._require_new_keys(self.group.members)
            raise
        total = from_words(self._unmasked(attempt), attempt.bits) * attempt.unit
        weights = {u: self.members[u].weight for u in attempt.survivors}
        return SecureSum(total, weights, self.problems)

    def _completed(
        self, attempt: Attempt, n: int, largest: int
    ) -> Generator[Request, Replies, Attempt]:
        """Return an attempt with all that unmasks its sum: this one, or one after it."""
        while True:
            yield from self._collect_masked(attempt, n)
            yield from self._collect_consents(attempt)
            if not attempt.lost or len(attempt.signatures) == len(attempt.survivors):
                break
            self._require_new_keys(attempt.cohort)
            yield from self._collect_shares(set(attempt.cohort).difference(attempt.signatures))
            ready = [u for u in attempt.signatures if self.members[u].roster]
            attempt = self._attempt(attempt.number + 1, ready, largest)
        yield from self._collect_self_keys(attempt)
        left = set(attempt.cohort).difference(attempt.self_keys)
        yield from self._recover_self_keys(attempt)
        self._replace_forgotten_shares(left)
        return attempt

    def _replace_forgotten_shares(self, left: Iterable[int]) -> None:
        """Have clients share new keys if too many neighbors have left an attempt, and forgotten."""
        for v in left:
            for u in self.edges[v]:
                member = self.members[u]
                member.forgotten.add(v)
                holders = len(self.edges[u]) - len(member.forgotten)
                if 2 * holders < len(self.edges[u]) + self.group.settings.threshold:
                    member.roster = b""

    def _require_new_keys(self, clients: Iterable[int]) -> None:
        """Have clients share new keys before they mask again: they have masked without a sum."""
        for u in clients:
            self.members[u].roster = b""

    def _collect_keys(self, cohort: Sequence[int]) -> Generator[Request, Replies, None]:
        """Get the public keys of clients that have not sent them."""
        header = MessageHeader(SecureStage.KEYS, self.round, self.first_attempt)
        new = {u: bytes(header) for u in cohort if u not in self.members}
        if not new:
            return
        replies = yield Request(SecureStage.KEYS, new)
        for u, reader in self._opened(replies, new, header):
            try:
                public, weight = reader.take(2 * PUBLIC_BYTES), reader.varint()
                reader.end()
                most = self.max_weight
                require(0 < weight <= most, f"a weight must be from 1 to {most}, got {weight}")
                agree(secrets.token_bytes(32), public[:PUBLIC_BYTES])
                require_distinct([public, *(member.public for member in self.members.values())])
                self.members[u] = Member(public, weight, knows={u})
            except Refusal as problem:
                self.problems[u] = str(problem)

    def _form_group(self, members: list[int]) -> None:
        """Draw the graph of the clients that have sent keys."""
        try:
            settings = self.settings.resolved(len(members))
        except ValueError as problem:
            raise SecureSumStopped(str(problem)) from None
        public = {u: self.members[u].public for u in members}
        roster = roster_digest(self.run, settings, public)
        self.group = Group(tuple(sorted(members)), (), settings, roster)
        self.edges = neighbors_of(members, settings.neighbors, roster)

    def _collect_shares(self, absent: Collection[int]) -> Generator[Request, Replies, None]:
        """Get shares from clients that have none in this group, or were lost since."""
        header = MessageHeader(SecureStage.SHARES, self.round, self.first_attempt)
        members = self.group.members
        present = [u for u in members if u not in absent]
        old = [u for u in present if self.members[u].roster != self.group.roster]
        if not old:
            return
        listed = client_list(members)
        requests = {}
        for u in old:
            new = [v for v in members if v not in self.members[u].knows]
            keys = b"".join(self.members[v].public for v in new)
            requests[u] = bytes(header) + listed + client_list(new) + keys
        replies = yield Request(SecureStage.SHARES, requests)
        for u, reader in self._opened(replies, requests, header):
            try:
                self._take_shares(u, reader)
            except Refusal as problem:
                self.problems[u] = str(problem)

    def _take_shares(self, u: int, reader: Reader) -> None:
        member, receivers = self.members[u], self.edges[u]
        generation = reader.varint()
        require(generation > member.generation, "shares of an old key")
        sealed = [reader.take(SEALED_BYTES) for _ in receivers]
        reader.end()
        for v, share in zip(receivers, sealed, strict=True):
            self.members[v].waiting[u] = varint(u) + varint(generation) + share
        member.generation, member.roster = generation, self.group.roster
        member.forgotten.clear()
        member.knows.update(self.group.members)

    def _attempt(self, number: int, cohort: list[int], largest: int) -> Attempt:
        """Start an attempt with the clients that have enough neighbors."""
        cohort = self._with_quorum(cohort)
        weights = [self.members[u].weight for u in cohort]
        unit = gcd(*weights)
        try:
            bits = bits_for(largest * sum(weights) // unit)
        except Refusal as problem:
            raise SecureSumStopped(str(problem)) from None
        common = number, tuple(cohort), bits, unit
        return Attempt(*common, terms_digest(self.group, self.round, *common, self.basis))

    def _with_quorum(self, clients: Iterable[int]) -> list[int]:
        """Return the clients with a threshold of neighbors among them; stop if there are none."""
        left, before = sorted(clients), -1
        while len(left) != before:
            before, present = len(left), set(left)
            left = [u for u in left if self._is_quorum(u, present)]
            for u in present.difference(left):
                self.problems.setdefault(u, "too few of its neighbors are left")
        settings = self.group.settings
        if len(left) < settings.min_clients:
            raise SecureSumStopped(
                f"too few clients are left: each needs {settings.threshold} of its "
                f"{settings.neighbors} neighbors, and a sum {settings.min_clients} clients"
            )
        return left

    def _is_quorum(self, u: int, present: set[int]) -> bool:
        return len(present.intersection(self.edges[u])) >= self.group.settings.threshold

    def _collect_masked(self, attempt: Attempt, n: int) -> Generator[Request, Replies, None]:
        """Deliver the shares and get the masked values."""
        header = MessageHeader(SecureStage.MASKED, self.round, attempt.number)
        common = bitmap(attempt.cohort, self.group.members) + varint(attempt.bits)
        common = bytes(header) + common + varint(attempt.unit)
        requests = {}
        for u in attempt.cohort:
            waiting = self.members[u].waiting
            shares = [share for v, share in waiting.items() if v in self.edges[u]]
            requests[u] = common + varint(len(shares)) + b"".join(shares)
        replies = yield Request(SecureStage.MASKED, requests)
        for u, reader in self._opened(replies, requests, header):
            self.members[u].waiting.clear()
            try:
                attempt.masked[u] = unpack_words(reader.rest(), n, attempt.bits)
            except Refusal as problem:
                self.problems[u] = str(problem)
        kept = self._with_quorum(attempt.survivors)
        attempt.masked = {u: attempt.masked[u] for u in kept}
        for u in attempt.lost:
            self.members[u].roster = b""

    def _collect_consents(self, attempt: Attempt) -> Generator[Request, Replies, None]:
        """Get signatures of the set of clients in the sum, and the deposits."""
        header = MessageHeader(SecureStage.CONSENT, self.round, attempt.number)
        request = bytes(header) + bitmap(attempt.survivors, attempt.cohort)
        requests = dict.fromkeys(attempt.survivors, request)
        replies = yield Request(SecureStage.CONSENT, requests)
        view = self._view(attempt)
        for u, reader in self._opened(replies, requests, header):
            try:
                signature, deposit = reader.take(SIGNATURE_BYTES), reader.rest()
                lost = set(attempt.lost).intersection(self.edges[u])
                expected = KEY_BYTES * len(lost) + TAG_BYTES if lost else 0
                require(len(deposit) == expected, "a deposit has a wrong length")
                key = self.members[u].public[PUBLIC_BYTES:]
                require(is_signed(key, signature, view), "a signature is wrong")
                attempt.signatures[u], attempt.deposits[u] = signature, deposit
            except Refusal as problem:
                self.problems[u] = str(problem)
        self._with_quorum(attempt.signatures)

    def _collect_self_keys(self, attempt: Attempt) -> Generator[Request, Replies, None]:
        """Show the clients that enough of them agree, and get this round's self masks."""
        header = MessageHeader(SecureStage.REVEAL, self.round, attempt.number)
        requests = {}
        for u in self._with_quorum(attempt.signatures):
            signers = [v for v in self.edges[u] if v in attempt.signatures]
            signers = signers[: self.group.settings.threshold]
            signatures = b"".join(attempt.signatures[v] for v in signers)
            requests[u] = bytes(header) + bitmap(signers, self.edges[u]) + signatures
        replies = yield Request(SecureStage.REVEAL, requests)
        for u, reader in self._opened(replies, requests, header):
            try:
                key = reader.take(KEY_BYTES)
                reader.end()
                self._open_deposit(attempt, u, key)
                attempt.self_keys[u] = key
            except Refusal as problem:
                self.problems[u] = str(problem)

    def _recover_self_keys(self, attempt: Attempt) -> Generator[Request, Replies, None]:
        """Restore the keys of clients that were lost since their masked values arrived."""
        silent = [u for u in attempt.survivors if u not in attempt.self_keys]
        if not silent:
            return
        for u in silent:
            self.members[u].roster = b""
        header = MessageHeader(SecureStage.RECOVER, self.round, attempt.number)
        asked = {v: [u for u in silent if u in self.edges[v]] for v in attempt.self_keys}
        requests = {
            v: bytes(header) + bitmap(missing, self.edges[v])
            for v, missing in asked.items()
            if missing
        }
        replies = yield Request(SecureStage.RECOVER, requests)
        shares: dict[int, dict[int, bytes]] = {u: {} for u in silent}
        for v, reader in self._opened(replies, requests, header):
            try:
                given = reader.chosen(asked[v])
                found = {u: reader.take(KEY_BYTES) for u in given}
                reader.end()
            except Refusal as problem:
                self.problems[v] = str(problem)
                continue
            for u, share in found.items():
                shares[u][self.edges[u].index(v) + 1] = share
        for u, held in shares.items():
            attempt.self_keys[u] = self._restored_key(attempt, u, held)

    def _restored_key(self, attempt: Attempt, u: int, shares: Mapping[int, bytes]) -> bytes:
        """Return the self mask's key of a lost client from its neighbors' shares."""
        least = self.group.settings.threshold
        if len(shares) < least:
            raise SecureSumStopped(
                f"client {u} was lost after its masked values arrived, and {len(shares)} of its "
                f"neighbors can restore its mask, but {least} are needed"
            )
        master = combine_shares(dict(list(shares.items())[:least]))
        key = self_mask_key(master, self.run, u, self.round, attempt.number)
        try:
            self._open_deposit(attempt, u, key)
        except Refusal:
            raise SecureSumStopped(f"the shares of client {u} do not restore its key") from None
        return key

    def _open_deposit(self, attempt: Attempt, u: int, self_key: bytes) -> dict[int, bytes]:
        """Return the keys of the masks that a client shares with lost neighbors."""
        lost = [v for v in self.edges[u] if v in set(attempt.lost)]
        if not lost:
            return {}
        opened = unseal(derive(self_key, "deposit"), attempt.deposits[u], self._view(attempt))
        parts = (opened[at : at + KEY_BYTES] for at in range(0, len(opened), KEY_BYTES))
        return dict(zip(lost, parts, strict=True))

    def _unmasked(self, attempt: Attempt) -> Words:
        """Return the sum of the masked values without the masks."""
        total = np.zeros(len(next(iter(attempt.masked.values()))), word_type(attempt.bits))
        for u, words in attempt.masked.items():
            total += words
            pairs = self._open_deposit(attempt, u, attempt.self_keys[u])
            added = [attempt.self_keys[u], *(key for v, key in pairs.items() if v > u)]
            add_masks(total, [key for v, key in pairs.items() if v < u], added)
        return total

    def _view(self, attempt: Attempt) -> bytes:
        return view_digest(attempt.terms, attempt.cohort, attempt.survivors)

    def _opened(
        self, replies: Replies, asked: Iterable[int], header: MessageHeader
    ) -> Generator[tuple[int, Reader], None, None]:
        """Yield the replies with the right header; the others are problems."""
        for u in asked:
            if u not in replies:
                self.problems.setdefault(u, f"no reply to {header.stage.name.lower()}")
                continue
            reader = Reader(replies[u])
            try:
                reader.expect(header)
            except Refusal as problem:
                self.problems[u] = str(problem)
                continue
            yield u, reader
