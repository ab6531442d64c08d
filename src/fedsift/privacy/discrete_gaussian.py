"""Exact samples of the discrete Gaussian: P(x) is proportional to exp(-x² / (2 σ²)) for integers x.

C. L. Canonne, G. Kamath and T. Steinke, "The Discrete Gaussian for Differential Privacy", NeurIPS
2020, algorithms 1 to 3, for many samples at once. Only whole numbers are computed, so no rounding
changes the distribution. The bits are those of AES in counter mode.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
MAX_VARIANCE = 2**20
"""The largest σ² with which all numbers fit into 63 bits."""
WORD = 2**64


class Bits:
    """Uniform random integers from a secret key of 16 bytes. Equal keys give equal numbers.

    >>> Bits(bytes(16)).below(np.array([1, 100, 100])).tolist()
    [0, 24, 68]
    """

    def __init__(self, key: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers import Cipher
        from cryptography.hazmat.primitives.ciphers.algorithms import AES
        from cryptography.hazmat.primitives.ciphers.modes import CTR

        self.stream = Cipher(AES(key), CTR(bytes(16))).encryptor()

    def words(self, n: int) -> npt.NDArray[np.uint64]:
        """Return n words of 64 bits."""
        return np.frombuffer(self.stream.update(bytes(8 * n)), "<u8")

    def below(self, bounds: Integers) -> Integers:
        """Return one integer from 0 to bound - 1 per bound, all equally likely."""
        wide = bounds.astype(np.uint64)
        spare = (np.uint64(WORD - 1) % wide + np.uint64(1)) % wide
        found, left = np.zeros(len(bounds), np.int64), np.arange(len(bounds))
        while len(left):
            words = self.words(len(left))
            is_used = words <= np.uint64(WORD - 1) - spare[left]
            used = left[is_used]
            found[used] = (words[is_used] % wide[used]).astype(np.int64)
            left = left[~is_used]
        return found


def discrete_gaussian(n: int, variance: int, bits: Bits) -> Integers:
    """Return n samples of the discrete Gaussian with the parameter σ², a whole number.

    >>> x = discrete_gaussian(10_000, variance=9, bits=Bits(bytes(16)))
    >>> bool(abs(x.mean()) < 0.1 and abs(x.var() - 9) < 0.5)
    True
    """
    if not 1 <= variance <= MAX_VARIANCE:
        raise ValueError(f"the variance must be from 1 to {MAX_VARIANCE}, got {variance}")
    scale = math.isqrt(variance) + 1

    def accepted(x: Integers) -> Bools:
        distance = np.abs(x) * scale - variance
        return bernoulli_exp(distance**2, 2 * variance * scale**2, bits)

    return repeated(n, lambda m: discrete_laplace(m, scale, bits), accepted)


def discrete_laplace(n: int, scale: int, bits: Bits) -> Integers:
    """Return n samples with P(x) proportional to exp(-|x| / scale)."""

    def drawn(m: int) -> Integers:
        low = bits.below(np.full(m, scale))
        magnitude = low + scale * num_successes(m, bits)
        is_kept = bernoulli_exp(low, scale, bits)
        sign = 1 - 2 * bits.below(np.full(m, 2))
        is_kept &= (magnitude > 0) | (sign > 0)  # zero has one sign
        return np.where(is_kept, sign * magnitude, REFUSED)

    return repeated(n, drawn, lambda x: x != REFUSED)


REFUSED = np.iinfo(np.int64).max


def repeated(
    n: int, draw: Callable[[int], Integers], accepted: Callable[[Integers], Bools]
) -> Integers:
    """Draw until n samples are accepted."""
    found = np.zeros(n, np.int64)
    left = np.arange(n)
    while len(left):
        drawn = draw(len(left))
        is_accepted = accepted(drawn)
        found[left[is_accepted]] = drawn[is_accepted]
        left = left[~is_accepted]
    return found


def num_successes(n: int, bits: Bits) -> Integers:
    """Return how often in a row an event of probability 1/e happens, n times."""
    found, left = np.zeros(n, np.int64), np.arange(n)
    while len(left):
        left = left[bernoulli_exp(np.ones(len(left), np.int64), 1, bits)]
        found[left] += 1
    return found


def bernoulli_exp(numerators: Integers, denominator: int, bits: Bits) -> Bools:
    """Return True with the probability exp(-numerator / denominator), for each numerator."""
    whole, rest = np.divmod(numerators, denominator)
    happened = bernoulli_exp_of_fraction(rest, denominator, bits)
    left = np.flatnonzero(happened & (whole > 0))
    while len(left):
        happened[left] = bernoulli_exp_of_fraction(np.ones(len(left), np.int64), 1, bits)
        whole[left] -= 1
        left = left[happened[left] & (whole[left] > 0)]
    return happened


def bernoulli_exp_of_fraction(numerators: Integers, denominator: int, bits: Bits) -> Bools:
    """Return the same for numerators of at most the denominator.

    Events of the probabilities γ, γ/2, γ/3, ... happen until one does not. That one has an odd
    number with the probability exp(-γ).
    """
    number, left = np.ones(len(numerators), np.int64), np.arange(len(numerators))
    while len(left):
        happened = bits.below(denominator * number[left]) < numerators[left]
        left = left[happened]
        number[left] += 1
    is_odd: Bools = number % 2 == 1
    return is_odd
