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

from fedsift.codec.errors import FrameError, require

Ints = npt.NDArray[np.int64]
Octets = npt.NDArray[np.uint8]

_FINE = 3  # the finest buckets split an octave of gaps into 2**3
_BUCKETS = 240  # fine buckets needed for gaps below 2**32
_LAYER = 1 << 16  # a smaller layer cannot earn back a table of its own
_PRECISION = 24  # the range coder's probabilities are multiples of 2**-24
_TOP = 192  # the largest log-weight: 24 octaves of 8 steps; 0 means an absent bucket
_MANTISSA = np.array([1024, 1117, 1218, 1328, 1448, 1579, 1722, 1878])  # 1024 * 2**(j/8)
_UNIFORM = constriction.stream.model.Uniform()
_PIECE = 1 << 14  # gaps at a time: fresh memory would cost more than the arithmetic
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
    for at in range(0, len(gaps), _PIECE):
        buckets[at : at + _PIECE] = _bucket(gaps[at : at + _PIECE], _FINE)
    return buckets


def _bucket(gaps: Ints, sub_bits: int) -> Ints:
    """Read the bucket off the gap's float64 form: exponent and first mantissa bits."""
    head = gaps.astype(np.float64).view(np.int64) >> (52 - sub_bits)
    return np.where(gaps < 1 << sub_bits, gaps, head - ((1022 + sub_bits) << sub_bits))


def _low_bits(sub_bits: int) -> Ints:
    """How many bits of a gap its bucket leaves open, by bucket."""
    low: Ints = np.maximum((np.arange((33 - sub_bits) << sub_bits) >> sub_bits) - 1, 0)
    return low


def _lowest_gap(sub_bits: int) -> Ints:
    """Find the smallest gap of each bucket."""
    low = _low_bits(sub_bits)
    lowest: Ints = (np.arange(len(low)) - (low << sub_bits)) << low
    return lowest


def _count(buckets: Octets, counts: Ints, width: int) -> Ints:
    """Count the buckets in consecutive runs of lengths ``counts``, a row for each run."""
    seen = np.zeros((len(counts), width), np.int64)
    for row, end in enumerate(np.cumsum(counts)):
        for at in range(end - counts[row], end, _PIECE):
            seen[row] += np.bincount(buckets[at : min(at + _PIECE, end)], minlength=width)
    return seen


def histogram_of(coded: Ints, starts: Ints, buckets: Octets) -> Ints:
    """Count the fine buckets of each segment."""
    counts = np.diff(np.searchsorted(coded, starts), append=len(coded))
    return _count(buckets, counts, _BUCKETS)


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
    head = (gaps.double().view(torch.int64) >> (52 - _FINE)) - ((1022 + _FINE) << _FINE)
    buckets = torch.where(gaps < 1 << _FINE, gaps, head)
    bounds = torch.from_numpy(starts[1:]).to(indices.device)
    rows = torch.arange(len(indices), device=indices.device)[:, None] * len(starts)
    cell = (rows + torch.bucketize(indices, bounds, right=True)) * _BUCKETS + buckets
    cells = len(indices) * len(starts) * _BUCKETS
    seen = torch.zeros(cells, dtype=torch.int64, device=cell.device)
    seen.scatter_add_(0, cell.view(-1), torch.ones_like(cell).view(-1))
    return seen.view(len(indices), len(starts), _BUCKETS)


def _log2_table() -> Ints:
    """Floor of 2**16 log2(1 + i / 4096), bit by bit: square, and see whether 2 is passed."""
    x, result = (np.arange(4096) + 4096) << 18, np.zeros(4096, np.int64)
    for _ in range(16):
        x = x * x >> 30
        passed = x >> 31
        x >>= passed
        result = 2 * result + passed
    return result


_LOG2 = _log2_table()


def _log2(x: Ints) -> Ints:
    """Return 2**16 log2 x rounded down, from the first 13 bits of x < 2**51; of 0, as of 1."""
    x = np.maximum(x, 1)
    exponent = np.frexp(x.astype(np.float64))[1].astype(np.int64) - 1
    result: Ints = (exponent << 16) + _LOG2[(x << 12 >> exponent) & 4095]
    return result


