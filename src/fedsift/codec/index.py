"""Index coders write a mask, the coordinates that are kept: Bitmap, Packed and Entropy.

Each takes the k strictly ascending indices in [0, d) and the ascending start offsets of the layers,
of which the first is 0. The receiver knows d, k and the layers; the payload omits them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from fedsift.codec.bit_packing import packed_size
from fedsift.codec.errors import require
from fedsift.codec.index_gaps import (
    GapModel,
    fine_buckets,
    gaps_of,
    segment_histogram,
    segment_starts,
)
from fedsift.codec.index_sizes import mask_sizes, smallest_model, smallest_sizes
from fedsift.codec.range_coder import IntArray
from fedsift.selection.masks import positions

MAX_DIMENSION = 1 << 32


class IndexCoder(Protocol):
    """A way to write k ascending indices in [0, d)."""

    name: ClassVar[str]
    wire_id: ClassVar[int]

    def size_of(self, k: int, d: int) -> int | None:
        """Return the bytes of any k indices in [0, d), or None if they depend on the indices."""

    def size(self, indices: IntArray, d: int, layers: IntArray) -> int:
        """Return ``len(encode(...))`` without encoding."""

    def encode(self, indices: IntArray, d: int, layers: IntArray) -> bytes:
        """Return the indices as bytes."""

    def decode(self, payload: bytes, k: int, d: int, layers: IntArray) -> IntArray:
        """Read k indices; raise :class:`FrameError` if the bytes are malformed."""


@dataclass(frozen=True)
class Bitmap:
    """One bit per coordinate, lowest bit first: ceil(d / 8) bytes.

    >>> Bitmap().encode(np.array([0, 9]), 10, np.array([0])).hex()
    '0102'
    """

    name: ClassVar[str] = "bitmap"
    wire_id: ClassVar[int] = 1

    def size_of(self, k: int, d: int) -> int:
        """Return the bytes of any k indices in [0, d)."""
        return packed_size(d, 1)

    def size(self, indices: IntArray, d: int, layers: IntArray) -> int:
        """Return ``len(encode(...))`` without encoding."""
        return self.size_of(len(indices), d)

    def encode(self, indices: IntArray, d: int, layers: IntArray) -> bytes:
        """Return the indices as bytes."""
        mask = np.zeros(d, np.bool_)
        mask[_checked(indices, d)] = True
        return np.packbits(mask, bitorder="little").tobytes()

    def decode(self, payload: bytes, k: int, d: int, layers: IntArray) -> IntArray:
        """Read k indices; raise :class:`FrameError` if the bytes are malformed."""
        _require_possible(k, d)
        require(len(payload) == self.size_of(k, d), "bitmap: wrong length")
        packed = np.frombuffer(payload, np.uint8)
        require(int(np.bitwise_count(packed).sum(dtype=np.int64)) == k, "bitmap: not k indices")
        indices = np.flatnonzero(np.unpackbits(packed, bitorder="little"))
        require(k == 0 or int(indices[-1]) < d, "bitmap: padding is not zero")
        return indices


@dataclass(frozen=True)
class Packed:
    """Each index in ceil(log2 d) bits, lowest bit first: ceil(k ceil(log2 d) / 8) bytes.

    >>> Packed().encode(np.array([1, 6]), 8, np.array([0])).hex()
    '31'
    """

    name: ClassVar[str] = "packed"
    wire_id: ClassVar[int] = 2

    def size_of(self, k: int, d: int) -> int:
        """Return the bytes of any k indices in [0, d)."""
        return packed_size(k, (d - 1).bit_length())

    def size(self, indices: IntArray, d: int, layers: IntArray) -> int:
        """Return ``len(encode(...))`` without encoding."""
        return self.size_of(len(indices), d)

    def encode(self, indices: IntArray, d: int, layers: IntArray) -> bytes:
        """Return the indices as bytes."""
        as_bytes = _checked(indices, d).astype("<u4").view(np.uint8).reshape(-1, 4)
        bits = np.unpackbits(as_bytes, axis=1, count=(d - 1).bit_length(), bitorder="little")
        return np.packbits(bits, bitorder="little").tobytes()

    def decode(self, payload: bytes, k: int, d: int, layers: IntArray) -> IntArray:
        """Read k indices; raise :class:`FrameError` if the bytes are malformed."""
        _require_possible(k, d)
        width = (d - 1).bit_length()
        require(len(payload) == self.size_of(k, d), "packed: wrong length")
        flat = np.unpackbits(np.frombuffer(payload, np.uint8), bitorder="little")
        require(not flat[k * width :].any(), "packed: padding is not zero")
        as_bytes = np.packbits(flat[: k * width].reshape(k, width), axis=1, bitorder="little")
        padded = np.zeros((k, 8), np.uint8)
        padded[:, : as_bytes.shape[1]] = as_bytes
        indices = padded.view("<i8").reshape(k).astype(np.int64)
        require(_ascending_below(indices, d), "packed: indices out of order or out of range")
        return indices


@dataclass(frozen=True)
class Entropy:
    """Gaps between indices in a range coder, under tables of their frequencies.

    A gap's bucket is its exponent and the first s bits after the leading one. Buckets are coded
    under one table, or under one table per large layer. The gap's remaining low bits follow, coded
    uniformly. The size depends only on :func:`gap_histogram`; the encoder takes the smallest of
    sixteen models: s = 0..3, one table or layered, log-weights of eight bits or four.

    >>> coder, mask = Entropy(), np.arange(0, 1000, 10)
    >>> len(coder.encode(mask, 1000, np.array([0]))), coder.size(mask, 1000, np.array([0]))
    (9, 9)
    """

    name: ClassVar[str] = "entropy"
    wire_id: ClassVar[int] = 3

    def size_of(self, k: int, d: int) -> None:
        """Return None: the size depends on the indices."""

    def size(self, indices: IntArray, d: int, layers: IntArray) -> int:
        """Return ``len(encode(...))`` without encoding."""
        return entropy_size(gap_histogram(indices, d, layers))

    def encode(self, indices: IntArray, d: int, layers: IntArray) -> bytes:
        """Return the indices as bytes."""
        return _plan_entropy(indices, d, layers)[1]()

    def decode(self, payload: bytes, k: int, d: int, layers: IntArray) -> IntArray:
        """Read k indices; raise :class:`FrameError` if the bytes are malformed."""
        _require_possible(k, d)
        num_coded = min(k, d - k)
        starts = segment_starts(layers, d)
        model, code = GapModel.parse(payload, num_coded, starts, d)
        coded = model.decode(code)
        coded[1:] += 1
        np.cumsum(coded, out=coded)
        is_consistent = model.is_consistent(coded, starts, d)
        require(is_consistent, "entropy: an index is outside its layer")
        return coded if num_coded == k else _complement(coded, d)


INDEX_CODERS: tuple[IndexCoder, ...] = (Bitmap(), Packed(), Entropy())
"""Every index coder."""


def encode_shortest(indices: IntArray, d: int, layers: IntArray) -> tuple[IndexCoder, bytes]:
    """Return the coder with the fewest bytes and its bytes; ties go to the first coder.

    >>> coder, payload = encode_shortest(np.array([7]), 1000, np.array([0]))
    >>> coder.name, payload.hex()
    ('packed', '0700')
    """
    size, encode = _plan_entropy(indices, d, layers)
    coder, fixed_size = _shortest_fixed(len(indices), d)
    if fixed_size <= size:
        return coder, coder.encode(indices, d, layers)
    return Entropy(), encode()


def _shortest_fixed(k: int, d: int) -> tuple[IndexCoder, int]:
    """Return the shorter of the coders whose size does not depend on the indices, and its size."""
    bitmap, packed = Bitmap(), Packed()
    sized: list[tuple[IndexCoder, int]] = [
        (bitmap, bitmap.size_of(k, d)),
        (packed, packed.size_of(k, d)),
    ]
    return min(sized, key=lambda pair: pair[1])


def _plan_entropy(indices: IntArray, d: int, layers: IntArray) -> tuple[int, Callable[[], bytes]]:
    """Return the entropy coder's size, and a function that encodes."""
    coded = _minority(_checked(indices, d), d)
    gaps = gaps_of(coded)
    buckets = fine_buckets(gaps)
    histogram = segment_histogram(coded, segment_starts(layers, d), buckets)
    size, model = smallest_model(histogram)
    return size, lambda: model.header() + model.encode(gaps, buckets)


