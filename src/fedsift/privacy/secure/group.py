"""The group of clients of some rounds, and hashes of what its clients must agree on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fedsift.privacy.secure.hashing import digest
from fedsift.privacy.secure.messages import bitmap
from fedsift.privacy.secure.primitives import PUBLIC_BYTES
from fedsift.privacy.secure.refusal import require
from fedsift.privacy.secure.settings import SecureSettings


@dataclass
class Group:
    """The clients of the current rounds, and how this one is connected to them.

    ``first_round`` is the first round in which it is used.
    """

    members: tuple[int, ...] = ()
    neighbors: tuple[int, ...] = ()
    settings: SecureSettings = field(default_factory=SecureSettings)
    roster: bytes = b""
    first_round: int = 0


def roster_digest(run: bytes, settings: SecureSettings, public: dict[int, bytes]) -> bytes:
    """Return a hash of the run, the settings, and a group's clients with their public keys."""
    keys = (field for v, key in sorted(public.items()) for field in (v, key))
    return digest("roster", run, settings.neighbors, settings.threshold, *keys)


def terms_digest(
    group: Group,
    round: int,
    attempt: int,
    cohort: tuple[int, ...],
    bits: int,
    unit: int,
    basis: bytes,
) -> bytes:
    """Return a hash of what clients must have in common so that their masks cancel."""
    members = bitmap(cohort, group.members)
    return digest("terms", group.roster, round, attempt, members, bits, unit, basis)


def view_digest(terms: bytes, cohort: tuple[int, ...], survivors: tuple[int, ...]) -> bytes:
    """Return what clients sign: the terms of the sum, and whose values are in it."""
    return digest("view", terms, bitmap(survivors, cohort))


def require_distinct(keys: Sequence[bytes]) -> None:
    """Refuse a group in which two clients have the same public key."""
    for part in (slice(PUBLIC_BYTES), slice(PUBLIC_BYTES, None)):
        distinct = {key[part] for key in keys}
        require(len(distinct) == len(keys), "two clients have the same public key")
