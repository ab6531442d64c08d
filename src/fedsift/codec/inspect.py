"""Summarize a frame: its header, the bytes of its parts, and the limit for random masks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from fedsift.codec.frame import CHECKSUM_BYTES, Spec, frame_header, parse_frame
from fedsift.codec.header import Header, PartHeader, header_size, varint_size
from fedsift.codec.index import INDEX_CODERS
from fedsift.codec.update import Part, Update
from fedsift.codec.values import BlockCoder


@dataclass(frozen=True)
class FrameSummary:
    """A frame's header, and the bytes of the header and the frame."""

    header: Header
    header_bytes: int
    total_bytes: int

    @property
    def bits_per_coordinate(self) -> float:
        """Bits of the whole frame per coordinate sent."""
        most = max((part.k for part in self.header.parts), default=0)
        return 8 * self.total_bytes / max(most, 1)


def summarize_frame(frame: bytes) -> FrameSummary:
    """Read the header of an undamaged frame.

    The payload is not decoded, which would require the model's layout.
    """
    header, at = parse_frame(frame)
    return FrameSummary(header, at, len(frame))


def information_limit(d: int, k: int) -> float:
    """Return log₂ C(d, k), the fewest bits for a uniformly random set of k out of d indices.

    >>> round(information_limit(10, 5), 6)  # log2 of 252
    7.97728
    """
    return (math.lgamma(d + 1) - math.lgamma(k + 1) - math.lgamma(d - k + 1)) / math.log(2)


def ratio_to_limit(part: PartHeader, d: int) -> float | None:
    """Return a mask's bits divided by :func:`information_limit`; clustered masks are below 1."""
    limit = information_limit(d, part.k)
    return 8 * part.index_bytes / limit if part.index is not None and limit > 0 else None


def bytes_by_part(update: Update, specs: Sequence[Spec], frames: Sequence[int]) -> Counter[str]:
    """Split the bytes of a stack's frames into ``header``, ``mask``, ``w``, ``m`` and ``v``.

    ``frames`` are the frames' sizes. Masks and values include the fields with their lengths; the
    header includes everything else, including the checksum.

    >>> from torch import nn, tensor
    >>> from fedsift.codec.frame import encoded_size
    >>> from fedsift.codec.update import dense
    >>> from fedsift.vector import Layout
    >>> spec = Spec(Layout.of(nn.Linear(1, 1)), "fedsgd")
    >>> update = Update(dense({"w": tensor([[1.0, 2.0]])}), (1.0,))
    >>> bytes_by_part(update, [spec], [encoded_size(update, spec)])
    Counter({'header': 41, 'w': 8})
    """
    parts = tuple(_without_lengths(part) for part in update.parts)
    counted: Counter[str] = Counter()
    for spec, weight in zip(specs, update.weights, strict=True):
        counted["header"] += header_size(frame_header(spec, weight, parts)) + CHECKSUM_BYTES
    for part in update.parts:
        for role, coded in part.values.items():
            sizes = coded.sizes.tolist()
            counted[role] += sum(sizes)
            if isinstance(coded.coder, BlockCoder):  # the header counts one byte per length of 0
                counted[role] += sum(map(varint_size, sizes))
                counted["header"] -= len(sizes)
    if any(part.indices is not None for part in update.parts):
        counted["mask"] = sum(frames) - counted.total()
    return counted


def _without_lengths(part: Part) -> PartHeader:
    """Return a part header without a mask length, and with values of length 0."""
    k = next(iter(part.values.values())).quantized.codes.shape[-1]
    index = None if part.indices is None else INDEX_CODERS[0]
    coders = tuple(coded.coder for coded in part.values.values())
    return PartHeader(tuple(part.values), k, index, 0, coders, (0,) * len(coders))
