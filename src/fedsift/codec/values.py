"""The values of the kept coordinates, as codes and as bytes.

Every coder works on tensors (..., n) whose leading axes are clients, on any device; ``pack`` and
``unpack`` take one client's codes on the CPU. A simulation restores what it has quantized, a
deployment restores what it has unpacked, and both get the same numbers, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedsift.codec.bits import bytes_for, pack_bits, unpack_bits
from fedsift.codec.blocks import Blocked, Linear, Log
from fedsift.codec.codes import (
    ROUNDING,
    TINY,
    WIDE,
    Codes,
    ValueCoder,
    at_least_float32,
    from_bytes,
    one_client,
    require_bounded,
    require_finite,
    require_scales,
    scales_of,
)
from fedsift.codec.errors import FrameError, require
from fedsift.vector import raw_bytes

__all__ = [
    "CODERS",
    "Blocked",
    "Codes",
    "Float",
    "Linear",
    "Log",
    "Sign",
    "ValueCoder",
    "exact",
    "from_wire_id",
]

_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class Float:
    """Values rounded to a floating-point type, too large ones to its largest number.

    |error| <= 2**-p |x| + the smallest denormal, p = 53, 24, 8, 11 bits for float64, float32,
    bfloat16, float16; above the largest number M it is |x| - M. Bytes: n numbers, little endian.

    >>> coder = Float("bfloat16")
    >>> coder.restore(coder.quantize(torch.tensor([1.001, -3.0])), torch.float32)
    tensor([ 1., -3.])
    """

    name: str

    def __post_init__(self) -> None:
        if self.name not in _DTYPES:
            raise ValueError(f"{self.name} is not one of {', '.join(_DTYPES)}")

    @cached_property
    def wire_id(self) -> int:
        """See :func:`from_wire_id`."""
        return list(_DTYPES).index(self.name) + 1

    @property
    def _dtype(self) -> torch.dtype:
        return _DTYPES[self.name]

    def quantize(self, x: Tensor, generator: torch.Generator | None = None) -> Codes:
        """Turn values (..., n) into codes."""
        require_finite(x)
        limit = torch.finfo(self._dtype).max
        wider = limit >= torch.finfo(x.dtype).max
        return Codes(x.to(self._dtype) if wider else x.clamp(-limit, limit).to(self._dtype))

    def restore(self, codes: Codes, dtype: torch.dtype) -> Tensor:
        """Turn codes back into values."""
        return codes.codes.to(dtype)

    def size(self, n: int) -> int:
        """The bytes of n values."""
        return n * self._dtype.itemsize

    def pack(self, codes: Codes) -> bytes:
        """Write one client's codes."""
        return raw_bytes(codes.codes)

    def unpack(self, payload: bytes, n: int, max_abs: float = float("inf")) -> Codes:
        """Read n valid codes, or raise :class:`FrameError`."""
        require(len(payload) == self.size(n), f"{self.name}: wrong length")
        values = from_bytes(payload, self._dtype)
        require_bounded(values, max_abs, f"{self.name}: a value")
        return Codes(values)

    def error_bound(self, x: Tensor) -> Tensor:
        """Bound the error of each coordinate."""
        info = torch.finfo(self._dtype)
        rounding = x.abs() * (info.eps / 2) + info.tiny * info.eps
        beyond = (x.abs() - info.max) * (1 + torch.finfo(x.dtype).eps)  # it is rounded itself
        return torch.maximum(rounding, beyond)


def exact(dtype: torch.dtype) -> Float:
    """Return the coder that keeps every bit of a floating-point type.

    >>> exact(torch.float64).name
    'float64'
    """
    return Float(str(dtype).removeprefix("torch."))


