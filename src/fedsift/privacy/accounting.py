"""How much privacy rounds of noisy sums cost: ε for a given δ, by Google's dp-accounting.

A round adds each client to its cohort independently with the same probability, sums their clipped
updates, and adds Gaussian noise: a Poisson-sampled Gaussian mechanism. Two sets of clients are
neighbors if one has one client more.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from fedsift.errors import ConfigError, require_packages

ORDERS = (*(1 + n / 4 for n in range(1, 40)), *range(11, 64), 96, 128, 256, 512)
"""The orders of the Rényi divergence that are tried."""
LARGEST_NOISE = 1e6
PRECISION = 1e-4
"""The relative precision of a calibrated noise multiplier."""


@cache
def epsilon_after(rounds: int, noise: float, rate: float, delta: float) -> float:
    """Return ε after some rounds.

    ``noise`` is the standard deviation of the noise on the sum, divided by the largest norm of an
    update; ``rate`` is the probability with which each client trains in a round.

    >>> epsilon_after(0, noise=1.0, rate=0.1, delta=1e-5)
    0.0
    >>> round(epsilon_after(30, noise=1.0, rate=0.1, delta=1e-5), 2)
    4.85
    """
    if not rounds:
        return 0.0
    accounting = require_dp_accounting()
    accountant = accounting.rdp.RdpAccountant(orders=ORDERS)
    event = accounting.GaussianDpEvent(noise)
    with without_warnings():
        sampled = event if rate == 1 else accounting.PoissonSampledDpEvent(rate, event)
        return float(accountant.compose(sampled, rounds).get_epsilon(delta))


def noise_for(epsilon: float, delta: float, rate: float, rounds: int) -> float:
    """Return the smallest noise multiplier with which some rounds cost at most ε.

    >>> noise = noise_for(2.0, 1e-5, rate=0.1, rounds=30)
    >>> 1.99 < epsilon_after(30, noise, 0.1, 1e-5) <= 2.0
    True
    """
    low, high = 1e-2, 1.0
    while epsilon_after(rounds, high, rate, delta) > epsilon:
        low, high = high, 2 * high
        if high > LARGEST_NOISE:
            raise ConfigError(f"no amount of noise gives epsilon {epsilon:g} with delta {delta:g}")
    while high - low > PRECISION * high:
        middle = math.sqrt(low * high)
        if epsilon_after(rounds, middle, rate, delta) > epsilon:
            low = middle
        else:
            high = middle
    return high


def require_dp_accounting() -> Any:
    """Return the package dp_accounting, or say how to install it."""
    require_packages("privacy budgets", "dp_accounting", extra="privacy")
    import dp_accounting
    import dp_accounting.rdp

    return dp_accounting


@contextmanager
def without_warnings() -> Iterator[None]:
    """Silence the warnings about orders that are left out: any order gives a valid bound."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
