"""The entropy coder of masks: gaps between kept coordinates, under tables of their frequencies.

Kept coordinates cluster, so the gaps g = i_j - i_(j-1) - 1 of real masks are far from geometric.
Sending a table of their frequencies costs a few bytes and saves a third of the size. All sizes and
probabilities are integer arithmetic, the same on every machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsift.codec import range_coder
from fedsift.codec.bit_packing import ByteArray, pack_bits, packed_size, unpack_bits
from fedsift.codec.errors import require
from fedsift.codec.native import decoder_of
from fedsift.codec.range_coder import CHUNK, IntArray

FINE_BITS = 3
"""The finest buckets split an octave of gaps into 2**3."""
NUM_BUCKETS = 240
"""Fine buckets needed for gaps below 2**32."""
_MIN_SEGMENT = 1 << 16  # a separate table does not pay off for a smaller layer


def segment_starts(layers: IntArray, d: int) -> IntArray:
    """Return the start offsets of the segments: a small layer joins the segment before it."""
    is_large = np.diff(layers, append=d) >= _MIN_SEGMENT
    is_large[0] = True
    return layers[is_large]


def gaps_of(indices: IntArray) -> IntArray:
    """Return the number of coordinates skipped before each index.

    >>> gaps_of(np.array([2, 3, 7])).tolist()
    [2, 0, 3]
    """
    gaps = indices.copy()
    gaps[1:] -= indices[:-1]
    gaps[1:] -= 1
    return gaps


def fine_buckets(gaps: IntArray) -> ByteArray:
    """Return each gap's fine bucket."""
    buckets = np.empty(len(gaps), np.uint8)
    for start in range(0, len(gaps), CHUNK):
        buckets[start : start + CHUNK] = _bucket(gaps[start : start + CHUNK], FINE_BITS)
    return buckets


def _bucket(gaps: IntArray, sub_bits: int) -> IntArray:
    """Read the bucket off the gap's float64 form: the exponent and the first mantissa bits."""
    head = gaps.astype(np.float64).view(np.int64) >> (52 - sub_bits)
    return np.where(gaps < 1 << sub_bits, gaps, head - ((1022 + sub_bits) << sub_bits))


def low_bits(sub_bits: int) -> IntArray:
    """Return the number of low bits that each bucket leaves open."""
    low: IntArray = np.maximum((np.arange((33 - sub_bits) << sub_bits) >> sub_bits) - 1, 0)
    return low


def _lowest_gap(sub_bits: int) -> IntArray:
    """Return the smallest gap of each bucket."""
    low = low_bits(sub_bits)
    lowest: IntArray = (np.arange(len(low)) - (low << sub_bits)) << low
    return lowest


def _count(buckets: ByteArray, run_lengths: IntArray, width: int) -> IntArray:
    """Count the buckets in consecutive runs, one row per run."""
    counts = np.zeros((len(run_lengths), width), np.int64)
    for row, end in enumerate(np.cumsum(run_lengths)):
        for start in range(end - run_lengths[row], end, CHUNK):
            chunk = buckets[start : min(start + CHUNK, end)]
            counts[row] += np.bincount(chunk, minlength=width)
    return counts


def segment_histogram(indices: IntArray, starts: IntArray, buckets: ByteArray) -> IntArray:
    """Count the fine buckets of each segment: ``(segments, buckets)``."""
    run_lengths = np.diff(np.searchsorted(indices, starts), append=len(indices))
    return _count(buckets, run_lengths, NUM_BUCKETS)


