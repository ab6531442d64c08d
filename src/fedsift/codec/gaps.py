"""The gaps between kept coordinates, in a range coder under tables of their own frequencies.

Kept coordinates cluster, so that the gaps g = i_j - i_(j-1) - 1 of real masks are far from
geometric; a table of their frequencies, sent with them, costs a few bytes and takes a third off
the size. Everything that fixes a size or a probability is integer arithmetic, the same on every
machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import constriction
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedsift.codec import tables
from fedsift.codec.bits import Octets, bytes_for, pack_bits, unpack_bits
from fedsift.codec.errors import FrameError, require
from fedsift.codec.tables import PIECE, Ints

FINE = 3  # the finest buckets split an octave of gaps into 2**3
BUCKETS = 240  # fine buckets needed for gaps below 2**32
_LAYER = 1 << 16  # a smaller layer cannot earn back a table of its own
_UNIFORM = constriction.stream.model.Uniform()
_CHUNK = 16  # low bits of a gap travel in symbols of at most so many bits


def segments(layers: Ints, d: int) -> Ints:
    """Start offsets of the segments: a small layer joins what stands before it."""
    large = np.diff(layers, append=d) >= _LAYER
    large[0] = True
    return layers[large]


def gaps_of(coded: Ints) -> Ints:
    """How many coordinates each index skips."""
    gaps = coded.copy()
    gaps[1:] -= coded[:-1]
    gaps[1:] -= 1
    return gaps


def fine_buckets(gaps: Ints) -> Octets:
    """Find each gap's fine bucket."""
    buckets = np.empty(len(gaps), np.uint8)
    for at in range(0, len(gaps), PIECE):
        buckets[at : at + PIECE] = _bucket(gaps[at : at + PIECE], FINE)
    return buckets


def _bucket(gaps: Ints, sub_bits: int) -> Ints:
    """Read the bucket off the gap's float64 form: exponent and first mantissa bits."""
    head = gaps.astype(np.float64).view(np.int64) >> (52 - sub_bits)
    return np.where(gaps < 1 << sub_bits, gaps, head - ((1022 + sub_bits) << sub_bits))


def low_bits(sub_bits: int) -> Ints:
    """How many bits of a gap its bucket leaves open, by bucket."""
    low: Ints = np.maximum((np.arange((33 - sub_bits) << sub_bits) >> sub_bits) - 1, 0)
    return low


def _lowest_gap(sub_bits: int) -> Ints:
    """Find the smallest gap of each bucket."""
    low = low_bits(sub_bits)
    lowest: Ints = (np.arange(len(low)) - (low << sub_bits)) << low
    return lowest


def _count(buckets: Octets, counts: Ints, width: int) -> Ints:
    """Count the buckets in consecutive runs of lengths ``counts``, a row for each run."""
    seen = np.zeros((len(counts), width), np.int64)
    for row, end in enumerate(np.cumsum(counts)):
        for at in range(end - counts[row], end, PIECE):
            seen[row] += np.bincount(buckets[at : min(at + PIECE, end)], minlength=width)
    return seen


def histogram_of(coded: Ints, starts: Ints, buckets: Octets) -> Ints:
    """Count the fine buckets of each segment."""
    counts = np.diff(np.searchsorted(coded, starts), append=len(coded))
    return _count(buckets, counts, BUCKETS)


