"""What is in a frame, and how far it is from the fewest bits possible."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from fedsift.codec.frame import CHECKSUM_BYTES, Spec, header_of, whole_header
from fedsift.codec.header import Header, PartHeader, header_size, varint_size
from fedsift.codec.index import CODERS
from fedsift.codec.update import Part, Update
from fedsift.codec.values import Blocked


@dataclass(frozen=True)
class Anatomy:
    """A frame's header and the bytes of each of its parts."""

    header: Header
    header_bytes: int
    total_bytes: int

    @property
    def bits_per_coordinate(self) -> float:
        """Bits of the whole frame for each coordinate it holds."""
        most = max((part.k for part in self.header.parts), default=0)
        return 8 * self.total_bytes / max(most, 1)


def dissect(frame: bytes) -> Anatomy:
    """Read a frame's header, after checking that the frame is whole.

    No model is needed, so the payload is not decoded.
    """
    header, at = whole_header(frame)
    return Anatomy(header, at, len(frame))


def information_limit(d: int, k: int) -> float:
    """log₂ C(d, k): the bits that a uniformly random set of k out of d indices takes.

    >>> round(information_limit(10, 5), 6)  # log2 of 252
    7.97728
    """
    return (math.lgamma(d + 1) - math.lgamma(k + 1) - math.lgamma(d - k + 1)) / math.log(2)


def above_limit(part: PartHeader, d: int) -> float | None:
    """A mask's bits over the uniform limit; below 1 where the mask is clustered."""
    limit = information_limit(d, part.k)
    return 8 * part.index_bytes / limit if part.index is not None and limit > 0 else None


def bytes_by_part(update: Update, specs: Sequence[Spec], frames: Sequence[int]) -> Counter[str]:
    """What the bytes of a stack's frames are for: ``header``, ``mask``, ``w``, ``m`` and ``v``.

    ``frames`` are the frames' sizes. To masks and values go their payloads and the fields that say
    how long those are; to the header all else, the checksum included.

    >>> from torch import nn, tensor
    >>> from fedsift.codec.frame import encoded_size
    >>> from fedsift.codec.update import dense
    >>> from fedsift.vector import Layout
    >>> spec = Spec(Layout.of(nn.Linear(1, 1)), "fedsgd")
    >>> update = Update(dense({"w": tensor([[1.0, 2.0]])}), (1.0,))
    >>> bytes_by_part(update, [spec], [encoded_size(update, spec)])
    Counter({'header': 41, 'w': 8})
    """
    parts = tuple(_without_lengths(part, specs[0].layout.d) for part in update.parts)
    counted: Counter[str] = Counter()
    for spec, weight in zip(specs, update.weights, strict=True):
        counted["header"] += header_size(header_of(spec, weight, parts)) + CHECKSUM_BYTES
    for part in update.parts:
        for role, coded in part.values.items():
            sizes = coded.sizes.tolist()
            counted[role] += sum(sizes)
            if isinstance(coded.coder, Blocked):  # in the header above, each had one byte for "0"
                counted[role] += sum(map(varint_size, sizes))
                counted["header"] -= len(sizes)
    if any(part.indices is not None for part in update.parts):
        counted["mask"] = sum(frames) - counted.total()
    return counted


def _without_lengths(part: Part, d: int) -> PartHeader:
    """A header whose mask has no field for its length, and whose values have no bytes."""
    k, index = (d, None) if part.indices is None else (part.indices.shape[-1], CODERS[0])
    coders = tuple(coded.coder for coded in part.values.values())
    return PartHeader(tuple(part.values), k, index, 0, coders, (0,) * len(coders))
