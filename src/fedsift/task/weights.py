"""Clients' weights in the mean of their updates."""

from __future__ import annotations

from typing import Literal, get_args

Weights = Literal["batch", "examples", "equal"]
"""What a client's weight is: its mini-batch size, its number of samples, or 1."""
WEIGHTS: tuple[Weights, ...] = get_args(Weights)


def weight_of(weights: Weights, samples: float, batch: float) -> float:
    """Return the weight of a client with this many samples and this mini-batch size.

    It grows with both, so the weight for the largest numbers is the largest weight.

    >>> [weight_of(weights, samples=100, batch=32) for weights in WEIGHTS]
    [32, 100, 1]
    """
    return {"batch": batch, "examples": samples, "equal": 1}[weights]


def check_weights(weights: str | None) -> None:
    """Refuse anything but the name of a rule, or None.

    >>> check_weights("samples")
    Traceback (most recent call last):
    ...
    ValueError: weights must be batch, examples or equal, or None for the method's own, got \
'samples'
    """
    if weights is not None and weights not in WEIGHTS:
        raise ValueError(
            "weights must be batch, examples or equal, or None for the method's own, "
            f"got {weights!r}"
        )
