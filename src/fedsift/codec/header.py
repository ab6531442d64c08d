"""The header of a frame. It is read and checked before any payload is decoded."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

from fedsift.codec.errors import FrameError, require
from fedsift.codec.index import INDEX_CODERS, IndexCoder
from fedsift.codec.limits import Limits, Shape
from fedsift.codec.update import PAYLOADS, ROLES, Role
from fedsift.codec.values import BlockCoder, ValueCoder, from_wire_id
from fedsift.vector import Layout

MAGIC = b"fs"
VERSION = 2
ID_BYTES = 8
ROLE_BITS: dict[Role, int] = {"w": 1, "m": 2, "v": 4, "c": 32, "p": 64, "b": 128}
"""The bit of each role in the first byte of a part header."""
INDEX_SHIFT = 3
"""The place of the index coder in the same byte: two bits, above those of W, M and V."""
DENSE = 0
"""The index coder id of a part that has every coordinate."""
_EXACT = 1 << 53  # every smaller integer is exact in float64
_INDEX_CODER_BY_ID: dict[int, IndexCoder] = {coder.wire_id: coder for coder in INDEX_CODERS}


@dataclass(frozen=True)
class PartHeader:
    """The header of one part of an update."""

    roles: tuple[Role, ...]
    k: int
    index: IndexCoder | None
    index_bytes: int
    coders: tuple[ValueCoder, ...]
    value_bytes: tuple[int, ...]

    @property
    def payload_bytes(self) -> int:
        """The bytes of the part's mask and values."""
        return self.index_bytes + sum(self.value_bytes)


@dataclass(frozen=True)
class Header:
    """The contents of a frame's header."""

    run: bytes
    base: bytes
    algorithm: str
    round: int
    client: int
    d: int
    weight: float
    parts: tuple[PartHeader, ...]

    @property
    def shape(self) -> Shape:
        """The update's shape, to compare with :attr:`Limits.shape`."""
        return tuple(
            (p.roles, None if p.index is None else p.k, tuple(c.wire_id for c in p.coders))
            for p in self.parts
        )

    def check(self, layout: Layout, limits: Limits) -> None:
        """Raise :class:`FrameError` unless the header matches the layout and the limits."""
        expected = {
            "run": limits.run,
            "round": limits.round,
            "base": limits.base,
            "algorithm": limits.algorithm,
            "client": limits.client,
            "shape": limits.shape,
            "weight": limits.weight,
            "d": layout.d,
        }
        for name, value in expected.items():
            if value is not None and getattr(self, name) != value:
                raise FrameError(f"wrong {name}: {getattr(self, name)!r}, expected {value!r}")
        if not 0 < self.weight < math.inf:
            raise FrameError(f"weight {self.weight} is not positive and finite")
        least, most = limits.min_weight, limits.max_weight
        if not least <= self.weight <= most:
            raise FrameError(f"weight {self.weight} is outside [{least}, {most}]")
        for part in self.parts:
            length = layout.length(part.roles[0])
            if is_payload(part.roles) and part.k != length:
                raise FrameError(f"wrong length of {part.roles[0]}: {part.k}, expected {length}")
        roles = [role for part in self.parts for role in part.roles]
        if len(roles) != len(set(roles)):
            raise FrameError("a role is sent twice")


def is_payload(roles: tuple[Role, ...]) -> bool:
    """Whether a part holds a payload, whose length is not the number of parameters."""
    return not PAYLOADS.isdisjoint(roles)


def write_header(header: Header) -> bytes:
    """Return the header as bytes."""
    name = header.algorithm.encode("ascii")
    return b"".join(
        [
            MAGIC,
            bytes([VERSION]),
            header.run,
            header.base,
            bytes([len(name)]),
            name,
            varint(header.round),
            varint(header.client),
            varint(header.d),
            _write_weight(header.weight),
            bytes([len(header.parts)]),
            *(_write_part(part, header.d) for part in header.parts),
        ]
    )


def header_size(header: Header) -> int:
    """Return ``len(write_header(header))`` without building the bytes."""
    fixed = len(MAGIC) + len(header.run) + len(header.base) + len(header.algorithm) + 3
    numbers = varint_size(header.round) + varint_size(header.client) + varint_size(header.d)
    weight = varint_size(int(header.weight)) if _is_whole(header.weight) else 9
    parts = sum(1 + sum(map(varint_size, _part_numbers(part, header.d))) for part in header.parts)
    return fixed + numbers + weight + parts


def _write_weight(weight: float) -> bytes:
    """Return a whole number as a varint; any other as a zero byte and a float64."""
    return varint(int(weight)) if _is_whole(weight) else b"\0" + struct.pack("<d", weight)


