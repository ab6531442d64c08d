"""The sizes of entropy-coded masks, computed from histograms of gaps without encoding.

All masks of a stack and all kinds of models are computed in one tensor, so a GPU does not wait for
the host.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fedsift.codec import index_gaps, range_coder
from fedsift.codec.index_gaps import NUM_BUCKETS, GapModel
from fedsift.codec.range_coder import IntArray
from fedsift.selection.backend import can_use_triton

_NUM_SUB_BITS = index_gaps.FINE_BITS + 1


def mask_sizes(indices: Tensor, starts: IntArray) -> Tensor:
    """Return the bytes of each mask, from its ascending indices ``(masks, k)``.

    >>> mask_sizes(torch.tensor([[0, 1, 30], [5, 6, 7]]), np.array([0])).tolist()
    [6, 5]
    """
    if can_use_triton(indices):
        from fedsift.codec import gpu_sizes

        return gpu_sizes.mask_sizes(gpu_sizes.gap_histograms(indices, starts))
    return smallest_sizes(index_gaps.stacked_histograms(indices, starts))


def smallest_sizes(histograms: Tensor) -> Tensor:
    """Return each mask's bytes from ``(masks, segments, buckets)`` counts of gaps.

    >>> counts = torch.zeros(2, 1, 240, dtype=torch.int64)
    >>> counts[1, 0, :5] = torch.tensor([9, 5, 3, 2, 1])
    >>> smallest_sizes(counts).tolist()
    [0, 10]
    """
    return _sizes_by_model(histograms).amin(0)


def smallest_model(histogram: IntArray) -> tuple[int, GapModel]:
    """Return the smallest size for one mask's ``(segments, buckets)``, and its first model."""
    sizes = _sizes_by_model(torch.from_numpy(histogram)[None])[:, 0]
    kinds = range(16) if len(histogram) > 1 else (*range(4), *range(8, 12))
    best = int(sizes.argmin())
    return int(sizes[best]), GapModel.fit(histogram, kinds[best])


def _sizes_by_model(histograms: Tensor) -> Tensor:
    """Return the sizes ``(models, masks)``; layered models only if there are several segments."""
    counts = _counts_by_sub_bits(histograms)
    merged = counts.sum(2, keepdim=True)
    layerings = (merged, counts) if histograms.shape[1] > 1 else (merged,)
    return torch.cat([_sizes(x, coarse) for coarse in (False, True) for x in layerings])


def _counts_by_sub_bits(histograms: Tensor) -> Tensor:
    """Return the counts by each model's own buckets ``(sub_bits, masks, segments, buckets)``."""
    cumulative = torch.nn.functional.pad(histograms.cumsum(-1), (1, 0))
    ends = bucket_constants(histograms.device)[0]
    return torch.stack([cumulative[..., end].diff(dim=-1) for end in ends])


def _sizes(counts: Tensor, coarse: bool) -> Tensor:
    """Return the payload sizes ``(sub_bits, masks)`` under tables fitted to the counts."""
    weights = range_coder.probabilities(range_coder.log_weights(counts, coarse))
    coded = range_coder.code_bits(counts, weights)
    low = (counts * bucket_constants(counts.device)[1]).sum(-1)
    return _header_bytes(counts, coarse) + range_coder.code_bytes((coded + low).sum(-1))


def _header_bytes(counts: Tensor, coarse: bool) -> Tensor:
    """Return the bytes of :meth:`GapModel.header`."""
    place = torch.arange(1, counts.shape[-1] + 1, device=counts.device)
    length = torch.where(counts > 0, place, 0).amax(-1)
    listed = (length + 1) // 2 if coarse else length
    tables = (listed + (length > 0)).sum(-1)
    return torch.where(tables > 0, 1 + 4 * (counts.shape[-2] - 1) + tables, 0)


@lru_cache(maxsize=8)
def bucket_constants(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the fine bucket at which each bucket ends, and 2**16 times its low bits."""
    fine = np.arange(NUM_BUCKETS + 1)
    table = index_gaps.FINE_TO_BUCKET
    ends = [np.searchsorted(table[sub_bits], fine) for sub_bits in range(_NUM_SUB_BITS)]
    low = np.zeros((_NUM_SUB_BITS, 1, 1, NUM_BUCKETS), np.int64)
    for sub_bits in range(_NUM_SUB_BITS):
        bits = index_gaps.low_bits(sub_bits)[:NUM_BUCKETS]
        low[sub_bits, 0, 0, : len(bits)] = bits << 16
    return torch.from_numpy(np.stack(ends)).to(device), torch.from_numpy(low).to(device)
