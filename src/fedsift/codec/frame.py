"""One update as one self-describing frame of bytes; docs/reference/frame.md is its specification.

A frame is a header, the payloads of its parts, and a checksum. :func:`decode` believes nothing: it
compares every count with what the receiver knows before it allocates anything.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fedsift.codec.errors import FrameError, require
from fedsift.codec.header import (
    ID_BYTES,
    Header,
    PartHeader,
    header_size,
    read_header,
    write_header,
)
from fedsift.codec.index import IndexCoder, shortest, shortest_sizes
from fedsift.codec.limits import Limits
from fedsift.codec.update import Coded, Part, Role, Update
from fedsift.codec.values import Codes, ValueCoder
from fedsift.vector import Layout, Moments, raw_bytes

CHECKSUM_BYTES = 8


@dataclass(frozen=True)
class Spec:
    """What a frame says beside its update: where it belongs."""

    layout: Layout
    algorithm: str = ""
    round: int = 0
    client: int = 0
    run: bytes = bytes(ID_BYTES)
    base: bytes = bytes(ID_BYTES)

    def __post_init__(self) -> None:
        if len(self.run) != ID_BYTES or len(self.base) != ID_BYTES:
            raise ValueError(f"run and base are {ID_BYTES} bytes each")
        if not self.algorithm.isascii() or len(self.algorithm) > 255:
            raise ValueError("an algorithm's name is at most 255 characters of ASCII")
        if min(self.round, self.client) < 0:
            raise ValueError("round and client are numbers from 0 on")


def encode(update: Update, spec: Spec) -> bytes:
    """One client's update as a frame.

    >>> from torch import nn
    >>> from fedsift.codec.update import dense
    >>> layout = Layout.of(nn.Linear(1, 1))
    >>> update = Update(dense({"w": torch.tensor([[1.0, 2.0]])}), (3.0,))
    >>> frame = encode(update, Spec(layout, "fedsgd", round=1))
    >>> decode(frame, layout).parts[0].values["w"].restore().tolist()
    [[1.0, 2.0]]
    """
    if len(update.weights) != 1:
        raise ValueError(f"a frame holds one client's update, not {len(update.weights)}")
    parts = [_encode_part(part, spec.layout) for part in update.parts]
    header = header_of(spec, *update.weights, tuple(about for about, _ in parts))
    body = b"".join([write_header(header), *(payload for _, payload in parts)])
    return body + checksum(body)


def encoded_size(update: Update, spec: Spec) -> int:
    """``len(encode(update, spec))`` without building the bytes.

    >>> from torch import nn
    >>> from fedsift.codec.update import dense
    >>> update = Update(dense({"w": torch.ones(1, 2)}), (1.0,))
    >>> spec = Spec(Layout.of(nn.Linear(1, 1)))
    >>> encoded_size(update, spec) == len(encode(update, spec))
    True
    """
    (size,) = encoded_sizes(update, [spec])
    return size


def encoded_sizes(update: Update, specs: Sequence[Spec]) -> list[int]:
    """:func:`encoded_size` of every client of a stack."""
    return [
        header_size(header) + sum(part.payload_bytes for part in header.parts) + CHECKSUM_BYTES
        for header in headers_of(update, specs)
    ]


def decode(frame: bytes, layout: Layout, limits: Limits | None = None) -> Update:
    """The update in a frame, or :class:`FrameError` with the reason why it is refused."""
    frame, limits = bytes(frame), limits or Limits()
    header, at = open_frame(frame, layout, limits)
    view, parts = memoryview(frame), []
    most = min(limits.max_abs, torch.finfo(layout.dtype).max)
    for about in header.parts:
        indices = None
        if about.index is not None:
            payload = bytes(view[at : at + about.index_bytes])
            found = about.index.decode(payload, about.k, layout.d, layout.starts)
            indices = torch.from_numpy(found)[None]
        at += about.index_bytes
        values: dict[Role, Coded] = {}
        for role, coder, size in zip(about.roles, about.coders, about.value_bytes, strict=True):
            bound = min(most * most, torch.finfo(layout.dtype).max) if role == "v" else most
            codes = coder.unpack(bytes(view[at : at + size]), about.k, bound)
            values[role] = Coded(coder, _stacked(codes), layout.dtype)
            at += size
        parts.append(Part(indices, values))
    return Update(tuple(parts), (header.weight,))


def open_frame(frame: bytes, layout: Layout, limits: Limits) -> tuple[Header, int]:
    """The header of a frame that is whole and within the limits, and where its payload begins."""
    header, at = whole_header(frame)
    header.check(layout, limits)
    return header, at


def whole_header(frame: bytes) -> tuple[Header, int]:
    """The header of a frame that is whole, and where its payload begins."""
    body = unseal(frame)
    header, at = read_header(body)
    require(all(part.k <= header.d for part in header.parts), "more coordinates than d")
    payload = sum(part.payload_bytes for part in header.parts)
    require(at + payload == len(body), "the frame is longer or shorter than its header says")
    return header, at


def headers_of(update: Update, specs: Sequence[Spec]) -> list[Header]:
    """The headers of the frames that carry a stack's updates."""
    by_part = [_part_headers(part, specs[0].layout) for part in update.parts]
    by_client = zip(*by_part, strict=True) if by_part else [()] * len(specs)
    return [header_of(*about) for about in zip(specs, update.weights, by_client, strict=True)]


