"""What is in a frame, and how far it is from the fewest bits possible."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedsift.codec.errors import require
from fedsift.codec.frame import unseal
from fedsift.codec.header import Header, PartHeader, read_header


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
    body = unseal(frame)
    header, at = read_header(body)
    require(all(part.k <= header.d for part in header.parts), "more coordinates than d")
    payload = sum(part.payload_bytes for part in header.parts)
    require(at + payload == len(body), "the frame is longer or shorter than its header says")
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
