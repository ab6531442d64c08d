"""The client's side of the protocol: what it sends, and what it refuses.

A client never helps to remove both the pairwise masks and the self masks of another client, whoever
asks: see :meth:`SecureClient.consent` and :meth:`SecureClient.recover`. Keys of self masks that
could open more than one masked vector are not used again: see :meth:`SecureClient.mask`.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from fedsift.codec.header import varint
from fedsift.privacy.secure.graph import neighbors_of
from fedsift.privacy.secure.group import (
    Group,
    require_distinct,
    roster_digest,
    terms_digest,
    view_digest,
)
from fedsift.privacy.secure.hashing import digest
from fedsift.privacy.secure.integers import MAX_BITS, Integers, pack_words, to_words, word_type
from fedsift.privacy.secure.messages import MessageHeader, Reader, SecureStage, bitmap
from fedsift.privacy.secure.primitives import (
    KEY_BYTES,
    PUBLIC_BYTES,
    SIGNATURE_BYTES,
    TAG_BYTES,
    add_masks,
    agree,
    agreement_public_key,
    derive,
    is_signed,
    seal,
    sign,
    signing_public_key,
    split_secret,
    unseal,
)
from fedsift.privacy.secure.refusal import Refusal, require
from fedsift.privacy.secure.settings import SecureSettings

SEALED_BYTES = KEY_BYTES + TAG_BYTES


@dataclass
class Peer:
    """What a client knows about another one.

    ``share`` is its share of the peer's key of self masks, of which the peer makes a new
    *generation* after it was lost. ``is_opened``: this client has given that share away.
    ``is_dropped``: it has given pairwise masks of the peer away while this generation lasted.
    """

    public: bytes
    secret: bytes
    generation: int = 0
    share: bytes = b""
    is_opened: bool = False
    is_dropped: bool = False

    @property
    def is_spent(self) -> bool:
        """Whether the peer must share a new key before this client masks with it again."""
        return self.is_opened or self.is_dropped


@dataclass
class Current:
    """The round that a client takes part in, and how far it got.

    ``terms`` is a digest of all that the clients of a sum must have in common.
    """

    round: int = 0
    attempt: int = -1
    cohort: tuple[int, ...] = ()
    terms: bytes = b""
    self_key: bytes = b""
    survivors: tuple[int, ...] = ()
    consent: bytes = b""


@dataclass
class SecureClient:
    """One client. Its private keys never leave it; ``weight`` is its weight in the sum.

    ``public`` are the public keys of the clients that it knows. Once known, they never change.
    ``is_pending``: it has masked values with its current key, and not revealed that mask. Each
    method takes a request of the server and returns the reply, or raises :class:`Refusal`.
    """

    run: bytes
    client: int
    weight: int
    settings: SecureSettings = field(default_factory=SecureSettings)
    agreement_key: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    signing_key: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    generation: int = 0
    master: bytes = b""
    is_pending: bool = False
    group: Group = field(default_factory=Group)
    public: dict[int, bytes] = field(default_factory=dict)
    peers: dict[int, Peer] = field(default_factory=dict)
    current: Current = field(default_factory=Current)
    revealed_round: int = 0

    def __post_init__(self) -> None:
        own = agreement_public_key(self.agreement_key) + signing_public_key(self.signing_key)
        self.public[self.client] = own

    def keys(self, request: bytes) -> bytes:
        """Return the public keys and the weight."""
        reader = Reader(request)
        header = _header_of(reader, SecureStage.KEYS)
        reader.end()
        return bytes(header) + self.public[self.client] + varint(self.weight)

    def deal_shares(self, request: bytes) -> bytes:
        """Make a new key of self masks, and return an encrypted share for each neighbor."""
        reader = Reader(request)
        header = _header_of(reader, SecureStage.SHARES)
        self._join_group(reader, header.round)
        self.generation += 1
        self.master, self.is_pending = secrets.token_bytes(KEY_BYTES), False
        neighbors = self.group.neighbors
        shares = split_secret(self.master, self.group.settings.threshold, len(neighbors))
        sealed = (self._seal_share(v, share) for v, share in zip(neighbors, shares, strict=True))
        return bytes(header) + varint(self.generation) + b"".join(sealed)

    def mask(self, request: bytes, codes: Integers, basis: bytes = b"") -> bytes:
        """Store the neighbors' new shares, and return this client's masked codes.

        The codes are whole numbers; they are multiplied by the client's weight, divided by the
        unit in which the server counts weights. ``basis`` is a digest of what the server sent for
        computing them. Masks cancel only between clients that were told the same: the group, the
        cohort, the bits, the unit and the basis. A server could otherwise give all clients but one
        a model or a unit with which their values vanish, and the sum would be that client's.

        All self masks of a client derive from one key, which its neighbors can restore. That key
        must never open a masked vector of an attempt that this client left without a sum. So a
        client that did not reveal its last mask needs a new key, and forgets the shares of those it
        masked with. It also needs new keys of neighbors whose shares or masks it gave away.
        """
        reader = Reader(request)
        header = _header_of(reader, SecureStage.MASKED)
        self._check_is_new(header)
        self._leave_attempt()
        cohort = reader.chosen(self.group.members)
        bits, unit = reader.varint(), reader.varint()
        self._store_shares(reader)
        self._check_quorum(cohort)
        self._check_keys(cohort)
        weighted = codes * self._weight_in(unit)
        require(1 < bits <= MAX_BITS, f"{bits} bits per value are not possible")
        fits = not codes.size or int(abs(weighted).max()) < 2 ** (bits - 1)
        require(fits, f"this client's values do not fit {bits} bits")
        self_key = self._self_key(header.round, header.attempt)
        terms = terms_digest(self.group, header.round, header.attempt, cohort, bits, unit, basis)
        self.current = Current(header.round, header.attempt, cohort, terms, self_key)
        words = to_words(weighted, bits).astype(word_type(bits))
        self.is_pending = True
        keys = {v: self._pair_key(v) for v in self._partners()}
        added = [self_key, *(key for v, key in keys.items() if v > self.client)]
        add_masks(words, added, [key for v, key in keys.items() if v < self.client])
        return bytes(header) + pack_words(words, bits)

    def consent(self, request: bytes) -> bytes:
        """Sign the set of clients in the sum, and deposit the pairwise masks of all others.

        A client signs one set per round and attempt. The deposit is encrypted with the key of its
        own self mask, so that it opens only if this client's values are in the sum. It refuses to
        deposit masks of a client whose self masks it helped to restore.
        """
        reader = Reader(request)
        reader.expect(self._header(SecureStage.CONSENT))
        survivors = reader.chosen(self.current.cohort)
        reader.end()
        self._check_quorum(survivors)
        if self.current.consent:
            require(survivors == self.current.survivors, "this client has signed another set")
            return self.current.consent
        lost = self._lost_neighbors(survivors)
        require(
            not any(self.peers[v].is_opened for v in lost),
            "a client whose self masks are known cannot be left out of the sum",
        )
        for v in lost:
            self.peers[v].is_dropped = True
        self.current.survivors = survivors
        signature = sign(self.signing_key, self._view())
        self.current.consent = (
            bytes(self._header(SecureStage.CONSENT)) + signature + self._deposit_for(lost)
        )
        return self.current.consent

    def reveal(self, request: bytes) -> bytes:
        """Reveal this round's self mask, if enough neighbors have signed the same set."""
        reader = Reader(request)
        reader.expect(self._header(SecureStage.REVEAL))
        require(bool(self.current.consent), "this client has not signed a set of clients")
        signers = reader.chosen(self.group.neighbors)
        require(
            len(signers) >= self.group.settings.threshold,
            "too few neighbors have signed the same set",
        )
        for v in signers:
            key, signature = self.peers[v].public[PUBLIC_BYTES:], reader.take(SIGNATURE_BYTES)
            is_valid = v in self.current.survivors and is_signed(key, signature, self._view())
            require(is_valid, f"client {v} has not signed the same set of clients")
        reader.end()
        self.revealed_round, self.is_pending = self.current.round, False
        return bytes(self._header(SecureStage.REVEAL)) + self.current.self_key

    def recover(self, request: bytes) -> bytes:
        """Return shares of the keys of neighbors that are in the sum and were lost since.

        It refuses shares of a client whose pairwise masks it gave away with the same generation.
        """
        reader = Reader(request)
        reader.expect(self._header(SecureStage.RECOVER))
        asked = reader.chosen(self.group.neighbors)
        reader.end()
        require(self.revealed_round == self.current.round, "no sum was agreed on in this round")
        require(set(asked) <= set(self.current.survivors), "a client is not in the sum")
        refused = [v for v in asked if self.peers[v].is_dropped]
        require(not refused, f"masks of clients {refused} were given away: their shares are not")
        given = [v for v in asked if self.peers[v].share]
        for v in given:
            self.peers[v].is_opened = True
        shares = b"".join(self.peers[v].share for v in given)
        return bytes(self._header(SecureStage.RECOVER)) + bitmap(given, asked) + shares

    def _join_group(self, reader: Reader, round: int) -> None:
        """Read the clients of the next rounds, and the public keys of those not yet known.

        A client does not change to another group within a round, as there could be a second sum of
        the values that it has masked.
        """
        self._leave_attempt()
        members, known = reader.clients(), dict(self.public)
        require(self.client in members, "the group does not include this client")
        for v in reader.clients():
            key = reader.take(2 * PUBLIC_BYTES)
            require(known.setdefault(v, key) == key, f"the public keys of client {v} have changed")
        reader.end()
        require(known.keys() >= set(members), "the public keys of a client are missing")
        require_distinct([known[v] for v in members])
        try:
            settings = self.settings.resolved(len(members))
        except ValueError as problem:
            raise Refusal(str(problem)) from None
        roster = roster_digest(self.run, settings, {v: known[v] for v in members})
        first_round = self._first_round_of(roster, round)
        mine = neighbors_of(members, settings.neighbors, roster)[self.client]
        new = {
            v: Peer(known[v], agree(self.agreement_key, known[v][:PUBLIC_BYTES]))
            for v in mine
            if v not in self.peers
        }
        self.public, self.peers = known, {**self.peers, **new}
        self.group = Group(members, mine, settings, roster, first_round)
        self.current = Current(self.current.round, self.current.attempt)

    def _first_round_of(self, roster: bytes, round: int) -> int:
        """Return the first round of a group, or refuse to change to it within a round."""
        if roster == self.group.roster:
            return self.group.first_round
        require(round > self.current.round, "the group has changed within a round")
        return round

    def _seal_share(self, receiver: int, share: bytes) -> bytes:
        context = share_context(self.run, self.client, receiver, self.generation)
        return seal(derive(self.peers[receiver].secret, context), share, self.group.roster)

    def _store_shares(self, reader: Reader) -> None:
        """Store new shares of neighbors, except old ones and those that cannot be decrypted."""
        for _ in range(reader.varint()):
            sender, generation = reader.varint(), reader.varint()
            sealed = reader.take(SEALED_BYTES)
            require(sender in self.group.neighbors, f"client {sender} is not a neighbor")
            peer = self.peers[sender]
            if generation <= peer.generation:
                continue
            context = share_context(self.run, sender, self.client, generation)
            try:
                share = unseal(derive(peer.secret, context), sealed, self.group.roster)
            except Refusal:
                continue
            self.peers[sender] = Peer(peer.public, peer.secret, generation, share)
        reader.end()

    def _check_is_new(self, header: MessageHeader) -> None:
        """Refuse to mask twice in an attempt, or after a sum of the round was revealed."""
        now = self.current
        is_new = (header.round, header.attempt) > (now.round, now.attempt)
        require(is_new and header.round > self.revealed_round, "this round was masked before")
        require(header.round >= self.group.first_round, "this group is for later rounds")
        require(bool(self.master), "this client has not shared its key")

    def _check_quorum(self, clients: tuple[int, ...]) -> None:
        """Refuse a set without this client, or with too few clients or neighbors."""
        require(self.client in clients, "the set does not include this client")
        fewest = self.group.settings.min_clients
        require(len(clients) >= fewest, f"{len(clients)} clients take part, not {fewest}")
        present = sum(v in set(clients) for v in self.group.neighbors)
        least = self.group.settings.threshold
        require(present >= least, f"{present} neighbors take part, but {least} are needed")

    def _leave_attempt(self) -> None:
        """Forget shares that could open masked vectors of an attempt without a sum."""
        for v in self._partners() if self.is_pending else []:
            self.peers[v].share = b""

    def _check_keys(self, cohort: tuple[int, ...]) -> None:
        """Refuse to mask with keys of self masks that may open an earlier masked vector."""
        require(not self.is_pending, "this client must share a new key first")
        spent = [v for v in self.group.neighbors if v in set(cohort) and self.peers[v].is_spent]
        require(not spent, f"clients {spent} must share new keys first")

    def _partners(self) -> list[int]:
        """Return the neighbors with which this client masks in the current attempt."""
        cohort = set(self.current.cohort)
        return [v for v in self.group.neighbors if v in cohort]

    def _weight_in(self, unit: int) -> int:
        is_whole = unit > 0 and self.weight % unit == 0
        require(is_whole, f"the weight {self.weight} is not a multiple of {unit}")
        return self.weight // unit

    def _self_key(self, round: int, attempt: int) -> bytes:
        return self_mask_key(self.master, self.run, self.client, round, attempt)

    def _pair_key(self, other: int) -> bytes:
        """Return the key of the mask that this client and another one share in this attempt."""
        low, high = sorted((self.client, other))
        return derive(self.peers[other].secret, "pair", low, high, self.current.terms)

    def _lost_neighbors(self, survivors: tuple[int, ...]) -> list[int]:
        lost = set(self.current.cohort) - set(survivors)
        return [v for v in self.group.neighbors if v in lost]

    def _deposit_for(self, lost: list[int]) -> bytes:
        """Return the keys of the masks shared with lost clients, encrypted."""
        keys = b"".join(self._pair_key(v) for v in lost)
        key = derive(self.current.self_key, "deposit")
        return seal(key, keys, self._view()) if lost else b""

    def _header(self, stage: SecureStage) -> MessageHeader:
        return MessageHeader(stage, self.current.round, self.current.attempt)

    def _view(self) -> bytes:
        return view_digest(self.current.terms, self.current.cohort, self.current.survivors)


def _header_of(reader: Reader, stage: SecureStage) -> MessageHeader:
    header = reader.header()
    require(header.stage is stage, f"expected {stage.name.lower()}, got {header.stage.name}")
    return header


def share_context(run: bytes, sender: int, receiver: int, generation: int) -> bytes:
    """Return the purpose of the key that encrypts one share."""
    return digest("share", run, sender, receiver, generation)


def self_mask_key(master: bytes, run: bytes, client: int, round: int, attempt: int) -> bytes:
    """Return the key of a client's self mask of one attempt."""
    return derive(master, "self", run, client, round, attempt)
