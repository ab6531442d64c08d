"""Which coordinates were kept, as bytes: a bitmap, packed indices, or entropy-coded gaps.

All three take the k ascending, distinct indices of [0, d) and the ascending start offsets of the
layers (the first is 0). The receiver knows d, k and the layers; the payload holds only the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from fedsift.codec.bits import bytes_for
from fedsift.codec.errors import require
from fedsift.codec.gaps import GapModel, fine_buckets, gaps_of, histogram_of, segments
from fedsift.codec.sizes import best_model, best_sizes, mask_sizes
from fedsift.codec.tables import Ints
from fedsift.selection.masks import positions

MAX_DIMENSION = 1 << 32


class IndexCoder(Protocol):
    """A way to write k ascending indices of [0, d)."""

    name: ClassVar[str]
    wire_id: ClassVar[int]

    def size_of(self, k: int, d: int) -> int | None:
        """The bytes of k indices of [0, d), if these do not matter."""

    def size(self, indices: Ints, d: int, layers: Ints) -> int:
        """Return ``len(encode(...))`` without encoding."""

    def encode(self, indices: Ints, d: int, layers: Ints) -> bytes:
        """Write the indices."""

    def decode(self, payload: bytes, k: int, d: int, layers: Ints) -> Ints:
        """Read the k indices back; raise :class:`FrameError` for any other bytes."""


@dataclass(frozen=True)
class Bitmap:
    """One bit a coordinate, the lowest bit of a byte first: ceil(d / 8) bytes.

    >>> Bitmap().encode(np.array([0, 9]), 10, np.array([0])).hex()
    '0102'
    """

    name: ClassVar[str] = "bitmap"
    wire_id: ClassVar[int] = 1

    def size_of(self, k: int, d: int) -> int:
        """The bytes of k indices of [0, d)."""
        return bytes_for(d, 1)

    def size(self, indices: Ints, d: int, layers: Ints) -> int:
        """Return ``len(encode(...))`` without encoding."""
        return self.size_of(len(indices), d)

    def encode(self, indices: Ints, d: int, layers: Ints) -> bytes:
        """Write the indices."""
        mask = np.zeros(d, np.bool_)
        mask[_checked(indices, d)] = True
        return np.packbits(mask, bitorder="little").tobytes()

    def decode(self, payload: bytes, k: int, d: int, layers: Ints) -> Ints:
        """Read the k indices back; any other bytes raise :class:`FrameError`."""
        _require_possible(k, d)
        require(len(payload) == self.size_of(k, d), "bitmap: wrong length")
        packed = np.frombuffer(payload, np.uint8)
        require(int(np.bitwise_count(packed).sum(dtype=np.int64)) == k, "bitmap: not k indices")
        indices = np.flatnonzero(np.unpackbits(packed, bitorder="little"))
        require(k == 0 or int(indices[-1]) < d, "bitmap: padding is not zero")
        return indices


@dataclass(frozen=True)
class Packed:
    """Each index in ceil(log2 d) bits, the lowest bit first: ceil(k ceil(log2 d) / 8) bytes.

    >>> Packed().encode(np.array([1, 6]), 8, np.array([0])).hex()
    '31'
    """

    name: ClassVar[str] = "packed"
    wire_id: ClassVar[int] = 2

    def size_of(self, k: int, d: int) -> int:
        """The bytes of k indices of [0, d)."""
        return bytes_for(k, (d - 1).bit_length())

    def size(self, indices: Ints, d: int, layers: Ints) -> int:
        """Return ``len(encode(...))`` without encoding."""
        return self.size_of(len(indices), d)

    def encode(self, indices: Ints, d: int, layers: Ints) -> bytes:
        """Write the indices."""
        octets = _checked(indices, d).astype("<u4").view(np.uint8).reshape(-1, 4)
        bits = np.unpackbits(octets, axis=1, count=(d - 1).bit_length(), bitorder="little")
        return np.packbits(bits, bitorder="little").tobytes()

    def decode(self, payload: bytes, k: int, d: int, layers: Ints) -> Ints:
        """Read the k indices back; any other bytes raise :class:`FrameError`."""
        _require_possible(k, d)
        width = (d - 1).bit_length()
        require(len(payload) == self.size_of(k, d), "packed: wrong length")
        flat = np.unpackbits(np.frombuffer(payload, np.uint8), bitorder="little")
        require(not flat[k * width :].any(), "packed: padding is not zero")
        octets = np.packbits(flat[: k * width].reshape(k, width), axis=1, bitorder="little")
        wide = np.zeros((k, 8), np.uint8)
        wide[:, : octets.shape[1]] = octets
        indices = wide.view("<i8").reshape(k).astype(np.int64)
        require(_ascending_below(indices, d), "packed: indices out of order or out of range")
        return indices


@dataclass(frozen=True)
class Entropy:
    """Gaps in a range coder, under tables of their own frequencies.

    A gap's bucket is its float form: the exponent and the first s bits after the leading one.
    Buckets are coded under one table, or one for each large layer; the gap's remaining low bits
    follow, uniform. The size is a function of :func:`gap_histogram` alone; the encoder tries all
    sixteen models (s = 0..3, one table or layered, log-weights of eight bits or four) on it.

    >>> coder, mask = Entropy(), np.arange(0, 1000, 10)
    >>> len(coder.encode(mask, 1000, np.array([0]))), coder.size(mask, 1000, np.array([0]))
    (9, 9)
    """

    name: ClassVar[str] = "entropy"
    wire_id: ClassVar[int] = 3

    def size_of(self, k: int, d: int) -> None:
        """Return None: the indices matter."""

    def size(self, indices: Ints, d: int, layers: Ints) -> int:
        """Return ``len(encode(...))`` without encoding."""
        return entropy_size(gap_histogram(indices, d, layers))

    def encode(self, indices: Ints, d: int, layers: Ints) -> bytes:
        """Write the indices."""
        return _plan(indices, d, layers)[1]()

    def decode(self, payload: bytes, k: int, d: int, layers: Ints) -> Ints:
        """Read the k indices back; any other bytes raise :class:`FrameError`."""
        _require_possible(k, d)
        size = min(k, d - k)
        starts = segments(layers, d)
        model, body = GapModel.parse(payload, size, starts, d)
        coded = model.read(body)
        coded[1:] += 1
        np.cumsum(coded, out=coded)
        require(model.fits(coded, starts, d), "entropy: an index outside its layer")
        return coded if size == k else _complement(coded, d)


CODERS: tuple[IndexCoder, ...] = (Bitmap(), Packed(), Entropy())


def shortest(indices: Ints, d: int, layers: Ints) -> tuple[IndexCoder, bytes]:
    """The coder with the fewest bytes, and these; the first of :data:`CODERS` wins a tie.

    >>> coder, payload = shortest(np.array([7]), 1000, np.array([0]))
    >>> coder.name, payload.hex()
    ('packed', '0700')
    """
    size, write = _plan(indices, d, layers)
    coder, fixed = _fixed(len(indices), d)
    return (coder, coder.encode(indices, d, layers)) if fixed <= size else (Entropy(), write())


def _fixed(k: int, d: int) -> tuple[IndexCoder, int]:
    """The shorter of the two forms whose length does not depend on the indices."""
    bitmap, packed = Bitmap(), Packed()
    sized: list[tuple[IndexCoder, int]] = [
        (bitmap, bitmap.size_of(k, d)),
        (packed, packed.size_of(k, d)),
    ]
    return min(sized, key=lambda pair: pair[1])


def _plan(indices: Ints, d: int, layers: Ints) -> tuple[int, Callable[[], bytes]]:
    """The entropy coder's size, and what writes so many bytes."""
    coded = _minority(_checked(indices, d), d)
    gaps = gaps_of(coded)
    buckets = fine_buckets(gaps)
    size, model = best_model(histogram_of(coded, segments(layers, d), buckets))
    return size, lambda: model.header() + model.write(gaps, buckets)


