"""The sizes of a stack's masks and values on a GPU, in a few Triton kernels.

The results equal those of ``index_sizes`` and ``value_entropy``, which need hundreds of small
operations.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from fedsift.codec import index_sizes, range_coder
from fedsift.codec import triton as kernels
from fedsift.codec.index_gaps import NUM_BUCKETS
from fedsift.codec.range_coder import IntArray

_BLOCK = 1024
_NUM_KINDS = 16


def gap_histograms(indices: Tensor, starts: IntArray) -> Tensor:
    """Return :func:`index_gaps.stacked_histograms`."""
    (masks, k), segments = indices.shape, len(starts)
    indices = indices.contiguous()
    shape = masks, segments, NUM_BUCKETS
    counts = torch.zeros(shape, dtype=torch.int64, device=indices.device)
    bounds = _on_device(tuple(starts.tolist()), indices.device)
    grid = -(-k // _BLOCK), masks
    kernels.gaps_kernel[grid](indices, bounds, counts, k, segments, BLOCK=_BLOCK)
    return counts


def mask_sizes(histograms: Tensor) -> Tensor:
    """Return :func:`index_sizes.smallest_sizes`."""
    masks, segments, _ = histograms.shape
    histograms = histograms.contiguous()
    device = histograms.device
    sizes = torch.empty(_NUM_KINDS, masks, dtype=torch.int64, device=device)
    constants = *index_sizes.bucket_constants(device), *range_coder.constants(device)
    grid = masks, _NUM_KINDS
    kernels.mask_sizes_kernel[grid](histograms, *constants, sizes, segments, WIDTH=256)
    return sizes.amin(0)


def code_sizes(counts: Tensor) -> Tensor:
    """Return :func:`value_entropy.coded_sizes`."""
    clients, codes = counts.shape
    counts = counts.contiguous()
    sizes = torch.empty(2, clients, dtype=torch.int64, device=counts.device)
    constants = range_coder.constants(counts.device)
    kernels.code_sizes_kernel[(clients, 2)](counts, *constants, sizes, CODES=codes)
    return sizes.amin(0)


@lru_cache(maxsize=64)
def _on_device(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Return integers as a tensor on the device; copied once."""
    return torch.tensor(numbers, dtype=torch.int64, device=device)