def stacked_histograms(indices: Tensor, starts: Ints) -> Tensor:
    """:func:`histogram_of` for each row of a stack ``(clients, k)``, counted where the stack is.

    >>> rows, starts = np.array([[0, 1, 30], [5, 6, 7]]), np.array([0, 20])
    >>> both = stacked_histograms(torch.from_numpy(rows), starts).numpy()
    >>> [np.array_equal(h, histogram_of(r, starts, fine_buckets(gaps_of(r))))
    ...  for h, r in zip(both, rows)]
    [True, True]
    """
    gaps = indices.clone()
    gaps[:, 1:] -= indices[:, :-1] + 1
    head = (gaps.double().view(torch.int64) >> (52 - FINE)) - ((1022 + FINE) << FINE)
    buckets = torch.where(gaps < 1 << FINE, gaps, head)
    bounds = torch.from_numpy(starts[1:]).to(indices.device)
    rows = torch.arange(len(indices), device=indices.device)[:, None] * len(starts)
    cell = (rows + torch.bucketize(indices.contiguous(), bounds, right=True)) * BUCKETS + buckets
    cells = len(indices) * len(starts) * BUCKETS
    seen = torch.zeros(cells, dtype=torch.int64, device=cell.device)
    seen.scatter_add_(0, cell.view(-1), torch.ones_like(cell).view(-1))
    return seen.view(len(indices), len(starts), BUCKETS)


def _kind(model: int) -> tuple[int, bool, bool]:
    """Bits of a gap that a bucket tells, a table a segment or one for all, coarse or fine."""
    return model & 3, bool(model & 4), bool(model & 8)


