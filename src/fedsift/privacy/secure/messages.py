"""The bytes of the protocol's messages. What another party sent is checked before it is used.

Every message starts with its kind, the round and the attempt. The number of its remaining bytes
follows from what the receiver knows.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum

from fedsift.codec.header import varint
from fedsift.privacy.secure.refusal import require

MAX_CLIENTS = 2**20


class SecureStage(IntEnum):
    """The stages of a round, in their order: a request to each client, and its reply.

    ``KEYS``: public keys, once per run. ``SHARES``: encrypted shares of the key of the self masks,
    once per run and after each loss. ``MASKED``: the masked values. ``CONSENT``: a signature of the
    set of clients in the sum. ``REVEAL``: the self mask's key of this round. ``RECOVER``: shares of
    the keys of clients that were lost at the two stages before.
    """

    KEYS = 1
    SHARES = 2
    MASKED = 3
    CONSENT = 4
    REVEAL = 5
    RECOVER = 6


@dataclass(frozen=True)
class MessageHeader:
    """What a message is for."""

    stage: SecureStage
    round: int
    attempt: int

    def __bytes__(self) -> bytes:
        return bytes([self.stage]) + varint(self.round) + varint(self.attempt)


def bitmap(chosen: Collection[int], among: Sequence[int]) -> bytes:
    """Return one bit per client: whether it is chosen.

    >>> bitmap([5, 8], among=[3, 5, 8]).hex()
    '06'
    """
    members = set(chosen)
    bits = sum(1 << at for at, client in enumerate(among) if client in members)
    return bits.to_bytes(-(-len(among) // 8), "little")


def client_list(clients: Sequence[int]) -> bytes:
    """Return ascending clients: their number, the first, and the gaps between them."""
    gaps = [b - a for a, b in zip([0, *clients], clients, strict=False)]
    return b"".join(map(varint, [len(clients), *gaps]))


class Reader:
    """Reads a message from another party; refuses what is malformed.

    >>> Reader(bytes([3])).varint()
    3
    """

    def __init__(self, message: bytes) -> None:
        self.message, self.at = message, 0

    def take(self, size: int) -> bytes:
        """Read this many bytes."""
        taken = self.message[self.at : self.at + size]
        require(len(taken) == size, "a message is too short")
        self.at += size
        return taken

    def rest(self) -> bytes:
        """Read the remaining bytes."""
        return self.take(len(self.message) - self.at)

    def end(self) -> None:
        """Refuse bytes that remain."""
        require(self.at == len(self.message), "a message is too long")

    def varint(self) -> int:
        """Read a number below 2**63."""
        number = 0
        for shift in range(0, 63, 7):
            (byte,) = self.take(1)
            number |= (byte & 127) << shift
            if byte < 128:
                return number
        require(False, "a number in a message is too large")
        return 0

    def header(self) -> MessageHeader:
        """Read the header."""
        (kind,) = self.take(1)
        require(kind in list(SecureStage), f"unknown kind of message {kind}")
        return MessageHeader(SecureStage(kind), self.varint(), self.varint())

    def expect(self, header: MessageHeader) -> None:
        """Read the header, and refuse any other than this one."""
        found = self.header()
        require(
            found == header,
            f"expected {header.stage.name.lower()} of round {header.round}, attempt "
            f"{header.attempt}, got {found.stage.name.lower()} of {found.round}, {found.attempt}",
        )

    def chosen(self, among: Sequence[int]) -> tuple[int, ...]:
        """Read a :func:`bitmap`."""
        bits = int.from_bytes(self.take(-(-len(among) // 8)), "little")
        require(bits < 1 << len(among), "a set names a client that does not exist")
        return tuple(client for at, client in enumerate(among) if bits >> at & 1)

    def clients(self) -> tuple[int, ...]:
        """Read a :func:`client_list`."""
        count = self.varint()
        require(count <= min(MAX_CLIENTS, len(self.message)), "a message names too many clients")
        found: list[int] = []
        for _ in range(count):
            gap = self.varint()
            require(gap > 0 or not found, "a list of clients is not ascending")
            found.append((found[-1] if found else 0) + gap)
        return tuple(found)
