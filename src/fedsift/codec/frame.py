"""One update as one self-describing frame of bytes, specified in docs/reference/frame.md.

A frame is a header, the payloads of its parts, and a checksum. :func:`decode` trusts no field: it
compares every count with what the receiver expects before it allocates memory.
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
    is_payload,
    read_header,
    write_header,
)
from fedsift.codec.index import IndexCoder, encode_shortest, shortest_sizes
from fedsift.codec.limits import Limits
from fedsift.codec.update import CodedValues, Part, Role, Update
from fedsift.codec.value_coder import require_bounded
from fedsift.codec.values import Quantized, ValueCoder
from fedsift.vector import Layout, State, raw_bytes

CHECKSUM_BYTES = 8


@dataclass(frozen=True)
class Spec:
    """The fields of a frame besides its update: model, run, round, client."""

    layout: Layout
    algorithm: str = ""
    round: int = 0
    client: int = 0
    run: bytes = bytes(ID_BYTES)
    base: bytes = bytes(ID_BYTES)

    def __post_init__(self) -> None:
        if len(self.run) != ID_BYTES or len(self.base) != ID_BYTES:
            raise ValueError(f"run and base must be {ID_BYTES} bytes each")
        if not self.algorithm.isascii() or len(self.algorithm) > 255:
            raise ValueError("algorithm must be at most 255 ASCII characters")
        if min(self.round, self.client) < 0:
            raise ValueError("round and client must not be negative")


def encode(update: Update, spec: Spec) -> bytes:
    """Encode one client's update as a frame.

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
    header = frame_header(spec, *update.weights, tuple(header for header, _ in parts))
    body = b"".join([write_header(header), *(payload for _, payload in parts)])
    return body + checksum(body)


def encoded_size(update: Update, spec: Spec) -> int:
    """Return ``len(encode(update, spec))`` without building the bytes.

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
    """Return :func:`encoded_size` of every client of a stack."""
    return [
        header_size(header) + sum(part.payload_bytes for part in header.parts) + CHECKSUM_BYTES
        for header in frame_headers(update, specs)
    ]


def decode(frame: bytes, layout: Layout, limits: Limits | None = None) -> Update:
    """Decode a frame, or raise :class:`FrameError` with the reason for refusing it."""
    frame, limits = bytes(frame), limits or Limits()
    header, at = parse_expected_frame(frame, layout, limits)
    view, parts = memoryview(frame), []
    for part in header.parts:
        indices = None
        if part.index is not None:
            payload = bytes(view[at : at + part.index_bytes])
            decoded = part.index.decode(payload, part.k, layout.d, layout.starts)
            indices = torch.from_numpy(decoded)[None]
        at += part.index_bytes
        values: dict[Role, CodedValues] = {}
        for role, coder, size in zip(part.roles, part.coders, part.value_bytes, strict=True):
            quantized = _with_client_axis(coder.unpack(bytes(view[at : at + size]), part.k))
            values[role] = CodedValues(coder, quantized, layout.dtype)
            max_abs = _max_abs(role, layout.dtype, limits)
            require_bounded(values[role].restore(), max_abs, f"{coder.name}: a value")
            at += size
        parts.append(Part(indices, values))
    return Update(tuple(parts), (header.weight,))


def _max_abs(role: Role, dtype: torch.dtype, limits: Limits) -> float:
    """Return the bound on a role's values: V and B hold squares, so theirs is squared."""
    largest = torch.finfo(dtype).max
    max_abs = min(limits.max_abs, largest)
    return min(max_abs * max_abs, largest) if role in ("v", "b") else max_abs


def parse_expected_frame(frame: bytes, layout: Layout, limits: Limits) -> tuple[Header, int]:
    """Return :func:`parse_frame` of a frame that matches the layout and the limits."""
    header, at = parse_frame(frame)
    header.check(layout, limits)
    return header, at


def parse_frame(frame: bytes) -> tuple[Header, int]:
    """Return the header of an undamaged frame, and the offset of its payload."""
    body = without_checksum(frame)
    header, at = read_header(body)
    for part in header.parts:
        is_within = part.k <= header.d or is_payload(part.roles)
        require(is_within, "more coordinates than d")
    payload = sum(part.payload_bytes for part in header.parts)
    require(at + payload == len(body), "the frame is longer or shorter than its header says")
    return header, at


