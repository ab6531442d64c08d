"""The sizes of many entropy-coded masks at once, wherever their histograms are.

The same integers as :func:`fedsift.codec.gaps.best_model` computes for one mask, which stays the
definition; here all masks of a stack and all models are one tensor, so that a GPU counts the bytes
of a round without waiting for the host.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fedsift.codec import gaps
from fedsift.codec.gaps import Ints

_MODELS = gaps._FINE + 1


def mask_sizes(indices: Tensor, starts: Ints) -> Tensor:
    """The size in bytes of each row ``(masks, k)`` of ascending indices.

    >>> mask_sizes(torch.tensor([[0, 1, 30], [5, 6, 7]]), np.array([0])).tolist()
    [12, 10]
    """
    histograms = gaps.stacked_histograms(indices, starts)
    if indices.device.type != "cuda":
        return best_sizes(histograms)
    return _recorded(histograms.shape, indices.device)(histograms)


@lru_cache(maxsize=64)
def _recorded(shape: torch.Size, device: torch.device) -> Recorded:
    return Recorded(best_sizes, torch.zeros(shape, dtype=torch.int64, device=device))


class Recorded:
    """A function of one tensor as a CUDA graph: a hundred small operations for the price of one."""

    def __init__(self, function: Callable[[Tensor], Tensor], like: Tensor) -> None:
        self.given = like
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            function(self.given)  # libraries set themselves up in their first calls
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.found = function(self.given)

    def __call__(self, x: Tensor) -> Tensor:
        """The function's value, until the next call."""
        self.given.copy_(x)
        self.graph.replay()
        return self.found


def best_sizes(histograms: Tensor) -> Tensor:
    """Each mask's size in bytes, from ``(masks, segments, buckets)`` counts of gaps.

    >>> counts = torch.zeros(2, 1, 240, dtype=torch.int64)
    >>> counts[1, 0, :5] = torch.tensor([9, 5, 3, 2, 1])
    >>> best_sizes(counts).tolist(), gaps.best_model(counts[1].numpy())[0]
    ([0, 14], 14)
    """
    seen = _coarser(histograms)
    sizes = _sizes(seen.sum(2, keepdim=True))
    if histograms.shape[1] > 1:
        sizes = torch.minimum(sizes, _sizes(seen))
    return sizes.amin(0)


def _coarser(histograms: Tensor) -> Tensor:
    """The counts by every model's own buckets ``(models, masks, segments, buckets)``."""
    upto = torch.nn.functional.pad(histograms.cumsum(-1), (1, 0))
    ends = _tables(histograms.device)[0]
    return torch.stack([upto[..., end].diff(dim=-1) for end in ends])


def _sizes(seen: Tensor) -> Tensor:
    """The payload's size ``(models, masks)`` under tables fitted to the counts."""
    _, low_bits, mantissa, log2 = _tables(seen.device)
    below = _log2(seen.amax(-1, keepdim=True), log2) - _log2(seen, log2)
    least = torch.clamp((below + 4096) >> 13, max=gaps._TOP - 1)
    logs = torch.where(seen > 0, gaps._TOP - least, 0)
    weights = _weights(logs, mantissa)
    likely = (weights > 1 << (gaps._PRECISION - 1)) & (weights < 1 << gaps._PRECISION)
    cost = (low_bits << 16) - _log2(weights, log2) + (likely.long() << 9)
    total = (seen * cost).sum((-1, -2))
    words = torch.where(total > 0, (((total + (total >> 11)) >> 16) + 1) // 32 + 1, 0)
    return _header_bytes(seen) + 4 * words


def _weights(logs: Tensor, mantissa: Tensor) -> Tensor:
    steps = torch.clamp(logs - 1, min=0)
    share = torch.where(logs > 0, mantissa[steps % 8] << (steps // 8), 0)
    free = (1 << gaps._PRECISION) - (share > 0).sum(-1, keepdim=True)
    whole = torch.clamp(share.sum(-1, keepdim=True), min=1)
    weights = torch.where(share > 0, 1 + share * free // whole, 0)
    rest = (1 << gaps._PRECISION) - weights.sum(-1, keepdim=True)
    return weights.scatter_add(-1, logs.argmax(-1, keepdim=True), rest)


def _header_bytes(seen: Tensor) -> Tensor:
    """The model's byte, all counts but the last, and the tables without their trailing zeros."""
    place = torch.arange(1, seen.shape[-1] + 1, device=seen.device)
    length = torch.where(seen > 0, place, 0).amax(-1)
    tables = (length + (length > 0)).sum(-1)
    return torch.where(tables > 0, 1 + 4 * (seen.shape[-2] - 1) + tables, 0)


def _log2(x: Tensor, table: Tensor) -> Tensor:
    """2**16 log2 x rounded down, from the exponent and the first mantissa bits of its float."""
    form = torch.clamp(x, min=1).double().view(torch.int64)
    return (((form >> 52) - 1023) << 16) + table[(form >> 40) & 4095]


@lru_cache(maxsize=8)
def _tables(device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Bucket bounds, bits that a bucket costs beside its log-weight, mantissas, logarithms."""
    fine = np.arange(gaps._BUCKETS + 1)
    ends = [np.searchsorted(gaps._COARSE[s], fine) for s in range(_MODELS)]
    low = np.zeros((_MODELS, 1, 1, gaps._BUCKETS), np.int64)
    for s in range(_MODELS):
        bits = gaps._low_bits(s)[: gaps._BUCKETS]
        low[s, 0, 0, : len(bits)] = bits
    tables = np.stack(ends), low + gaps._PRECISION, gaps._MANTISSA, gaps._LOG2
    bounds, cost, mantissa, logs = (torch.from_numpy(x).to(device) for x in tables)
    return bounds, cost, mantissa, logs
