"""Value coders with one form for every value (Float, Sign, Bit), and the registry of all coders.

A value coder works on tensors (..., n) on any device; the leading axes are clients. ``pack`` and
``unpack`` take the codes of one client on the CPU. A simulation restores what it has quantized, a
deployment restores what it has unpacked, and the results are bit-identical.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedsift.codec.bit_packing import pack_bits, packed_size, unpack_bits
from fedsift.codec.errors import FrameError, require
from fedsift.codec.value_blocks import BlockCoder, Integer, Linear, Log
from fedsift.codec.value_coder import (
    FLOAT64_SCALES,
    ROUNDING,
    TINY,
    Quantized,
    ValueCoder,
    at_least_float32,
    from_bytes,
    one_client,
    require_finite,
    require_scales,
    scales_of,
)
from fedsift.codec.value_means import Means
from fedsift.vector import all_finite, raw_bytes

__all__ = [
    "VALUE_CODERS",
    "Bit",
    "BlockCoder",
    "Float",
    "Integer",
    "Linear",
    "Log",
    "Means",
    "Quantized",
    "Sign",
    "ValueCoder",
    "from_wire_id",
    "lossless",
    "register_coder",
    "require_coder",
]

_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class Float:
    """Values rounded to a floating-point type; values beyond its range saturate.

    |error| <= 2**-p |x| + the smallest subnormal number, p = 53, 24, 8, 11 bits for float64,
    float32, bfloat16, float16; beyond the largest number M, |error| is |x| - M. Bytes: n numbers,
    little endian.

    >>> coder = Float("bfloat16")
    >>> coder.restore(coder.quantize(torch.tensor([1.001, -3.0])), torch.float32)
    tensor([ 1., -3.])
    """

    name: str

    def __post_init__(self) -> None:
        if self.name not in _DTYPES:
            names = ", ".join(_DTYPES)
            raise ValueError(f"unknown float type {self.name!r}; choose one of: {names}")

    @cached_property
    def wire_id(self) -> int:
        """See :func:`from_wire_id`."""
        return list(_DTYPES).index(self.name) + 1

    @property
    def _dtype(self) -> torch.dtype:
        return _DTYPES[self.name]

    def quantize(self, x: Tensor, generator: torch.Generator | None = None) -> Quantized:
        """Quantize values (..., n)."""
        require_finite(x)
        limit = torch.finfo(self._dtype).max
        if limit < torch.finfo(x.dtype).max:
            # In float32 at least: bfloat16 cannot represent float16's largest number.
            x = x.to(at_least_float32(x.dtype)).clamp(-limit, limit)
        return Quantized(x.to(self._dtype))

    def restore(self, quantized: Quantized, dtype: torch.dtype) -> Tensor:
        """Return the values that the receiver uses."""
        return quantized.codes.to(dtype)

    def size(self, n: int) -> int:
        """Return the bytes of n values."""
        return n * self._dtype.itemsize

    def pack(self, quantized: Quantized) -> bytes:
        """Return one client's values as bytes."""
        return raw_bytes(quantized.codes)

    def unpack(self, payload: bytes, n: int) -> Quantized:
        """Read one client's n values; raise :class:`FrameError` if the bytes are malformed."""
        require(len(payload) == self.size(n), f"{self.name}: wrong length")
        values = from_bytes(payload, self._dtype)
        require(all_finite(values), f"{self.name}: a value is not finite")
        return Quantized(values)

    def error_bound(self, x: Tensor) -> Tensor:
        """Bound the error per coordinate."""
        info = torch.finfo(self._dtype)
        rounding = x.abs() * (info.eps / 2) + info.tiny * info.eps
        beyond = (x.abs() - info.max) * (1 + torch.finfo(x.dtype).eps)  # itself rounded
        return torch.maximum(rounding, beyond)


def lossless(dtype: torch.dtype) -> Float:
    """Return the coder that keeps every bit of a floating-point type.

    >>> lossless(torch.float64).name
    'float64'
    """
    return Float(str(dtype).removeprefix("torch."))


