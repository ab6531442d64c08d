"""Exact top-k selection on one core, several times faster than ``torch.topk``."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_Bits = npt.NDArray[Any]
_VIEW = {torch.float32: torch.uint32, torch.float64: torch.uint64}
_INFINITY = {torch.float32: 0x7F800000, torch.float64: 0x7FF0000000000000}
_SAMPLE_SIZE = 1 << 16  # gives a band of at most about 2 % of d, and 0.7 % at 5 % density
_DIRECT = 1 << 14  # up to this length, a plain partition is faster than guessing first


def top_k_mask(magnitude: torch.Tensor, k: int) -> torch.Tensor:
    """Select the k largest of a vector of magnitudes.

    With t the k-th largest value, the mask is {i : x_i > t} and as many of the lowest indices of
    {i : x_i = t} as make k. NaN and negative values raise ``ValueError``; infinity is allowed.

    >>> top_k_mask(torch.tensor([1.0, 3.0, 2.0, 3.0, 2.0]), 3).tolist()
    [False, True, True, True, False]
    """
    d = magnitude.numel()
    if magnitude.dim() != 1 or magnitude.dtype not in _VIEW:
        raise ValueError("magnitude must be a vector of float32 or float64")
    if not 0 <= k <= d:
        raise ValueError(f"k must be in [0, {d}], got {k}")
    bits = _ordered_bits(magnitude)
    if k in (0, d):
        return torch.full((d,), k == d)
    kth = _kth_largest(bits, k)
    mask = bits >= kth
    if np.count_nonzero(mask) > k:
        tied = bits == kth
        mask ^= tied
        end = _prefix_with(tied, k - int(np.count_nonzero(mask)))
        mask[:end] |= tied[:end]
    return torch.from_numpy(mask)


def _prefix_with(mask: npt.NDArray[np.bool_], count: int) -> int:
    """Return the length of the shortest prefix with ``count`` ones, by bisection."""
    low, high = 0, mask.size
    while low < high:
        middle = (low + high) // 2
        ones = int(np.count_nonzero(mask[low:middle]))
        if ones < count:
            low, count = middle + 1, count - ones - int(mask[middle])
        else:
            high = middle
    return low


def _ordered_bits(magnitude: torch.Tensor) -> _Bits:
    """View non-negative floats as unsigned integers, which have the same order.

    Negative numbers and NaN are then above infinity, so one maximum finds both. Subnormal numbers
    keep their order even if the processor flushes them to zero.
    """
    infinity = _INFINITY[magnitude.dtype]
    bits: _Bits = magnitude.detach().contiguous().view(_VIEW[magnitude.dtype]).numpy()
    if bits.size and bits.max() > infinity:
        bits = (magnitude.detach() + 0.0).view(_VIEW[magnitude.dtype]).numpy()  # -0.0 becomes 0.0
        if bits.max() > infinity:
            raise ValueError("magnitudes must be non-negative and not NaN")
    return bits


def _kth_largest(bits: _Bits, k: int) -> Any:
    """Return the k-th largest value: guess a band that contains it, partition only the band."""
    if bits.size <= _DIRECT:
        return _partition(bits, k)
    low, high = _guess_band(bits, k)
    above, at_least_low = bits > high, bits >= low
    count_above = int(np.count_nonzero(above))
    if not count_above < k <= np.count_nonzero(at_least_low):
        return _partition(bits, k)  # the band misses: slower, but exact
    if low == high:
        return low
    in_band = at_least_low ^ above
    return _partition(bits[np.flatnonzero(in_band)], k - count_above)


def _guess_band(bits: _Bits, k: int) -> tuple[Any, Any]:
    """Bracket the k-th largest value by order statistics of a jittered, strided sample.

    In a sample of n, the rank of the k-th value is about n k/d, with a standard deviation of at
    most sqrt(n k/d (1 - k/d)). Five standard deviations miss about once in a million. The jitter
    avoids a stride that equals a period of the data.
    """
    d, n = bits.size, min(_SAMPLE_SIZE, bits.size // 32)
    stride = d // n
    jitter = np.random.default_rng(0).integers(0, stride, n)
    sample = np.sort(bits[np.arange(n) * stride + jitter])
    rank = n * k / d
    spread = 5 * (rank * (1 - k / d)) ** 0.5 + 5
    low, high = n - round(rank + spread), n - round(rank - spread)
    return (
        sample[low] if low >= 0 else bits.dtype.type(0),
        sample[high] if high < n else np.iinfo(bits.dtype).max,
    )


def _partition(bits: _Bits, k: int) -> Any:
    return np.partition(bits, bits.size - k)[bits.size - k]