def frame_headers(update: Update, specs: Sequence[Spec]) -> list[Header]:
    """Return the headers of the frames of a stack of clients."""
    by_part = [_part_headers(part, specs[0].layout) for part in update.parts]
    by_client = zip(*by_part, strict=True) if by_part else [()] * len(specs)
    return [frame_header(*fields) for fields in zip(specs, update.weights, by_client, strict=True)]


def frame_header(spec: Spec, weight: float, parts: tuple[PartHeader, ...]) -> Header:
    """Return the header of one frame."""
    identity = (spec.run, spec.base, spec.algorithm, spec.round, spec.client)
    return Header(*identity, spec.layout.d, weight, parts)


def _part_headers(part: Part, layout: Layout) -> list[PartHeader]:
    roles, k, coders = _part_fields(part, layout)
    values = [coded.sizes for coded in part.values.values()]
    masks: list[tuple[IndexCoder | None, int]] = [(None, 0)] * len(values[0])
    if part.indices is not None:  # synchronizes with a GPU, after it was given the values' sizes
        masks = [*shortest_sizes(part.indices, layout.d, layout.starts)]
    by_client = zip(*(sizes.tolist() for sizes in values), strict=True)
    return [
        PartHeader(roles, k, *mask, coders, sizes)
        for mask, sizes in zip(masks, by_client, strict=True)
    ]


def _encode_part(part: Part, layout: Layout) -> tuple[PartHeader, bytes]:
    roles, k, coders = _part_fields(part, layout)
    index, mask = None, b""
    if part.indices is not None:
        index, mask = encode_shortest(part.indices[0].cpu().numpy(), layout.d, layout.starts)
    values = [coded.coder.pack(_single_client(coded.quantized)) for coded in part.values.values()]
    header = PartHeader(roles, k, index, len(mask), coders, tuple(map(len, values)))
    return header, b"".join([mask, *values])


def _part_fields(
    part: Part, layout: Layout
) -> tuple[tuple[Role, ...], int, tuple[ValueCoder, ...]]:
    """Return a part's roles, its number of coordinates, and its coders."""
    roles = tuple(part.values)
    if is_payload(roles) and (part.indices is not None or len(roles) > 1):
        raise ValueError("a payload must be dense and on its own: pass it to dense()")
    k = layout.length(roles[0]) if part.indices is None else part.indices.shape[-1]
    for role, coded in part.values.items():
        if (n := coded.quantized.codes.shape[-1]) != k:
            declare = ", which the method declares in lengths" if is_payload(roles) else ""
            raise ValueError(f"{role} has {n} coordinates, but its length is {k}{declare}")
    return roles, k, tuple(coded.coder for coded in part.values.values())


def state_hash(state: State) -> bytes:
    """Return an eight-byte hash of a state's vectors."""
    hasher = hashlib.blake2b(digest_size=8)
    for x in state:
        hasher.update(raw_bytes(x))
    return hasher.digest()


def without_checksum(frame: bytes) -> bytes:
    """Return a frame without its checksum; raise :class:`FrameError` if the checksum is wrong."""
    body = frame[:-CHECKSUM_BYTES]
    if checksum(body) != frame[-CHECKSUM_BYTES:]:
        raise FrameError("wrong checksum: not a frame, or a damaged one")
    return body


def checksum(body: bytes) -> bytes:
    """Return the checksum of a frame's body: eight bytes of BLAKE2b."""
    return hashlib.blake2b(body, digest_size=CHECKSUM_BYTES).digest()


def _single_client(quantized: Quantized) -> Quantized:
    """Return the codes of a stack of one client, without the client axis and on the CPU."""
    scales = quantized.scales
    return Quantized(quantized.codes[0].cpu(), None if scales is None else scales[0].cpu())


def _with_client_axis(quantized: Quantized) -> Quantized:
    """Return one client's codes as a stack of one client."""
    scales = quantized.scales
    return Quantized(quantized.codes[None], None if scales is None else scales[None])