def shortest_sizes(indices: Tensor, d: int, layers: IntArray) -> list[tuple[IndexCoder, int]]:
    """Return the coder with the fewest bytes, and its size, per client of a stack ``(clients, k)``.

    On a GPU, only the sizes are copied to the host.

    >>> shortest_sizes(torch.tensor([[7], [8]]), 1000, np.array([0])) == [(Packed(), 2)] * 2
    True
    """
    fixed = _shortest_fixed(indices.shape[-1], d)
    sizes = _entropy_sizes(indices, d, layers).tolist()
    return [min(fixed, (Entropy(), size), key=lambda pair: pair[1]) for size in sizes]


def _entropy_sizes(indices: Tensor, d: int, layers: IntArray) -> Tensor:
    if indices.device.type == "cpu":  # NumPy counts faster and needs less memory
        histograms = [gap_histogram(row, d, layers) for row in indices.numpy()]
        return smallest_sizes(torch.from_numpy(np.stack(histograms)))
    coded = indices if 2 * indices.shape[-1] <= d else _stacked_complement(indices, d)
    return mask_sizes(coded, segment_starts(layers, d))


def _stacked_complement(indices: Tensor, d: int) -> Tensor:
    """Return the indices missing from each row.

    >>> _stacked_complement(torch.tensor([[0, 2], [1, 2]]), 3).tolist()
    [[1], [0]]
    """
    absent = torch.ones(len(indices), d, dtype=torch.bool, device=indices.device)
    absent.scatter_(1, indices, False)
    return positions(absent, d - indices.shape[-1])


