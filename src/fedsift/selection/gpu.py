"""Exact top-k masks of float32 tensors and their positions on a GPU, without synchronizing it.

A long row's k-th magnitude is looked for in a span of magnitudes, a guess at first, in 2**11
buckets: two passes over the row settle it where the guess is right, and four do in any case.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fedsift.selection import triton as kernels

SHORT = 1 << 15
"""Numbers of a row that one block of threads holds."""
_ROWS = (1 << 16) - 1  # the most that a grid's second index counts
_BLOCK = 1 << 12
_CHOSEN = 1 << 10
_TURNS = 8  # blocks that a program counts before it adds to the counters of its row
_PASSES = 4  # a wrong guess, and three digits of 11 bits
_SAMPLE = 1 << 14
_BUCKETS, _DIGIT = kernels.BUCKETS.value, kernels.DIGIT.value
_LARGEST = (1 << 31) - 1


def top_k(x: Tensor, k: int) -> Tensor:
    """The mask 1_Topk(x) of float32 rows ``(..., d)``; ties go to the lower index."""
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    if rows.shape[-1] <= SHORT:
        return short_top_k(rows, k).view(x.shape)
    if len(rows) <= _ROWS:
        return long_top_k(rows, k).view(x.shape)
    return torch.cat([long_top_k(some, k) for some in torch.split(rows, _ROWS)]).view(x.shape)


def positions(mask: Tensor, k: int) -> Tensor:
    """Indices ``(rows, k)`` of the ones of a mask ``(rows, d)`` that has k in each row."""
    rows, d = mask.shape
    octets = mask.contiguous().view(torch.uint8)
    indices = torch.zeros(rows, k, dtype=torch.int64, device=mask.device)
    block = _power_of_two(d) if d <= SHORT else _BLOCK
    grid = -(-d // block), rows
    upto = _ones_upto(octets, grid, block) if grid[0] > 1 else octets
    kernels.positions_kernel[grid](
        octets, upto, indices, d, k, SEVERAL=grid[0] > 1, BLOCK=block, num_warps=_warps(block)
    )
    return indices


def difference_at(indices: Tensor, x: Tensor, since: Tensor) -> Tensor:
    """The values of x - since at indices ``(rows, k)``; ``since`` may be one row, expanded."""
    rows, k = indices.shape
    x, since = (each if each.stride(-1) == 1 else each.contiguous() for each in (x, since))
    result = torch.empty(rows, k, dtype=x.dtype, device=x.device)
    kernels.difference_kernel[(-(-k // _CHOSEN), rows)](
        indices.contiguous(), x, since, result, k, x.stride(0), since.stride(0), BLOCK=_CHOSEN
    )
    return result


def _ones_upto(octets: Tensor, grid: tuple[int, int], block: int) -> Tensor:
    """How many ones a row has up to the end of each block."""
    ones = torch.empty(grid[::-1], dtype=torch.int32, device=octets.device)
    kernels.count_kernel[grid](octets, ones, octets.shape[-1], BLOCK=block, num_warps=_warps(block))
    return ones.cumsum(-1, dtype=torch.int32)


def short_top_k(rows: Tensor, k: int) -> Tensor:
    """The masks of rows ``(rows, d)`` with d <= SHORT, a program each."""
    count, d = rows.shape
    mask, block = _empty_mask(rows), _power_of_two(d)
    kernels.short_top_k_kernel[(count,)](
        rows, mask, d, rows.stride(0), k, BLOCK=block, num_warps=_warps(block)
    )
    return mask.view(torch.bool)


def long_top_k(rows: Tensor, k: int) -> Tensor:
    """The masks of rows of any length: mark what reaches the k-th magnitude, and untie."""
    spans = settled(rows, k, guessed_spans(rows, k))
    count, d = rows.shape
    grid = -(-d // _BLOCK), count
    mask = _empty_mask(rows)
    tied = torch.empty(grid[::-1], dtype=torch.int32, device=rows.device)
    how = {"BLOCK": _BLOCK, "num_warps": _warps(_BLOCK)}
    kernels.mark_kernel[grid](rows, spans, mask, tied, d, rows.stride(0), **how)
    upto = tied.cumsum(-1, dtype=torch.int32)
    kernels.untie_kernel[grid](rows, spans, mask, upto, d, rows.stride(0), **how)
    return mask.view(torch.bool)


def settled(rows: Tensor, k: int, spans: Tensor) -> Tensor:
    """Narrow each row's span, in place, to its k-th largest magnitude."""
    count, d = rows.shape
    seen = torch.zeros(count, _BUCKETS + 1, dtype=torch.int32, device=rows.device)
    grid = -(-d // (_BLOCK * _TURNS)), count
    for _ in range(_PASSES):  # those after the span is settled return at once
        kernels.tally_kernel[grid](
            rows, spans, seen, d, rows.stride(0), BLOCK=_BLOCK, TURNS=_TURNS, num_warps=8
        )
        kernels.narrow_kernel[(count,)](spans, seen, k, num_warps=8)
    return spans


def guessed_spans(rows: Tensor, k: int) -> Tensor:
    """Where each row's k-th magnitude probably is: (low, shift, room), by a sample of the row.

    The rank of the k-th in a sample of n is n k/d, give or take five standard deviations.
    """
    d, n = rows.shape[-1], min(_SAMPLE, rows.shape[-1])
    places = _sampled_places(d, n, rows.device)
    sample = (rows.view(torch.int32)[:, places] & _LARGEST).sort(-1).values
    rank = n * k / d
    spread = 5 * (rank * (1 - k / d)) ** 0.5 + 5
    first, last = n - round(rank + spread), n - round(rank - spread)
    low = sample[:, max(first, 0)] * (first >= 0)
    high = sample[:, last] if last < n else torch.full_like(low, _LARGEST)
    shift = torch.frexp((high - low).double()).exponent - _DIGIT
    return torch.stack([low, shift.clamp(min=0), torch.zeros_like(low)], -1)


@lru_cache(maxsize=8)
def _sampled_places(d: int, n: int, device: torch.device) -> Tensor:
    """Evenly spaced, and jittered, as a fixed stride can agree with a period of the data."""
    stride = d // n
    jitter = np.random.default_rng(0).integers(0, stride, n)
    return torch.from_numpy(np.arange(n) * stride + jitter).to(device)


def _empty_mask(rows: Tensor) -> Tensor:
    return torch.empty(rows.shape, dtype=torch.uint8, device=rows.device)


def _power_of_two(d: int) -> int:
    """The first power of two that is not below d.

    >>> _power_of_two(1), _power_of_two(21_840)
    (1, 32768)
    """
    return 1 << (d - 1).bit_length()


def _warps(block: int) -> int:
    """Groups of 32 threads: with 32 numbers a thread in the largest block, and 16 in others."""
    return min(max(block // 512, 1), 32)
