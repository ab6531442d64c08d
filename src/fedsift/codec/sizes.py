"""The sizes of many entropy-coded masks at once, wherever their histograms are.

All masks of a stack and all models are one tensor, so that a GPU counts the bytes of a round
without waiting for the host.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fedsift.codec import gaps, tables
from fedsift.codec.gaps import GapModel
from fedsift.codec.tables import Ints
from fedsift.selection.cpu import has_kernels

_MODELS = gaps.FINE + 1


def mask_sizes(indices: Tensor, starts: Ints) -> Tensor:
    """The size in bytes of each row ``(masks, k)`` of ascending indices.

    >>> mask_sizes(torch.tensor([[0, 1, 30], [5, 6, 7]]), np.array([0])).tolist()
    [6, 5]
    """
    if has_kernels(indices):
        from fedsift.codec import gpu_sizes

        return gpu_sizes.mask_sizes(gpu_sizes.gap_histograms(indices, starts))
    return best_sizes(gaps.stacked_histograms(indices, starts))


def best_sizes(histograms: Tensor) -> Tensor:
    """Each mask's size in bytes, from ``(masks, segments, buckets)`` counts of gaps.

    >>> counts = torch.zeros(2, 1, 240, dtype=torch.int64)
    >>> counts[1, 0, :5] = torch.tensor([9, 5, 3, 2, 1])
    >>> best_sizes(counts).tolist()
    [0, 10]
    """
    return _by_model(histograms).amin(0)


def best_model(histogram: Ints) -> tuple[int, GapModel]:
    """The first of the smallest models for one mask's counts ``(segments, buckets)``; its size."""
    found = _by_model(torch.from_numpy(histogram)[None])[:, 0]
    kinds = range(16) if len(histogram) > 1 else (*range(4), *range(8, 12))
    best = int(found.argmin())
    return int(found[best]), GapModel.fit(histogram, kinds[best])


def _by_model(histograms: Tensor) -> Tensor:
    """The sizes ``(models, masks)`` under every model, the layered ones only if they differ."""
    seen = _coarser(histograms)
    whole = seen.sum(2, keepdim=True)
    layerings = (whole, seen) if histograms.shape[1] > 1 else (whole,)
    return torch.cat([_sizes(each, coarse) for coarse in (False, True) for each in layerings])


def _coarser(histograms: Tensor) -> Tensor:
    """The counts by every model's own buckets ``(models, masks, segments, buckets)``."""
    upto = torch.nn.functional.pad(histograms.cumsum(-1), (1, 0))
    ends = buckets(histograms.device)[0]
    return torch.stack([upto[..., end].diff(dim=-1) for end in ends])


def _sizes(seen: Tensor, coarse: bool) -> Tensor:
    """The payload's size ``(models, masks)`` under tables fitted to the counts."""
    coded = tables.cost(seen, tables.weights(tables.log_weights(seen, coarse)))
    low = (seen * buckets(seen.device)[1]).sum(-1)
    return _header_bytes(seen, coarse) + tables.code_bytes((coded + low).sum(-1))


def _header_bytes(seen: Tensor, coarse: bool) -> Tensor:
    """The model's byte, all counts but the last, and the tables without their trailing zeros."""
    place = torch.arange(1, seen.shape[-1] + 1, device=seen.device)
    length = torch.where(seen > 0, place, 0).amax(-1)
    listed = (length + 1) // 2 if coarse else length
    whole = (listed + (length > 0)).sum(-1)
    return torch.where(whole > 0, 1 + 4 * (seen.shape[-2] - 1) + whole, 0)


@lru_cache(maxsize=8)
def buckets(device: torch.device) -> tuple[Tensor, Tensor]:
    """Where each model's buckets end, and 2**16 times the bits that they leave open."""
    fine = np.arange(gaps.BUCKETS + 1)
    ends = [np.searchsorted(gaps.COARSER[s], fine) for s in range(_MODELS)]
    low = np.zeros((_MODELS, 1, 1, gaps.BUCKETS), np.int64)
    for s in range(_MODELS):
        bits = gaps.low_bits(s)[: gaps.BUCKETS]
        low[s, 0, 0, : len(bits)] = bits << 16
    return torch.from_numpy(np.stack(ends)).to(device), torch.from_numpy(low).to(device)
