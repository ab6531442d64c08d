"""Random directions that everyone rebuilds from the seed: the same bits on every machine.

Coordinate i of direction p of a step is Φ⁻¹((u + ½) / 2¹⁶) rounded to float32, where Φ⁻¹ is the
quantile function of the standard normal distribution, and u is the integer in bits 16j to 16j + 15
of the 64-bit number ``random_bits(key, i // 4)``, j = i mod 4. The key is
``random_bits(random_bits(random_bits(seed, round), step), p)``. Seeds, directions and coordinates
count from 0, rounds and steps from 1.

Integers and a table give the same bits on CPUs and GPUs, which functions such as the logarithm do
not.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from statistics import NormalDist

import torch
from torch import Tensor

WORDS = 4
"""The 16-bit integers in a 64-bit number."""
QUANTILES = 1 << 16
INCREMENT = 0x9E3779B97F4A7C15
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def directions(
    like: Tensor, seed: int, round: int | Tensor, step: int | Tensor, number: int
) -> Iterator[Tensor]:
    """Yield the directions ``(d,)`` of a step, one at a time, for weights ``(..., d)``.

    >>> z, _ = directions(torch.zeros(6), seed=0, round=1, step=1, number=2)
    >>> z
    tensor([ 0.5644,  1.6255,  1.2615,  1.1374,  0.9066, -0.3124])
    """
    start = as_integer(as_int64(seed), like)
    key = random_bits(random_bits(start, as_integer(round, like)), as_integer(step, like))
    for p in range(number):
        yield normal(random_bits(key, as_integer(p, like)), like)


def normal(key: Tensor, like: Tensor) -> Tensor:
    """Return standard normal numbers ``(d,)`` for weights ``(..., d)``."""
    d, device = like.shape[-1], like.device
    bits = random_bits(key, torch.arange(-(-d // WORDS), device=device))
    words = bits.view(torch.int16)[:d].int() & (QUANTILES - 1)
    return quantiles(like.dtype, device).index_select(0, words)


def random_bits(key: Tensor, index: Tensor) -> Tensor:
    """Return 64 random bits: number ``index``, from 0, of SplitMix64 with the seed ``key``.

    The numbers are the published ones of Steele, Lea and Flood (OOPSLA 2014), as signed integers.

    >>> bits = random_bits(torch.tensor(1234567), torch.arange(2))
    >>> [int(x) % 2**64 for x in bits]
    [6457827717110365317, 3203168211198807973]
    """
    x = key + (index + 1) * as_int64(INCREMENT)
    for shift, multiplier in zip((30, 27), MULTIPLIERS, strict=True):
        x = (x ^ shifted_right(x, shift)) * as_int64(multiplier)
    return x ^ shifted_right(x, 31)


def shifted_right(x: Tensor, shift: int) -> Tensor:
    """Shift the bits of 64-bit integers to the right, filling up with zeros."""
    return (x >> shift) & ((1 << (64 - shift)) - 1)


def as_int64(number: int) -> int:
    """Return the signed integer with the same lowest 64 bits.

    >>> as_int64(2**64 - 1)
    -1
    """
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def as_integer(number: int | Tensor, like: Tensor) -> Tensor:
    """Return a number as an integer tensor, without a copy that a CUDA graph cannot record."""
    if isinstance(number, Tensor):
        return number.to(like.device).long()
    return torch.full((), number, dtype=torch.int64, device=like.device)


@cache
def quantiles(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return Φ⁻¹((u + ½) / 2¹⁶) for u = 0, 1, ..., 2¹⁶ - 1. Computed once per device."""
    inverse = NormalDist().inv_cdf
    negative = [inverse((u + 0.5) / QUANTILES) for u in range(QUANTILES // 2)]
    half = torch.tensor(negative, dtype=torch.float32)
    return torch.cat([half, -half.flip(0)]).to(device, dtype)