@dataclass(frozen=True)
class GapModel:
    """One table of log-weights a segment, and how many gaps each codes."""

    sub_bits: int
    layered: bool
    coarse: bool
    logs: Ints  # (tables, buckets)
    counts: Ints  # (tables,)

    @classmethod
    def fit(cls, histogram: Ints, kind: int) -> GapModel:
        """The tables of one kind for a fine histogram."""
        sub_bits, layered, coarse = _kind(kind)
        firsts = np.unique(COARSER[sub_bits], return_index=True)[1]
        seen = np.add.reduceat(histogram, firsts, axis=1)
        seen = seen if layered else seen.sum(axis=0, keepdims=True)
        logs = tables.log_weights(torch.from_numpy(seen), coarse).numpy()
        return cls(sub_bits, layered, coarse, logs, seen.sum(axis=1))

    @classmethod
    def parse(cls, payload: bytes, size: int, starts: Ints, d: int) -> tuple[GapModel, bytes]:
        """Read the header; return the range coder's bytes with the model."""
        require(size == 0 or (len(payload) > 0 and payload[0] < 16), "entropy: unknown model")
        sub_bits, layered, coarse = _kind(payload[0] if size else 0)
        sizes = np.diff(starts, append=d) if layered else np.array([d])
        at = 1 + 4 * (len(sizes) - 1) if size else 0
        require(len(payload) >= at, "entropy: truncated")
        given = np.frombuffer(payload[1:at], "<u4").astype(np.int64)
        counts = np.append(given, size - given.sum())
        require((counts >= 0).all() and (counts <= sizes).all(), "entropy: impossible counts")
        logs = np.zeros((len(sizes), len(low_bits(sub_bits))), np.int64)
        for row in np.flatnonzero(counts):
            length = payload[at] if at < len(payload) else 0
            require(0 < length <= logs.shape[1], "entropy: bad table")
            end = at + 1 + bytes_for(length, 4 if coarse else 8)
            require(end <= len(payload), "entropy: truncated")
            table = unpack_bits(payload[at + 1 : end], length, 4 if coarse else 8).astype(np.int64)
            require(table[-1] > 0 and table.max() <= tables.TOP, "entropy: bad table")
            logs[row, :length] = tables.from_coarse(table) if coarse else table
            at = end
        return cls(sub_bits, layered, coarse, logs, counts), payload[at:]

    def header(self) -> bytes:
        """Write the model's byte, all counts but the last, and the tables that are used."""
        if not self.counts.any():
            return b""
        kind = self.sub_bits + 4 * self.layered + 8 * self.coarse
        start = bytes([kind]) + self.counts[:-1].astype("<u4").tobytes()
        return start + b"".join(self._table(row) for row in self.logs[self.counts > 0])

    def _table(self, row: Ints) -> bytes:
        """A table's length without its trailing zeros, then its log-weights."""
        logs = np.trim_zeros(row, "b")
        listed = (tables.to_coarse(logs) if self.coarse else logs).astype(np.uint8)
        return bytes([len(logs)]) + pack_bits(listed, 4 if self.coarse else 8)

    @cached_property
    def weights(self) -> Ints:
        """Probabilities times 2**24, at least 1 if present; the first largest has the rest."""
        found: Ints = tables.weights(torch.from_numpy(self.logs)).numpy()
        return found

    def _code_bytes(self, buckets: Octets) -> int:
        """The bytes of the range coder, which follow from how often each bucket occurs."""
        seen = _count(buckets, self.counts, self.logs.shape[1])
        coded = tables.cost(torch.from_numpy(seen), torch.from_numpy(self.weights)).sum()
        return int(tables.code_bytes(coded + int((seen * low_bits(self.sub_bits)).sum() << 16)))

    def write(self, gaps: Ints, fine: Octets) -> bytes:
        """Encode the gaps: all buckets, then the low bits of all gaps."""
        encoder = tables.encoder()
        buckets = COARSER[self.sub_bits][fine]
        for part, present, table in self._tables():
            if table:
                rank = np.zeros(BUCKETS, np.int32)
                rank[present] = np.arange(len(present))
                encoder.encode(rank[buckets[part]], table)
        for shift, which, sizes in self._chunks(buckets):
            low = (gaps[which] >> shift).astype(np.int32)
            encoder.encode(low & (sizes - np.int32(1)), _UNIFORM, sizes)
        return tables.finish(encoder, self._code_bytes(buckets))

    def read(self, body: bytes) -> Ints:
        """Decode the gaps; there must be as many bytes as their histogram says."""
        decoder = tables.decoder_of(body)
        buckets = np.empty(int(self.counts.sum()), np.uint8)
        try:
            for part, present, table in self._tables():
                symbols = np.zeros(1, np.int32)
                if table:
                    symbols = decoder.decode(table, part.stop - part.start)
                buckets[part] = present[symbols]
            gaps = _lowest_gap(self.sub_bits)[buckets]
            for shift, which, sizes in self._chunks(buckets):
                low = decoder.decode(_UNIFORM, sizes)
                gaps[which] += low.astype(np.int64) << shift
        except AssertionError as error:  # constriction's word for bytes outside every symbol
            raise FrameError("entropy: not what an encoder writes") from error
        require(len(body) == self._code_bytes(buckets), "entropy: not as long as its gaps")
        return gaps

    def _tables(self) -> Iterator[tuple[slice, Ints, Any]]:
        """Pieces of the gaps, each with its table's buckets, and its model if these are several."""
        for row, end in enumerate(np.cumsum(self.counts)):
            present, table = tables.alphabet(self.weights[row])
            for at in range(end - self.counts[row], end, PIECE):
                yield slice(at, min(at + PIECE, end)), present, table

    def _chunks(self, buckets: Octets) -> Iterator[tuple[int, Ints, npt.NDArray[np.int32]]]:
        """Which gaps have low bits, and how many values these can take, 16 bits at a time."""
        low = low_bits(self.sub_bits).astype(np.int32)
        for shift in (0, _CHUNK):
            for at in range(0, len(buckets), PIECE):
                width = low[buckets[at : at + PIECE]] - shift
                which = np.flatnonzero(width > 0)
                if len(which):
                    yield shift, which + at, np.int32(1) << np.minimum(width[which], _CHUNK)

    def fits(self, coded: Ints, starts: Ints, d: int) -> bool:
        """Whether every index lies in the segment whose table coded it."""
        bounds = np.append(starts[1:], d) if self.layered else np.array([d])
        return bool((np.searchsorted(coded, bounds) == np.cumsum(self.counts)).all())


COARSER = [_bucket(_lowest_gap(FINE), s).astype(np.uint8) for s in range(FINE + 1)]
