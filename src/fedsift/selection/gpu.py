"""Exact top-k masks of float32 tensors and their positions on a GPU, without synchronization.

A long row's k-th magnitude is searched in a span of magnitudes that is divided into 2**11 buckets.
The first span is a guess from a sample. Two passes over the row suffice if the guess is right, four
in any case.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fedsift.selection import triton as kernels

MAX_SHORT_ROW = 1 << 15
"""The longest row that one block of threads can hold."""
_MAX_ROWS = (1 << 16) - 1  # the largest second dimension of a grid
_BLOCK = 1 << 12
_INDEX_BLOCK = 1 << 10
_BLOCKS_PER_PROGRAM = 8  # counted before a program adds to its row's counters
_NUM_PASSES = 4  # a wrong guess, and three digits of 11 bits
_SAMPLE_SIZE = 1 << 14
_NUM_BUCKETS, _DIGIT_BITS = kernels.NUM_BUCKETS.value, kernels.DIGIT_BITS.value
_LARGEST = (1 << 31) - 1


def top_k(x: Tensor, k: int) -> Tensor:
    """Select the k largest magnitudes of float32 rows ``(..., d)``; ties go to the lower index."""
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    if rows.shape[-1] <= MAX_SHORT_ROW:
        return short_top_k(rows, k).view(x.shape)
    if len(rows) <= _MAX_ROWS:
        return long_top_k(rows, k).view(x.shape)
    masks = [long_top_k(part, k) for part in torch.split(rows, _MAX_ROWS)]
    return torch.cat(masks).view(x.shape)


def positions(mask: Tensor, k: int) -> Tensor:
    """Return the ascending indices ``(rows, k)`` of a mask ``(rows, d)`` with k ones per row."""
    rows, d = mask.shape
    ones = mask.contiguous().view(torch.uint8)
    indices = torch.zeros(rows, k, dtype=torch.int64, device=mask.device)
    block = _power_of_two(d) if d <= MAX_SHORT_ROW else _BLOCK
    grid = -(-d // block), rows
    is_split = grid[0] > 1
    cumulative = _cumulative_ones(ones, grid, block) if is_split else ones
    kernels.positions_kernel[grid](
        ones, cumulative, indices, d, k, IS_SPLIT=is_split, BLOCK=block, num_warps=_num_warps(block)
    )
    return indices


def difference_at(indices: Tensor, x: Tensor, since: Tensor) -> Tensor:
    """Return x - since at the indices ``(rows, k)``; ``since`` may be one row, expanded."""
    rows, k = indices.shape
    x, since = (y if y.stride(-1) == 1 else y.contiguous() for y in (x, since))
    result = torch.empty(rows, k, dtype=x.dtype, device=x.device)
    kernels.difference_kernel[(-(-k // _INDEX_BLOCK), rows)](
        indices.contiguous(), x, since, result, k, x.stride(0), since.stride(0), BLOCK=_INDEX_BLOCK
    )
    return result


def _cumulative_ones(ones: Tensor, grid: tuple[int, int], block: int) -> Tensor:
    """Return the number of ones in each row up to the end of each block."""
    counts = torch.empty(grid[::-1], dtype=torch.int32, device=ones.device)
    d = ones.shape[-1]
    kernels.count_kernel[grid](ones, counts, d, BLOCK=block, num_warps=_num_warps(block))
    return counts.cumsum(-1, dtype=torch.int32)


def short_top_k(rows: Tensor, k: int) -> Tensor:
    """Return the masks of rows ``(rows, d)`` with d <= MAX_SHORT_ROW, one program per row."""
    count, d = rows.shape
    mask, block = _empty_mask(rows), _power_of_two(d)
    kernels.short_top_k_kernel[(count,)](
        rows, mask, d, rows.stride(0), k, BLOCK=block, num_warps=_num_warps(block)
    )
    return mask.view(torch.bool)


def long_top_k(rows: Tensor, k: int) -> Tensor:
    """Return the masks of rows of any length: find the k-th magnitude, mark, break ties."""
    spans = find_kth(rows, k, guess_spans(rows, k))
    count, d = rows.shape
    grid = -(-d // _BLOCK), count
    mask = _empty_mask(rows)
    tied = torch.empty(grid[::-1], dtype=torch.int32, device=rows.device)
    options = {"BLOCK": _BLOCK, "num_warps": _num_warps(_BLOCK)}
    kernels.mark_kernel[grid](rows, spans, mask, tied, d, rows.stride(0), **options)
    cumulative = tied.cumsum(-1, dtype=torch.int32)
    kernels.break_ties_kernel[grid](rows, spans, mask, cumulative, d, rows.stride(0), **options)
    return mask.view(torch.bool)


def find_kth(rows: Tensor, k: int, spans: Tensor) -> Tensor:
    """Narrow each row's span, in place, to its k-th largest magnitude."""
    count, d = rows.shape
    counts = torch.zeros(count, _NUM_BUCKETS + 1, dtype=torch.int32, device=rows.device)
    grid = -(-d // (_BLOCK * _BLOCKS_PER_PROGRAM)), count
    options = {"BLOCK": _BLOCK, "NUM_BLOCKS": _BLOCKS_PER_PROGRAM, "num_warps": 8}
    for _ in range(_NUM_PASSES):  # once the k-th magnitude is found, a pass returns immediately
        kernels.histogram_kernel[grid](rows, spans, counts, d, rows.stride(0), **options)
        kernels.narrow_kernel[(count,)](spans, counts, k, num_warps=8)
    return spans


def guess_spans(rows: Tensor, k: int) -> Tensor:
    """Guess each row's span (low, shift, room) that contains the k-th magnitude, from a sample.

    A span has buckets of 2**shift magnitudes from ``low`` on. In a sample of n, the rank of the
    k-th magnitude is n k/d, plus or minus five standard deviations.
    """
    d, n = rows.shape[-1], min(_SAMPLE_SIZE, rows.shape[-1])
    indices = _sample_indices(d, n, rows.device)
    sample = (rows.view(torch.int32)[:, indices] & _LARGEST).sort(-1).values
    rank = n * k / d
    spread = 5 * (rank * (1 - k / d)) ** 0.5 + 5
    first, last = n - round(rank + spread), n - round(rank - spread)
    low = sample[:, max(first, 0)] * (first >= 0)
    high = sample[:, last] if last < n else torch.full_like(low, _LARGEST)
    shift = torch.frexp((high - low).double()).exponent - _DIGIT_BITS
    return torch.stack([low, shift.clamp(min=0), torch.zeros_like(low)], -1)


@lru_cache(maxsize=8)
def _sample_indices(d: int, n: int, device: torch.device) -> Tensor:
    """Return evenly spaced indices with jitter: a fixed stride can equal a period of the data."""
    stride = d // n
    jitter = np.random.default_rng(0).integers(0, stride, n)
    return torch.from_numpy(np.arange(n) * stride + jitter).to(device)


def _empty_mask(rows: Tensor) -> Tensor:
    return torch.empty(rows.shape, dtype=torch.uint8, device=rows.device)


def _power_of_two(d: int) -> int:
    """Return the smallest power of two that is at least d.

    >>> _power_of_two(1), _power_of_two(21_840)
    (1, 32768)
    """
    return 1 << (d - 1).bit_length()


def _num_warps(block: int) -> int:
    """Return the warps for a block: 32 numbers per thread in the largest block, 16 in others."""
    return min(max(block // 512, 1), 32)