def shortest_sizes(indices: Tensor, d: int, layers: Ints) -> list[tuple[IndexCoder, int]]:
    """The coder with the fewest bytes for each row of a stack ``(clients, k)``, and how many.

    On an accelerator the gaps are counted there, and only their histograms are copied.

    >>> shortest_sizes(torch.tensor([[7], [8]]), 1000, np.array([0])) == [(Packed(), 2)] * 2
    True
    """
    fixed = _fixed(indices.shape[-1], d)
    sizes = _entropy_sizes(indices, d, layers).tolist()
    return [min(fixed, (Entropy(), size), key=lambda pair: pair[1]) for size in sizes]


def _entropy_sizes(indices: Tensor, d: int, layers: Ints) -> Tensor:
    if indices.device.type == "cpu":  # numpy counts faster, and with less memory
        each = [gap_histogram(row, d, layers) for row in indices.numpy()]
        return best_sizes(torch.from_numpy(np.stack(each)))
    coded = indices if 2 * indices.shape[-1] <= d else _stacked_complement(indices, d)
    return mask_sizes(coded, segments(layers, d))


def _stacked_complement(indices: Tensor, d: int) -> Tensor:
    """The indices that each row lacks.

    >>> _stacked_complement(torch.tensor([[0, 2], [1, 2]]), 3).tolist()
    [[1], [0]]
    """
    absent = torch.ones(len(indices), d, dtype=torch.bool, device=indices.device)
    absent.scatter_(1, indices, False)
    return positions(absent, d - indices.shape[-1])


def gap_histogram(indices: Ints, d: int, layers: Ints) -> Ints:
    """Count the gaps by segment and fine bucket: all that the entropy coder's size depends on.

    Segments start at 0 and at each layer of at least 2**16 coordinates. A gap g < 8 has bucket g,
    a larger one 8 (e - 3) + floor(g / 2**(e - 3)) with e = floor(log2 g). Shape (segments, 240).

    >>> gap_histogram(np.array([0, 1, 30]), 99, np.array([0]))[0].nonzero()[0].tolist()
    [0, 22]
    """
    coded = _minority(indices, d)
    return histogram_of(coded, segments(layers, d), fine_buckets(gaps_of(coded)))


def entropy_size(histogram: Ints) -> int:
    """Return the entropy coder's payload size in bytes, from :func:`gap_histogram`.

    >>> entropy_size(np.zeros((1, 240), np.int64))
    0
    """
    return int(best_sizes(torch.from_numpy(histogram)[None]))


def _require_possible(k: int, d: int) -> None:
    require(0 <= k <= d and 1 <= d < MAX_DIMENSION, f"no {k} of {d} indices")


def _ascending_below(indices: Ints, d: int) -> bool:
    inside = len(indices) == 0 or bool(indices[0] >= 0 and indices[-1] < d)
    return inside and bool((indices[1:] > indices[:-1]).all())


def _checked(indices: Ints, d: int) -> Ints:
    if not (1 <= d < MAX_DIMENSION and _ascending_below(indices, d)):
        raise ValueError(f"indices must be strictly ascending in [0, d), 1 <= d < 2**32; d = {d}")
    return indices


def _complement(indices: Ints, d: int) -> Ints:
    mask = np.ones(d, np.bool_)
    mask[indices] = False
    return np.flatnonzero(mask)


def _minority(indices: Ints, d: int) -> Ints:
    return indices if 2 * len(indices) <= d else _complement(indices, d)
