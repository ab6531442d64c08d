"""Sums and powers of numbers given by their natural logarithms; log 0 is -inf."""

from __future__ import annotations

import math

LOG_ZERO = -math.inf
"""The logarithm of zero."""


def log(x: float) -> float:
    """Return the natural logarithm, with log 0 = -inf.

    >>> log(0.0), log(1.0)
    (-inf, 0.0)
    """
    return math.log(x) if x else LOG_ZERO


def log_sum(*terms: float) -> float:
    """Return log Σ exp(terms), without overflow.

    >>> round(log_sum(1000.0, 1000.0), 9)
    1000.693147181
    >>> log_sum(LOG_ZERO, LOG_ZERO)
    -inf
    """
    top = max(terms)
    if top == LOG_ZERO:
        return LOG_ZERO
    rest = list(terms)
    rest.remove(top)
    return top + math.log1p(sum(math.exp(t - top) for t in rest))


def log1p_exp(x: float) -> float:
    """Return log(1 + exp x), accurate for large and small x.

    >>> log1p_exp(1000.0), log1p_exp(LOG_ZERO)
    (1000.0, 0.0)
    """
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def log_expm1(x: float) -> float:
    """Return log(exp x - 1) for x ≥ 0.

    >>> log_expm1(0.0), log_expm1(1000.0)
    (-inf, 1000.0)
    """
    if x < 1:
        return log(math.expm1(x))
    return x + math.log1p(-math.exp(-x))


def log_geometric(a: float, n: int) -> float:
    """Return log Σ exp(j a) over j = 1 … n, for a ≥ 0.

    >>> round(math.exp(log_geometric(math.log(2), 3)), 9)
    14.0
    >>> log_geometric(0.0, 1)
    0.0
    """
    if n == 0:
        return LOG_ZERO
    if a == 0:
        return math.log(n)
    return a + log_expm1(n * a) - log_expm1(a)