def stacked_histograms(indices: Tensor, starts: IntArray) -> Tensor:
    """Return :func:`segment_histogram` of each row ``(masks, k)``, on the indices' device.

    >>> rows, starts = np.array([[0, 1, 30], [5, 6, 7]]), np.array([0, 20])
    >>> stacked = stacked_histograms(torch.from_numpy(rows), starts).numpy()
    >>> [np.array_equal(h, segment_histogram(r, starts, fine_buckets(gaps_of(r))))
    ...  for h, r in zip(stacked, rows)]
    [True, True]
    """
    gaps = indices.clone()
    gaps[:, 1:] -= indices[:, :-1] + 1
    head = (gaps.double().view(torch.int64) >> (52 - FINE_BITS)) - ((1022 + FINE_BITS) << FINE_BITS)
    buckets = torch.where(gaps < 1 << FINE_BITS, gaps, head)
    bounds = torch.from_numpy(starts[1:]).to(indices.device)
    rows = torch.arange(len(indices), device=indices.device)[:, None] * len(starts)
    segment = rows + torch.bucketize(indices.contiguous(), bounds, right=True)
    cell = segment * NUM_BUCKETS + buckets
    cells = len(indices) * len(starts) * NUM_BUCKETS
    counts = torch.zeros(cells, dtype=torch.int64, device=cell.device)
    counts.scatter_add_(0, cell.view(-1), torch.ones_like(cell).view(-1))
    return counts.view(len(indices), len(starts), NUM_BUCKETS)


def _unpack_kind(kind: int) -> tuple[int, bool, bool]:
    """Split a model's byte into its sub-bucket bits, whether it is layered, whether coarse."""
    return kind & 3, bool(kind & 4), bool(kind & 8)


