"""What the server knows of clients, and of an attempt to sum their values."""

from __future__ import annotations

from dataclasses import dataclass, field

from fedsift.privacy.secure.integers import Words


@dataclass
class Member:
    """What the server knows about a client.

    ``waiting`` holds encrypted shares for it, by sender, until it has received them.
    ``roster`` is the group for which it has shared its key; empty if it must share a new one.
    ``forgotten`` are the neighbors that no longer have their share.
    """

    public: bytes
    weight: int
    generation: int = 0
    roster: bytes = b""
    knows: set[int] = field(default_factory=set)
    waiting: dict[int, bytes] = field(default_factory=dict)
    forgotten: set[int] = field(default_factory=set)


@dataclass
class Attempt:
    """An attempt to sum the values of a cohort: who masked with whom, and what came back.

    ``terms`` is a digest of all that the clients have in common.
    """

    number: int
    cohort: tuple[int, ...]
    bits: int
    unit: int
    terms: bytes
    masked: dict[int, Words] = field(default_factory=dict)
    signatures: dict[int, bytes] = field(default_factory=dict)
    deposits: dict[int, bytes] = field(default_factory=dict)
    self_keys: dict[int, bytes] = field(default_factory=dict)

    @property
    def survivors(self) -> tuple[int, ...]:
        """The clients whose masked values arrived."""
        return tuple(u for u in self.cohort if u in self.masked)

    @property
    def lost(self) -> tuple[int, ...]:
        """The clients whose masked values did not arrive."""
        return tuple(u for u in self.cohort if u not in self.masked)