@dataclass(frozen=True)
class Sign:
    """One bit per value and one scale: x_i becomes sign(x_i) ||x||_2 / sqrt(n), sign(0) = +1.

    |error| is ||x_i| - scale|, up to rounding. Bytes: the scale (none if n = 0), then the bits,
    1 for negative, lowest bit first. The scale is float32, or float64 with ``float64_scales``.

    >>> coder = Sign()
    >>> coder.restore(coder.quantize(torch.tensor([3.0, -4.0, 0.0, 0.0])), torch.float32)
    tensor([ 2.5000, -2.5000,  2.5000,  2.5000])
    """

    float64_scales: bool = False

    name: ClassVar[str] = "sign"

    @property
    def wire_id(self) -> int:
        """See :func:`from_wire_id`."""
        return 5 | FLOAT64_SCALES * self.float64_scales

    @property
    def _scale_dtype(self) -> torch.dtype:
        return torch.float64 if self.float64_scales else torch.float32

    def quantize(self, x: Tensor, generator: torch.Generator | None = None) -> Quantized:
        """Quantize values (..., n)."""
        n = x.shape[-1]
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float64)
        scales = (norm / max(n, 1) ** 0.5).to(self._scale_dtype)[..., : min(n, 1)]
        require_finite(scales)
        return Quantized(signs(x), scales)

    def restore(self, quantized: Quantized, dtype: torch.dtype) -> Tensor:
        """Return the values that the receiver uses."""
        return (quantized.codes * scales_of(quantized).to(at_least_float32(dtype))).to(dtype)

    def size(self, n: int) -> int:
        """Return the bytes of n values."""
        return self._scale_dtype.itemsize * min(n, 1) + packed_size(n, 1)

    def pack(self, quantized: Quantized) -> bytes:
        """Return one client's values as bytes."""
        return raw_bytes(scales_of(quantized)) + pack_signs(quantized)

    def unpack(self, payload: bytes, n: int) -> Quantized:
        """Read one client's n values; raise :class:`FrameError` if the bytes are malformed."""
        require(len(payload) == self.size(n), "sign: wrong length")
        cut = self._scale_dtype.itemsize * min(n, 1)
        scales = from_bytes(payload[:cut], self._scale_dtype)
        require_scales(scales, "sign")
        return Quantized(unpack_signs(payload[cut:], n), scales)

    def error_bound(self, x: Tensor) -> Tensor:
        """Bound the error per coordinate."""
        scale = scales_of(self.quantize(x)).to(x.dtype)
        return (x.abs() - scale).abs() + scale * ROUNDING + TINY


@dataclass(frozen=True)
class Bit:
    """One bit per value and no scale: x_i becomes its sign, +1 for 0.

    |error| is ||x_i| - 1|. Bytes: the bits as in :class:`Sign`.

    >>> Bit().restore(Bit().quantize(torch.tensor([3.0, -4.0, 0.0])), torch.float32)
    tensor([ 1., -1.,  1.])
    """

    name: ClassVar[str] = "bit"
    wire_id: ClassVar[int] = 6

    def quantize(self, x: Tensor, generator: torch.Generator | None = None) -> Quantized:
        """Quantize values (..., n)."""
        require_finite(x)
        return Quantized(signs(x))

    def restore(self, quantized: Quantized, dtype: torch.dtype) -> Tensor:
        """Return the values that the receiver uses."""
        return quantized.codes.to(dtype)

    def size(self, n: int) -> int:
        """Return the bytes of n values."""
        return packed_size(n, 1)

    def pack(self, quantized: Quantized) -> bytes:
        """Return one client's values as bytes."""
        return pack_signs(quantized)

    def unpack(self, payload: bytes, n: int) -> Quantized:
        """Read one client's n values; raise :class:`FrameError` if the bytes are malformed."""
        require(len(payload) == self.size(n), "bit: wrong length")
        return Quantized(unpack_signs(payload, n))

    def error_bound(self, x: Tensor) -> Tensor:
        """Bound the error per coordinate."""
        return (x.double().abs() - 1).abs()


def signs(x: Tensor) -> Tensor:
    """Return the signs as int8, +1 for 0."""
    return 1 - 2 * (x < 0).to(torch.int8)