def _is_whole(weight: float) -> bool:
    return 1 <= weight < _EXACT and weight.is_integer()


def _write_part(part: PartHeader, d: int) -> bytes:
    roles = sum(ROLE_BITS[role] for role in part.roles)
    index = DENSE if part.index is None else part.index.wire_id
    return bytes([roles | index << INDEX_SHIFT]) + b"".join(map(varint, _part_numbers(part, d)))


def _part_numbers(part: PartHeader, d: int) -> list[int]:
    """Return the varints of a part header: k, coder ids, and the lengths that depend on values."""
    numbers = []
    if is_payload(part.roles):
        numbers.append(part.k)
    if part.index is not None:
        numbers.append(part.k)
        if part.index.size_of(part.k, d) is None:
            numbers.append(part.index_bytes)
    for coder, size in zip(part.coders, part.value_bytes, strict=True):
        numbers.append(coder.wire_id)
        if isinstance(coder, BlockCoder):
            numbers.append(size)
    return numbers


def read_header(frame: bytes) -> tuple[Header, int]:
    """Return the header of a frame and the offset of its payload."""
    reader = ByteReader(frame)
    if reader.take(2) != MAGIC:
        raise FrameError("not a frame")
    if (version := reader.byte()) != VERSION:
        raise FrameError(f"version {version} is not supported, only version {VERSION}")
    run, base = reader.take(ID_BYTES), reader.take(ID_BYTES)
    name = reader.take(reader.byte())
    round, client, d = reader.varint(), reader.varint(), reader.varint()
    weight = _read_weight(reader)
    count = reader.byte()
    require(count <= len(ROLES), "more parts than roles")
    parts = tuple(_read_part(reader, d) for _ in range(count))
    if not name.isascii() or not name.decode().isprintable():
        raise FrameError("the algorithm's name is not printable ASCII")
    return Header(run, base, name.decode(), round, client, d, weight, parts), reader.at


def _read_weight(reader: ByteReader) -> float:
    if whole := reader.varint():
        require(whole < _EXACT, "the weight is too large")
        return float(whole)
    weight: float = struct.unpack("<d", reader.take(8))[0]
    require(not _is_whole(weight), "a whole weight must be written as a varint")
    return weight


def _read_part(reader: ByteReader, d: int) -> PartHeader:
    bits = reader.byte()
    coder, roles = bits >> INDEX_SHIFT & 3, tuple(r for r in ROLES if bits & ROLE_BITS[r])
    require(bool(roles), "a part without roles")
    index, k, index_bytes = _INDEX_CODER_BY_ID.get(coder), d, 0
    if is_payload(roles):
        require(len(roles) == 1 and index is None, "a payload must be dense and on its own")
        k = reader.varint()
    if index is not None:
        k = reader.varint()
        fixed_size = index.size_of(k, d)
        index_bytes = reader.varint() if fixed_size is None else fixed_size
    values = [_read_values(reader, k) for _ in roles]  # *(...) leaks memory if a frame is refused
    coders, sizes = zip(*values, strict=True)
    return PartHeader(roles, k, index, index_bytes, coders, sizes)


def _read_values(reader: ByteReader, k: int) -> tuple[ValueCoder, int]:
    """Return a role's coder and the length of its values, at most that of bit-packed codes."""
    coder = from_wire_id(reader.varint())
    most = coder.size(k)
    size = reader.varint() if isinstance(coder, BlockCoder) else most
    require(size <= most, f"{coder.name}: more bytes than bit-packed values take")
    return coder, size


class ByteReader:
    """Read bytes in order; raise :class:`FrameError` at the end."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, count: int) -> bytes:
        """Return the next ``count`` bytes."""
        if self.at + count > len(self.data):
            raise FrameError("truncated")
        self.at += count
        return self.data[self.at - count : self.at]

    def byte(self) -> int:
        """Return the next byte."""
        return self.take(1)[0]

    def varint(self) -> int:
        """Return the next :func:`varint`, which must have its shortest form."""
        value = 0
        for shift in range(0, 70, 7):
            byte = self.byte()
            value |= (byte & 127) << shift
            if byte < 128:
                if byte == 0 and shift:
                    raise FrameError("a number is not in its shortest form")
                return value
        raise FrameError("a number is too long")


def varint(value: int) -> bytes:
    """Return a number with seven bits per byte, lowest first; the high bit marks all but the last.

    >>> varint(300).hex()
    'ac02'
    """
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def varint_size(value: int) -> int:
    """Return ``len(varint(value))``.

    >>> varint_size(0), varint_size(127), varint_size(128)
    (1, 1, 2)
    """
    return ((value | 1).bit_length() + 6) // 7
