"""The errors of secure aggregation."""

from __future__ import annotations


class Refusal(ValueError):
    """A party refuses a message: it is malformed, or answering it would reveal too much."""


class SecureSumStopped(RuntimeError):
    """A round's sum cannot be computed, and no client's values are revealed."""


def require(condition: bool, message: str) -> None:
    """Raise :class:`Refusal` unless a condition holds.

    >>> require(False, "a signature is wrong")
    Traceback (most recent call last):
    ...
    fedsift.privacy.secure.refusal.Refusal: a signature is wrong
    """
    if not condition:
        raise Refusal(message)
