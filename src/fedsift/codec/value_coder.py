"""The interface of value coders (:class:`ValueCoder`), and the checks that all of them share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fedsift.codec.errors import NotFiniteError, require
from fedsift.vector import all_finite

ROUNDING = 2.0**-20  # covers the float32 rounding errors of a scale, a ratio and a product
TINY = 2.0**-140  # the same for subnormal numbers, whose rounding errors are absolute
FLOAT64_SCALES = 0x80  # the bit of a wire id that marks float64 scales


@dataclass(frozen=True)
class Quantized:
    """Quantized values: codes (..., n), and scales (..., blocks) if the coder has scales."""

    codes: Tensor
    scales: Tensor | None = None


class ValueCoder(Protocol):
    """A way to write n real numbers as bytes.

    For a :class:`BlockCoder` the number of bytes depends on the codes, for others only on n.
    """

    @property
    def name(self) -> str:
        """The coder's name, for example ``"int4"``."""

    @property
    def wire_id(self) -> int:
        """The 16-bit number that identifies the coder in a frame: see :func:`from_wire_id`."""

    def quantize(self, x: Tensor, generator: torch.Generator | None = None) -> Quantized:
        """Quantize values (..., n); on the CPU, raise ``NotFiniteError`` for NaN and infinity."""

    def restore(self, quantized: Quantized, dtype: torch.dtype) -> Tensor:
        """Return the values that the receiver uses."""

    def size(self, n: int) -> int:
        """Return the bytes of n values; for a :class:`BlockCoder`, the maximum."""

    def pack(self, quantized: Quantized) -> bytes:
        """Return one client's values as bytes."""

    def unpack(self, payload: bytes, n: int) -> Quantized:
        """Read one client's n values; raise :class:`FrameError` if the bytes are malformed."""

    def error_bound(self, x: Tensor) -> Tensor:
        """Bound |restore(quantize(x)) - x| per coordinate, restored in float32 or wider."""


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Return the type to compute in: float32 for half precision, else the type itself."""
    return torch.promote_types(dtype, torch.float32)


def require_finite(x: Tensor) -> None:
    """Raise ``NotFiniteError`` if a tensor on the CPU contains NaN or infinity."""
    # On a GPU this check would synchronize with the host; the engine checks once per round.
    if x.device.type == "cpu" and not all_finite(x):
        raise NotFiniteError("values and their scales must be finite")


def require_bounded(x: Tensor, max_abs: float, what: str) -> None:
    """Raise :class:`FrameError` for NaN, infinity or a magnitude above ``max_abs``."""
    largest = float(x.abs().amax()) if x.numel() else 0.0  # NaN if x contains one
    is_bounded = largest <= max_abs and largest < float("inf")
    require(is_bounded, f"{what} is not finite or above {max_abs:g}")


def require_scales(scales: Tensor, coder: str) -> None:
    """Raise :class:`FrameError` unless scales are finite and their sign bits are 0."""
    require(all_finite(scales), f"{coder}: a scale is not finite")
    require(not bool(scales.signbit().any()), f"{coder}: a scale is negative")


def scales_of(quantized: Quantized) -> Tensor:
    """Return the scales; raise ``ValueError`` if there are none."""
    if quantized.scales is None:
        raise ValueError("these codes need scales")
    return quantized.scales


def one_client(quantized: Quantized) -> Tensor:
    """Return the codes of a single client; raise ``ValueError`` for a stack of clients."""
    if quantized.codes.dim() != 1:
        raise ValueError("pack takes the codes of one client, a vector")
    return quantized.codes


def from_bytes(payload: bytes, dtype: torch.dtype) -> Tensor:
    """Read numbers written by :func:`fedsift.vector.raw_bytes`."""
    integers = np.frombuffer(payload, f"<i{dtype.itemsize}").copy()
    return torch.from_numpy(integers).view(dtype)