def pack_signs(quantized: Quantized) -> bytes:
    """Return one client's signs as bits, 1 for negative."""
    negative = (one_client(quantized) < 0).view(torch.uint8)
    return pack_bits(negative.numpy(), 1)


def unpack_signs(payload: bytes, n: int) -> Tensor:
    """Return the signs that :func:`pack_signs` packed."""
    return torch.from_numpy(1 - 2 * unpack_bits(payload, n, 1).astype(np.int8))


VALUE_CODERS: dict[str, ValueCoder] = {
    coder.name: coder
    for coder in (
        *map(Float, _DTYPES),
        Sign(),
        Bit(),
        Means(),
        *(kind(bits) for kind in (Linear, Log, Integer) for bits in range(2, 9)),
    )
}
"""Every coder by name, with the default block: float64 ... float16, sign, bit, means, int2..8,
log2..8, whole2..8."""


_BY_LOW_BYTE = {coder.wire_id & 0xFF: coder for coder in VALUE_CODERS.values()}
_TYPES = {type(coder) for coder in VALUE_CODERS.values()}
OWN_IDS = range(0x40, 0x80)
"""The wire ids of coders of your own."""


def register_coder(coder: ValueCoder) -> None:
    """Register a coder of your own, so that messages may contain its values.

    Every program that writes or reads these messages must register it: do so in the module that
    defines the method. Its ``wire_id`` is one of ``OWN_IDS``. Another coder with that id is
    replaced.

    >>> register_coder(Sign())
    Traceback (most recent call last):
    ...
    ValueError: the wire_id of a coder of your own must be from 0x40 to 0x7f, got 0x5
    """
    if coder.wire_id not in OWN_IDS:
        raise ValueError(
            f"the wire_id of a coder of your own must be from {OWN_IDS[0]:#x} to {OWN_IDS[-1]:#x}, "
            f"got {coder.wire_id:#x}"
        )
    _BY_LOW_BYTE[coder.wire_id] = coder
    _TYPES.add(type(coder))


def require_coder(coder: object) -> None:
    """Raise TypeError unless frames can contain a coder's values.

    >>> require_coder(Linear)
    Traceback (most recent call last):
    ...
    TypeError: a value coder must be one such as Linear(4) or Sign(), or your own after \
register_coder, got <class 'fedsift.codec.value_blocks.Linear'>
    """
    if type(coder) not in _TYPES:
        raise TypeError(
            "a value coder must be one such as Linear(4) or Sign(), or your own after "
            f"register_coder, got {coder!r}"
        )


def from_wire_id(wire_id: int) -> ValueCoder:
    """Return the coder with this id in frames, or raise :class:`FrameError`.

    The low byte is 1..4 for float64, float32, bfloat16, float16, 5 for sign, 6 for bit, 7 for
    means, 0x10 + b for linear, 0x20 + b for log codes and 0x30 + b for whole numbers of b = 2..8
    bits, plus 0x80 if the scales are float64; 0x40 to 0x7F are coders of users' own. The high byte
    is 0, or for means, linear and log codes log2 of the block size, at most 31; 0 means a single
    block, which means does not have.

    >>> from_wire_id(0x0814)
    Linear(bits=4, block=256, float64_scales=False, stochastic=False)
    """
    exponent, low = divmod(wire_id, 256)
    coder = _BY_LOW_BYTE.get(low & ~FLOAT64_SCALES)
    has_float64_scales = bool(low & FLOAT64_SCALES)
    if isinstance(coder, Linear | Log) and exponent < 32:
        block = 2**exponent if exponent else None
        return replace(coder, block=block, float64_scales=has_float64_scales)
    if isinstance(coder, Means) and 0 < exponent < 32:
        return Means(2**exponent, has_float64_scales)
    if isinstance(coder, Sign) and exponent == 0:
        return Sign(has_float64_scales)
    has_no_scales = isinstance(coder, Float | Bit | Integer) or low in OWN_IDS
    if coder and has_no_scales and exponent == 0 and not has_float64_scales:
        return coder
    raise FrameError(f"unknown value coder {wire_id:#06x}")