@dataclass(frozen=True)
class GapModel:
    """One table of log-weights a segment, and how many gaps each codes."""

    sub_bits: int
    layered: bool
    logs: Ints  # (tables, buckets)
    counts: Ints  # (tables,)

    @classmethod
    def fit(cls, histogram: Ints, sub_bits: int, layered: bool) -> tuple[int, GapModel]:
        """Choose the weights for a fine histogram; return the payload's size with the model."""
        firsts = np.unique(_COARSE[sub_bits], return_index=True)[1]
        seen = np.add.reduceat(histogram, firsts, axis=1)
        seen = seen if layered else seen.sum(axis=0, keepdims=True)
        below_top = _log2(seen.max(axis=1, keepdims=True)) - _log2(seen)
        logs = np.where(seen > 0, _TOP - np.minimum((below_top + 4096) >> 13, _TOP - 1), 0)
        model = cls(sub_bits, layered, logs, seen.sum(axis=1))
        return len(model.header()) + 4 * model.words(seen), model

    @classmethod
    def parse(cls, payload: bytes, size: int, starts: Ints, d: int) -> tuple[GapModel, bytes]:
        """Read the header; return the range coder's bytes with the model."""
        require(size == 0 or (len(payload) > 0 and payload[0] < 8), "entropy: unknown model")
        sub_bits, layered = (payload[0] & 3, payload[0] > 3) if size else (0, False)
        sizes = np.diff(starts, append=d) if layered else np.array([d])
        at = 1 + 4 * (len(sizes) - 1) if size else 0
        require(len(payload) >= at, "entropy: truncated")
        given = np.frombuffer(payload[1:at], "<u4").astype(np.int64)
        counts = np.append(given, size - given.sum())
        require((counts >= 0).all() and (counts <= sizes).all(), "entropy: impossible counts")
        logs = np.zeros((len(sizes), len(_low_bits(sub_bits))), np.int64)
        for row in np.flatnonzero(counts):
            length = payload[at] if at < len(payload) else 0
            table = np.frombuffer(payload[at + 1 : at + 1 + length], np.uint8)
            whole = 0 < length == len(table) <= logs.shape[1]
            require(whole and table[-1] > 0 and table.max() <= _TOP, "entropy: bad table")
            logs[row, :length] = table
            at += 1 + length
        return cls(sub_bits, layered, logs, counts), payload[at:]

    def header(self) -> bytes:
        """Write the model's byte, all counts but the last, and the tables that are used."""
        if not self.counts.any():
            return b""
        start = bytes([self.sub_bits + 4 * self.layered]) + self.counts[:-1].astype("<u4").tobytes()
        used = (row.astype(np.uint8).tobytes().rstrip(b"\0") for row in self.logs[self.counts > 0])
        return start + b"".join(bytes([len(table)]) + table for table in used)

    @cached_property
    def weights(self) -> Ints:
        """Probabilities times 2**24, at least 1 if present; the first largest has the rest."""
        steps = np.maximum(self.logs - 1, 0)
        share = np.where(self.logs > 0, _MANTISSA[steps % 8] << (steps // 8), 0)
        free = (1 << _PRECISION) - np.count_nonzero(share, axis=1, keepdims=True)
        total = np.maximum(share.sum(axis=1, keepdims=True), 1)
        weights: Ints = np.where(share > 0, 1 + share * free // total, 0)
        rest = (1 << _PRECISION) - weights.sum(axis=1)
        weights[np.arange(len(weights)), self.logs.argmax(axis=1)] += rest
        return weights

    def words(self, seen: Ints) -> int:
        """Bound the range coder's 32-bit words, given how often each bucket occurs.

        A symbol shrinks the range, which is at least 2**32, to floor(range / 2**24) * weight, and
        the floor costs at most 2**-8 / ln 2 bits beyond the symbol's information. Symbols of a bit
        or more halve the range, so what they lose adds up to at most 2**-7 / ln 2 bits for every
        32, less than 2**-11 of the whole; a likelier symbol is charged 2**-7 bits. The last word
        is the range's lower end, rounded up. A bucket that is alone in its table is not coded.
        """
        likely = (self.weights > 1 << (_PRECISION - 1)) & (self.weights < 1 << _PRECISION)
        open_bits = _PRECISION + _low_bits(self.sub_bits)
        cost = (open_bits << 16) - _log2(self.weights) + (likely << 9)
        total = int((seen * cost).sum())
        return (((total + (total >> 11)) >> 16) + 1) // 32 + 1 if total else 0

    def seal(self, encoder: Any, buckets: Octets) -> bytes:
        """Give what was encoded the size that follows from the buckets' histogram.

        All that is added is zeros, and so is all that is cut: a last word that constriction appends
        if the range is narrow, and that its decoder takes for granted.
        """
        words: bytes = encoder.get_compressed().astype("<u4").tobytes()
        size = 4 * self.words(_count(buckets, self.counts, self.logs.shape[1]))
        return words.ljust(size, b"\0")[:size]

    def write(self, gaps: Ints, fine: Octets) -> bytes:
        """Encode the gaps: all buckets, then the low bits of all gaps."""
        encoder = constriction.stream.queue.RangeEncoder()
        buckets = _COARSE[self.sub_bits][fine]
        for part, present, table in self._tables():
            if table:
                rank = np.zeros(_BUCKETS, np.int32)
                rank[present] = np.arange(len(present))
                encoder.encode(rank[buckets[part]], table)
        for shift, which, sizes in self._chunks(buckets):
            low = (gaps[which] >> shift).astype(np.int32)
            encoder.encode(low & (sizes - np.int32(1)), _UNIFORM, sizes)
        return self.seal(encoder, buckets)

    def read(self, body: bytes) -> Ints:
        """Decode the gaps; there must be as many words as their histogram says."""
        require(len(body) % 4 == 0, "entropy: not whole words")
        words = np.frombuffer(body, "<u4").astype("=u4")
        decoder = constriction.stream.queue.RangeDecoder(words)
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
        seen = _count(buckets, self.counts, self.logs.shape[1])
        require(len(words) == self.words(seen), "entropy: not as long as its gaps")
        return gaps

    def _tables(self) -> Iterator[tuple[slice, Ints, Any]]:
        """Pieces of the gaps, each with its table's buckets, and its model if these are several.

        constriction gives symbol i of A the probability (1 + floor(p_i (2**24 - A) / sum p)) /
        2**24, which p_i = weight_i - 1 makes exactly the weight.
        """
        for row, end in enumerate(np.cumsum(self.counts)):
            present = np.flatnonzero(self.weights[row])
            shares = self.weights[row, present] - 1.0
            choices = constriction.stream.model.Categorical
            table = choices(shares, perfect=False) if len(shares) > 1 else None
            for at in range(end - self.counts[row], end, _PIECE):
                yield slice(at, min(at + _PIECE, end)), present, table

    def _chunks(self, buckets: Octets) -> Iterator[tuple[int, Ints, npt.NDArray[np.int32]]]:
        """Which gaps have low bits, and how many values these can take, 16 bits at a time."""
        low = _low_bits(self.sub_bits).astype(np.int32)
        for shift in (0, _CHUNK):
            for at in range(0, len(buckets), _PIECE):
                width = low[buckets[at : at + _PIECE]] - shift
                which = np.flatnonzero(width > 0)
                if len(which):
                    yield shift, which + at, np.int32(1) << np.minimum(width[which], _CHUNK)

    def fits(self, coded: Ints, starts: Ints, d: int) -> bool:
        """Whether every index lies in the segment whose table coded it."""
        bounds = np.append(starts[1:], d) if self.layered else np.array([d])
        return bool((np.searchsorted(coded, bounds) == np.cumsum(self.counts)).all())


_COARSE = [_bucket(_lowest_gap(_FINE), s).astype(np.uint8) for s in range(_FINE + 1)]


def best_model(histogram: Ints) -> tuple[int, GapModel]:
    """Try every model on the histogram; the first of the smallest wins."""
    layerings = (False, True) if len(histogram) > 1 else (False,)
    fitted = [GapModel.fit(histogram, s, each) for each in layerings for s in range(_FINE + 1)]
    return min(fitted, key=lambda pair: pair[0])
