"""The ranges of the constants that the theorems accept."""

from __future__ import annotations

import math
from collections.abc import Callable

Rule = tuple[str, Callable[[float], bool]]

_AT_LEAST_0: Rule = ("a number of at least 0", lambda x: x >= 0)
_POSITIVE: Rule = ("a positive number", lambda x: x > 0)
_COUNT: Rule = ("a whole number of at least 1", lambda x: x >= 1 and x == int(x))

RULES: dict[str, Rule] = {
    "l": _COUNT,
    "steps": ("a whole number of at least 0", lambda x: x >= 0 and x == int(x)),
    "d": _COUNT,
    "rounds": _COUNT,
    "local_steps": _COUNT,
    "batch": _COUNT,
    "beta1": ("in [0, 1)", lambda x: 0 <= x < 1),
    "beta2": ("in (0, 1), as φ = β₁/√β₂", lambda x: 0 < x < 1),
    "density": ("in (0, 1]", lambda x: 0 < x <= 1),
    "eps": _POSITIVE,
    "lr": _AT_LEAST_0,
    "rho": _AT_LEAST_0,
    "grad_bound": _AT_LEAST_0,
    "sigma_l": _AT_LEAST_0,
    "sigma_g": _AT_LEAST_0,
    "mu": _POSITIVE,
    "gap": _POSITIVE,
    "w_error": _AT_LEAST_0,
    "m_error": _AT_LEAST_0,
    "v_error": _AT_LEAST_0,
}


def check_constants(**values: float) -> None:
    """Raise ValueError with the valid range unless every value is in its range.

    >>> check_constants(beta2=1.0)
    Traceback (most recent call last):
    ...
    ValueError: beta2 must be in (0, 1), as φ = β₁/√β₂, got 1.0
    """
    for name, value in values.items():
        valid, is_valid = RULES[name]
        if not _is_number(value) or not is_valid(value):
            raise ValueError(f"{name} must be {valid}, got {value!r}")


def _is_number(value: float) -> bool:
    """Whether the value is a finite number in the range of a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer of more than 308 digits
        return False