def gap_histogram(indices: IntArray, d: int, layers: IntArray) -> IntArray:
    """Count the gaps by segment and fine bucket: ``(segments, 240)``.

    The entropy coder's size depends on these counts only. Segments start at 0 and at each layer of
    at least 2**16 coordinates. A gap g < 8 has bucket g, a larger one bucket 8 (e - 3) +
    floor(g / 2**(e - 3)) with e = floor(log2 g).

    >>> gap_histogram(np.array([0, 1, 30]), 99, np.array([0]))[0].nonzero()[0].tolist()
    [0, 22]
    """
    coded = _minority(indices, d)
    return segment_histogram(coded, segment_starts(layers, d), fine_buckets(gaps_of(coded)))


def entropy_size(histogram: IntArray) -> int:
    """Return the entropy coder's size in bytes from :func:`gap_histogram`.

    >>> entropy_size(np.zeros((1, 240), np.int64))
    0
    """
    return int(smallest_sizes(torch.from_numpy(histogram)[None]))


def _require_possible(k: int, d: int) -> None:
    require(0 <= k <= d and 1 <= d < MAX_DIMENSION, f"cannot keep {k} of {d} coordinates")


def _ascending_below(indices: IntArray, d: int) -> bool:
    inside = len(indices) == 0 or bool(indices[0] >= 0 and indices[-1] < d)
    return inside and bool((indices[1:] > indices[:-1]).all())


def _checked(indices: IntArray, d: int) -> IntArray:
    if not (1 <= d < MAX_DIMENSION and _ascending_below(indices, d)):
        raise ValueError(f"indices must be strictly ascending in [0, d), 1 <= d < 2**32, d = {d}")
    return indices


def _complement(indices: IntArray, d: int) -> IntArray:
    mask = np.ones(d, np.bool_)
    mask[indices] = False
    return np.flatnonzero(mask)


def _minority(indices: IntArray, d: int) -> IntArray:
    return indices if 2 * len(indices) <= d else _complement(indices, d)