@dataclass(frozen=True)
class Sign:
    """One bit a value and one scale: x_i becomes sign(x_i) ||x||_2 / sqrt(n), sign(0) = +1.

    |error| is ||x_i| - scale|, up to rounding. Bytes: the scale (none if n = 0), then the bits,
    1 for negative, the lowest bit of a byte first. The scale is float32, or float64 if ``wide``.

    >>> coder = Sign()
    >>> coder.restore(coder.quantize(torch.tensor([3.0, -4.0, 0.0, 0.0])), torch.float32)
    tensor([ 2.5000, -2.5000,  2.5000,  2.5000])
    """

    wide: bool = False

    name: ClassVar[str] = "sign"

    @property
    def wire_id(self) -> int:
        """See :func:`from_wire_id`."""
        return 5 | WIDE * self.wide

    @property
    def _scale(self) -> torch.dtype:
        return torch.float64 if self.wide else torch.float32

    def quantize(self, x: Tensor, generator: torch.Generator | None = None) -> Codes:
        """Turn values (..., n) into codes."""
        n = x.shape[-1]
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float64)
        scales = (norm / max(n, 1) ** 0.5).to(self._scale)[..., : min(n, 1)]
        require_finite(scales)
        return Codes(1 - 2 * (x < 0).to(torch.int8), scales)

    def restore(self, codes: Codes, dtype: torch.dtype) -> Tensor:
        """Turn codes back into values."""
        return (codes.codes * scales_of(codes).to(at_least_float32(dtype))).to(dtype)

    def size(self, n: int) -> int:
        """The bytes of n values."""
        return self._scale.itemsize * min(n, 1) + bytes_for(n, 1)

    def pack(self, codes: Codes) -> bytes:
        """Write one client's codes."""
        negative = (one_client(codes) < 0).view(torch.uint8)
        return raw_bytes(scales_of(codes)) + pack_bits(negative.numpy(), 1)

    def unpack(self, payload: bytes, n: int, max_abs: float = float("inf")) -> Codes:
        """Read n valid codes, or raise :class:`FrameError`."""
        require(len(payload) == self.size(n), "sign: wrong length")
        cut = self._scale.itemsize * min(n, 1)
        scales = from_bytes(payload[:cut], self._scale)
        require_scales(scales, max_abs, "sign: the scale")
        negative = unpack_bits(payload[cut:], n, 1)
        return Codes(torch.from_numpy(1 - 2 * negative.astype(np.int8)), scales)

    def error_bound(self, x: Tensor) -> Tensor:
        """Bound the error of each coordinate."""
        scale = scales_of(self.quantize(x)).to(x.dtype)
        return (x.abs() - scale).abs() + scale * ROUNDING + TINY


CODERS: dict[str, ValueCoder] = {
    coder.name: coder
    for coder in (
        *map(Float, _DTYPES),
        Sign(),
        *(kind(bits) for kind in (Linear, Log) for bits in range(2, 9)),
    )
}
"""Every coder by name, with the default block: float64 ... float16, sign, int2..8, log2..8."""


_BY_LOW_BYTE = {coder.wire_id & 0xFF: coder for coder in CODERS.values()}


def from_wire_id(wire_id: int) -> ValueCoder:
    """Return the coder that a frame names, or raise :class:`FrameError`.

    The low byte is 1..4 for float64, float32, bfloat16, float16, 5 for sign, 0x10 + b for linear
    and 0x20 + b for log codes of b = 2..8 bits; 0x80 more if scales are float64. The high byte is
    0, or for linear and log codes log2 of the block, at most 31, where 0 means one block of all.

    >>> from_wire_id(0x0814)
    Linear(bits=4, block=256, wide=False, stochastic=False)
    """
    exponent, low = divmod(wire_id, 256)
    coder = _BY_LOW_BYTE.get(low & ~WIDE)
    scales_are_wide = bool(low & WIDE)
    if isinstance(coder, Linear | Log) and exponent < 32:
        return replace(coder, block=2**exponent if exponent else None, wide=scales_are_wide)
    if isinstance(coder, Sign) and exponent == 0:
        return Sign(scales_are_wide)
    if isinstance(coder, Float) and exponent == 0 and not scales_are_wide:
        return coder
    raise FrameError(f"unknown value coder {wire_id:#06x}")