def header_of(spec: Spec, weight: float, parts: tuple[PartHeader, ...]) -> Header:
    """The header of one frame."""
    where = (spec.run, spec.base, spec.algorithm, spec.round, spec.client)
    return Header(*where, spec.layout.d, weight, parts)


def _part_headers(part: Part, layout: Layout) -> list[PartHeader]:
    about, coders = _about(part, layout)
    values = [coded.sizes for coded in part.values.values()]
    masks: list[tuple[IndexCoder | None, int]] = [(None, 0)] * len(values[0])
    if part.indices is not None:  # synchronizes a GPU, which has the values' sizes ready, too
        masks = [*shortest_sizes(part.indices, layout.d, layout.starts)]
    by_client = zip(*(sizes.tolist() for sizes in values), strict=True)
    return [
        PartHeader(*about, *mask, coders, sizes)
        for mask, sizes in zip(masks, by_client, strict=True)
    ]


def _encode_part(part: Part, layout: Layout) -> tuple[PartHeader, bytes]:
    (about, coders), index, mask = _about(part, layout), None, b""
    if part.indices is not None:
        index, mask = shortest(part.indices[0].cpu().numpy(), layout.d, layout.starts)
    values = [coded.coder.pack(_only(coded.codes)) for coded in part.values.values()]
    header = PartHeader(*about, index, len(mask), coders, tuple(map(len, values)))
    return header, b"".join([mask, *values])


def _about(
    part: Part, layout: Layout
) -> tuple[tuple[tuple[Role, ...], int], tuple[ValueCoder, ...]]:
    """A part's roles and number of coordinates, and its coders."""
    k = layout.d if part.indices is None else part.indices.shape[-1]
    if any(coded.codes.codes.shape[-1] != k for coded in part.values.values()):
        raise ValueError(f"a part without indices has all {layout.d} coordinates of the model")
    return (tuple(part.values), k), tuple(coded.coder for coded in part.values.values())


def state_hash(state: Moments) -> bytes:
    """Eight bytes that two parties share only if they hold the same W, M and V."""
    hasher = hashlib.blake2b(digest_size=8)
    for x in state:
        hasher.update(raw_bytes(x))
    return hasher.digest()


def unseal(frame: bytes) -> bytes:
    """A frame without its checksum, which must fit."""
    body = frame[:-CHECKSUM_BYTES]
    if checksum(body) != frame[-CHECKSUM_BYTES:]:
        raise FrameError("wrong checksum: not a frame, or a damaged one")
    return body


def checksum(body: bytes) -> bytes:
    """Eight bytes of BLAKE2b over everything before them."""
    return hashlib.blake2b(body, digest_size=CHECKSUM_BYTES).digest()


def _only(codes: Codes) -> Codes:
    """The codes of a stack of one client, without the client axis and on the CPU."""
    scales = codes.scales
    return Codes(codes.codes[0].cpu(), None if scales is None else scales[0].cpu())


def _stacked(codes: Codes) -> Codes:
    return Codes(codes.codes[None], None if codes.scales is None else codes.scales[None])
