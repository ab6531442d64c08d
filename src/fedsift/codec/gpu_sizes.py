"""The sizes of a stack's masks and values, counted by a GPU in a handful of kernels.

They are those of ``sizes`` and ``symbols``, which need hundreds of small operations for them.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from fedsift.codec import gaps, sizes, tables
from fedsift.codec import triton as kernels
from fedsift.codec.tables import Ints

_BLOCK = 1024
_KINDS = 16


def gap_histograms(indices: Tensor, starts: Ints) -> Tensor:
    """:func:`gaps.stacked_histograms`."""
    (masks, k), segments = indices.shape, len(starts)
    indices = indices.contiguous()
    shape = masks, segments, gaps.BUCKETS
    seen = torch.zeros(shape, dtype=torch.int64, device=indices.device)
    bounds = _on_device(tuple(starts.tolist()), indices.device)
    kernels.gaps_kernel[(-(-k // _BLOCK), masks)](indices, bounds, seen, k, segments, BLOCK=_BLOCK)
    return seen


def mask_sizes(histograms: Tensor) -> Tensor:
    """:func:`sizes.best_sizes`."""
    masks, segments, _ = histograms.shape
    histograms = histograms.contiguous()
    found = torch.empty(_KINDS, masks, dtype=torch.int64, device=histograms.device)
    constants = *sizes.buckets(histograms.device), *tables.constants(histograms.device)
    kernels.mask_sizes_kernel[(masks, _KINDS)](histograms, *constants, found, segments, WIDTH=256)
    return found.amin(0)


def code_sizes(seen: Tensor) -> Tensor:
    """:func:`symbols.sizes`."""
    clients, codes = seen.shape
    seen = seen.contiguous()
    found = torch.empty(2, clients, dtype=torch.int64, device=seen.device)
    constants = tables.constants(seen.device)
    kernels.code_sizes_kernel[(clients, 2)](seen, *constants, found, CODES=codes)
    return found.amin(0)


@lru_cache(maxsize=64)
def _on_device(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Whole numbers that are copied to the device once."""
    return torch.tensor(numbers, dtype=torch.int64, device=device)