@dataclass(frozen=True)
class GapModel:
    """The tables under which gaps are coded, and how many gaps each table codes.

    A bucket is the gap's exponent and the first ``sub_bits`` bits after the leading one. If
    ``layered``, each segment has its own table, else there is one. ``coarse`` tables store
    log-weights in four bits instead of eight.
    """

    sub_bits: int
    layered: bool
    coarse: bool
    logs: IntArray  # (tables, buckets)
    counts: IntArray  # (tables,)

    @classmethod
    def fit(cls, histogram: IntArray, kind: int) -> GapModel:
        """Fit the tables of one kind of model to a fine histogram."""
        sub_bits, layered, coarse = _unpack_kind(kind)
        firsts = np.unique(FINE_TO_BUCKET[sub_bits], return_index=True)[1]
        counts = np.add.reduceat(histogram, firsts, axis=1)
        counts = counts if layered else counts.sum(axis=0, keepdims=True)
        logs = range_coder.log_weights(torch.from_numpy(counts), coarse).numpy()
        return cls(sub_bits, layered, coarse, logs, counts.sum(axis=1))

    @classmethod
    def parse(cls, payload: bytes, n: int, starts: IntArray, d: int) -> tuple[GapModel, bytes]:
        """Read the model of n gaps; return it with the range coder's bytes."""
        require(n == 0 or (len(payload) > 0 and payload[0] < 16), "entropy: unknown model")
        sub_bits, layered, coarse = _unpack_kind(payload[0] if n else 0)
        sizes = np.diff(starts, append=d) if layered else np.array([d])
        at = 1 + 4 * (len(sizes) - 1) if n else 0
        require(len(payload) >= at, "entropy: truncated")
        given = np.frombuffer(payload[1:at], "<u4").astype(np.int64)
        counts = np.append(given, n - given.sum())
        require((counts >= 0).all() and (counts <= sizes).all(), "entropy: impossible counts")
        logs = np.zeros((len(sizes), len(low_bits(sub_bits))), np.int64)
        width = 4 if coarse else 8
        for row in np.flatnonzero(counts):
            length = payload[at] if at < len(payload) else 0
            require(0 < length <= logs.shape[1], "entropy: bad table")
            end = at + 1 + packed_size(length, width)
            require(end <= len(payload), "entropy: truncated")
            table = unpack_bits(payload[at + 1 : end], length, width).astype(np.int64)
            is_valid = table[-1] > 0 and table.max() <= range_coder.MAX_LOG
            require(is_valid, "entropy: bad table")
            logs[row, :length] = range_coder.from_coarse(table) if coarse else table
            at = end
        return cls(sub_bits, layered, coarse, logs, counts), payload[at:]

    def header(self) -> bytes:
        """Return the model's byte, all counts but the last, and the tables that are used."""
        if not self.counts.any():
            return b""
        kind = self.sub_bits + 4 * self.layered + 8 * self.coarse
        listed = self.counts[:-1].astype("<u4").tobytes()
        used_tables = self.logs[self.counts > 0]
        return bytes([kind]) + listed + b"".join(self._table(row) for row in used_tables)

    def _table(self, row: IntArray) -> bytes:
        """Return a table's length without its trailing zeros, then its log-weights."""
        logs = np.trim_zeros(row, "b")
        listed = (range_coder.to_coarse(logs) if self.coarse else logs).astype(np.uint8)
        return bytes([len(logs)]) + pack_bits(listed, 4 if self.coarse else 8)

    @cached_property
    def weights(self) -> IntArray:
        """The buckets' probabilities times 2**24, by table."""
        weights: IntArray = range_coder.probabilities(torch.from_numpy(self.logs)).numpy()
        return weights

    def _code_bytes(self, buckets: ByteArray) -> int:
        """Return the length of the range coder's bytes, which follows from the buckets' counts."""
        counts = _count(buckets, self.counts, self.logs.shape[1])
        symbols = torch.from_numpy(counts), torch.from_numpy(self.weights)
        low = int((counts * low_bits(self.sub_bits)).sum() << 16)
        return int(range_coder.code_bytes(range_coder.code_bits(*symbols).sum() + low))

    def encode(self, gaps: IntArray, fine: ByteArray) -> bytes:
        """Encode the gaps: all buckets, then the low bits of all gaps."""
        encoder = range_coder.new_encoder()
        buckets = FINE_TO_BUCKET[self.sub_bits][fine]
        for chunk, present, model in self._symbol_chunks():
            if model:
                rank = np.zeros(NUM_BUCKETS, np.int32)
                rank[present] = np.arange(len(present))
                encoder.encode(rank[buckets[chunk]], model)
        chunks = range_coder.low_bit_chunks(low_bits(self.sub_bits), buckets)
        for shift, positions, sizes in chunks:
            low = (gaps[positions] >> shift).astype(np.int32)
            encoder.encode(low & (sizes - np.int32(1)), range_coder.UNIFORM, sizes)
        return range_coder.final_code(encoder, self._code_bytes(buckets))

    def decode(self, code: bytes) -> IntArray:
        """Decode the gaps; raise :class:`FrameError` unless the code has exactly their length."""
        decoder, rows = decoder_of(code), range(len(self.counts))
        tables = [decoder.symbols(self.weights[row], int(self.counts[row])) for row in rows]
        buckets = np.concatenate(tables)
        lowest, low = _lowest_gap(self.sub_bits), low_bits(self.sub_bits)
        gaps = decoder.numbers(buckets, lowest, low)
        has_length = len(code) == self._code_bytes(buckets)
        require(has_length, "entropy: the code's length does not match its gaps")
        return gaps

    def _symbol_chunks(self) -> Iterator[tuple[slice, IntArray, Any]]:
        """Yield chunks of the gaps, each with its table's buckets and :func:`symbol_model`."""
        for row, end in enumerate(np.cumsum(self.counts)):
            present, model = range_coder.symbol_model(self.weights[row])
            for start in range(end - self.counts[row], end, CHUNK):
                yield slice(start, min(start + CHUNK, end)), present, model

    def is_consistent(self, indices: IntArray, starts: IntArray, d: int) -> bool:
        """Return whether every index lies in the segment whose table coded it."""
        bounds = np.append(starts[1:], d) if self.layered else np.array([d])
        return bool((np.searchsorted(indices, bounds) == np.cumsum(self.counts)).all())


FINE_TO_BUCKET = [
    _bucket(_lowest_gap(FINE_BITS), bits).astype(np.uint8) for bits in range(FINE_BITS + 1)
]
"""The bucket of each fine bucket, by the model's ``sub_bits``."""
