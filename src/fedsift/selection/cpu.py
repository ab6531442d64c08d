"""Exact top-k selection on one core, several times faster than ``torch.topk``."""

from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_Bits = npt.NDArray[Any]
_VIEW = {torch.float32: torch.uint32, torch.float64: torch.uint64}
_INFINITY = {torch.float32: 0x7F800000, torch.float64: 0x7FF0000000000000}
_SAMPLE = 1 << 16  # draws for the guess: a band of about 2 % of d at worst, 0.7 % at 5 % density
LITTLE = 1 << 22
"""Numbers up to which a GPU sorts them all sooner than it synchronizes with the host."""
_DIRECT = 1 << 14  # below this a plain partition is faster than guessing first


def has_kernels(x: torch.Tensor) -> bool:
    """Whether a tensor is where Triton's kernels run: on the current GPU, if it is installed."""
    return x.is_cuda and _has_triton() and x.get_device() == torch.cuda.current_device()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def top_k_mask(magnitude: torch.Tensor, k: int) -> torch.Tensor:
    """Mark exactly the ``k`` largest magnitudes of a vector.

    With t the k-th largest value, marked are {i : x_i > t} and, of {i : x_i = t}, the lowest
    indices up to k in all. NaN and negative values raise ``ValueError``; infinities are allowed.

    >>> top_k_mask(torch.tensor([1.0, 3.0, 2.0, 3.0, 2.0]), 3).tolist()
    [False, True, True, True, False]
    """
    d = magnitude.numel()
    if magnitude.dim() != 1 or magnitude.dtype not in _VIEW:
        raise ValueError("magnitude must be a vector of float32 or float64")
    if not 0 <= k <= d:
        raise ValueError(f"k = {k} is outside [0, {d}]")
    bits = _ordered_bits(magnitude)
    if k in (0, d):
        return torch.full((d,), k == d)
    kth = _kth_largest(bits, k)
    kept = bits >= kth
    if np.count_nonzero(kept) > k:
        tied = bits == kth
        kept ^= tied
        cut = _position_of(tied, k - int(np.count_nonzero(kept)))
        kept[:cut] |= tied[:cut]
    return torch.from_numpy(kept)


def _position_of(marks: npt.NDArray[np.bool_], count: int) -> int:
    """Find the shortest prefix with ``count`` marks by bisection, without listing the marks."""
    low, high = 0, marks.size
    while low < high:
        middle = (low + high) // 2
        here = int(np.count_nonzero(marks[low:middle]))
        if here < count:
            low, count = middle + 1, count - here - int(marks[middle])
        else:
            high = middle
    return low


def _ordered_bits(magnitude: torch.Tensor) -> _Bits:
    """View non-negative floats as unsigned integers, which have the same order.

    A set sign bit or a NaN then lies above infinity, so that one maximum finds either; and
    denormals keep their order even where the processor flushes them to zero.
    """
    infinity = _INFINITY[magnitude.dtype]
    bits: _Bits = magnitude.detach().contiguous().view(_VIEW[magnitude.dtype]).numpy()
    if bits.size and bits.max() > infinity:
        bits = (magnitude.detach() + 0.0).view(_VIEW[magnitude.dtype]).numpy()  # -0.0 becomes 0.0
        if bits.max() > infinity:
            raise ValueError("magnitudes must be non-negative and not NaN")
    return bits


def _kth_largest(bits: _Bits, k: int) -> Any:
    """Find the k-th largest value: guess a band around it, count, partition only the band."""
    if bits.size <= _DIRECT:
        return _partition(bits, k)
    low, high = _guess_band(bits, k)
    above, reaching = bits > high, bits >= low
    count_above = int(np.count_nonzero(above))
    if not count_above < k <= np.count_nonzero(reaching):
        return _partition(bits, k)  # an unlucky sample: slower, still exact
    if low == high:
        return low
    reaching ^= above
    return _partition(bits[np.flatnonzero(reaching)], k - count_above)


def _guess_band(bits: _Bits, k: int) -> tuple[Any, Any]:
    """Bracket the k-th largest value by order statistics of a jittered, strided sample.

    The rank of the k-th value in a sample of n is about n k/d, with a standard deviation of at
    most sqrt(n k/d (1 - k/d)); five of those miss about once in a million. The jitter is there
    because a fixed stride can agree with a period of the data.
    """
    d, n = bits.size, min(_SAMPLE, bits.size // 32)
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
