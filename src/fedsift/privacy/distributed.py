"""Differential privacy of a secure sum: every client adds a share of the noise before it masks.

P. Kairouz, Z. Liu and T. Steinke, "The Distributed Discrete Gaussian Mechanism for Federated
Learning with Secure Aggregation", ICML 2021. The server sees noisy sums only. Clients are lost, and
their noise with them, so each adds enough for the fewest clients that a sum may have:

    σ_i² = ⌈(z C)² / clients in the smallest sum⌉

The sum of discrete Gaussians is nearly a discrete Gaussian. The difference is a bound on the ratio
of the probabilities of every outcome, and is added to ε.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fedsift.errors import ConfigError
from fedsift.privacy.accounting import epsilon_after
from fedsift.privacy.discrete_gaussian import MAX_VARIANCE, Bits, Integers, discrete_gaussian

MIN_VARIANCE = 4
"""The least noise per client: with less, a sum of few would differ from a discrete Gaussian."""
TAIL = 8
"""A sum stays within this many standard deviations of its noise, or it wraps around."""


@dataclass(frozen=True)
class DistributedNoise:
    """The noise that each client adds to its whole numbers.

    ``clip`` is the largest L2 norm of a client's numbers, ``multiplier`` the noise multiplier z of
    the smallest sum. A sum has at least ``fewest`` and at most ``most`` clients, and ``values``
    numbers.

    >>> noise = DistributedNoise(clip=20.0, multiplier=1.0, fewest=13, most=20, values=655)
    >>> noise.variance, noise.largest(3)
    (31, 13)
    """

    clip: float
    multiplier: float
    fewest: int
    most: int
    values: int

    def __post_init__(self) -> None:
        if self.clip < 1:
            raise ConfigError(
                f"a secure sum is of whole numbers, so the clip is at least 1, got {self.clip:g}"
            )
        if self.variance > MAX_VARIANCE:
            raise ConfigError(
                f"a clip of {self.clip:g} with the noise {self.multiplier:g} is too much for whole "
                f"numbers: their product must be at most {math.isqrt(MAX_VARIANCE * self.fewest)}"
            )

    @property
    def variance(self) -> int:
        """The parameter σ² of a client's noise."""
        return max(MIN_VARIANCE, math.ceil((self.multiplier * self.clip) ** 2 / self.fewest))

    def largest(self, code: int) -> int:
        """Return a bound on the mean over the clients of codes with noise."""
        return code + math.ceil(TAIL * math.sqrt(self.variance / self.most))

    def clipped(self, codes: Integers) -> Integers:
        """Return whole numbers with a norm of at most the clip, rounded toward zero.

        >>> DistributedNoise(6.0, 1.0, 2, 2, 2).clipped(np.array([6, -8]))
        array([ 3, -4])
        """
        norm = math.sqrt(int((codes.astype(np.int64) ** 2).sum()))
        if norm <= self.clip:
            return codes
        shorter = np.trunc(codes * (self.clip / norm) * (1 - 1e-12))
        return np.asarray(shorter, codes.dtype)

    def added_to(self, codes: Integers, bits: Bits) -> Integers:
        """Return a client's numbers, clipped, with its share of the noise."""
        return self.clipped(codes) + discrete_gaussian(len(codes), self.variance, bits)

    def epsilon(self, rounds: int, delta: float) -> float:
        """Return ε after some rounds. The server knows who takes part: sampling does not help.

        The Rényi divergence between discrete Gaussians is at most that between continuous ones.
        """
        noise = math.sqrt(self.variance * self.fewest) / self.clip
        ratio = rounds * self.values * log_ratio(self.fewest, self.variance)
        return epsilon_after(rounds, noise, 1.0, delta * math.exp(-ratio)) + 2 * ratio


def log_ratio(summands: int, variance: int) -> float:
    """Bound |log of the ratio| of a sum of discrete Gaussians to one with the sum's variance.

    It is half of τ in the paper's theorem 1, for one number.

    >>> 0 < log_ratio(13, variance=4) < 1e-14
    True
    """
    exponents = (-2 * math.pi**2 * variance * n / (n + 1) for n in range(1, summands))
    return 5 * sum(math.exp(exponent) for exponent in exponents)
