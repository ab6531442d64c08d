"""Values as codes: what every value coder has in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fedsift.codec.errors import NotFiniteError, require

ROUNDING = 2.0**-20  # covers the float32 roundings of a scale, a ratio and a product
TINY = 2.0**-140  # the same for denormals, where roundings are absolute
WIDE = 0x80  # the bit of a wire id that says that scales are float64


@dataclass(frozen=True)
class Codes:
    """Quantized values: codes (..., n), and scales (..., blocks) if the coder has any."""

    codes: Tensor
    scales: Tensor | None = None


class ValueCoder(Protocol):
    """A way to write n real numbers as bytes; how many depends on n, or also on the codes."""

    @property
    def name(self) -> str:
        """What users call it."""

    @property
    def wire_id(self) -> int:
        """16 bits that name the coder in a frame: see :func:`from_wire_id`."""

    def quantize(self, x: Tensor, generator: torch.Generator | None = None) -> Codes:
        """Turn values (..., n) into codes; non-finite ones raise ``ValueError`` on the CPU."""

    def restore(self, codes: Codes, dtype: torch.dtype) -> Tensor:
        """Turn codes back into values."""

    def size(self, n: int) -> int:
        """The most bytes that n values take; all but :class:`Blocked` coders take just so many."""

    def pack(self, codes: Codes) -> bytes:
        """Write one client's codes."""

    def unpack(self, payload: bytes, n: int, max_abs: float = float("inf")) -> Codes:
        """Read n codes; raise :class:`FrameError` unless all are valid and at most max_abs."""

    def error_bound(self, x: Tensor) -> Tensor:
        """Bound |restore(quantize(x)) - x| for each coordinate, restored in float32 or wider."""


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Half-precision tensors are scaled in float32, others in their own type."""
    return torch.promote_types(dtype, torch.float32)


def require_finite(x: Tensor) -> None:
    """Refuse to code what is not a number."""
    # On a GPU this would synchronize it with the host; there the engine checks, once a round.
    if x.device.type == "cpu" and not bool(torch.isfinite(x).all()):
        raise NotFiniteError("values must be finite, and so must their scales")


def require_bounded(x: Tensor, max_abs: float, what: str) -> None:
    """Refuse a NaN, an infinity or a magnitude above ``max_abs``."""
    largest = float(x.abs().amax()) if x.numel() else 0.0  # NaN, if there is one
    require(
        largest <= max_abs and largest < float("inf"), f"{what} is not finite or above {max_abs:g}"
    )


def require_scales(scales: Tensor, max_abs: float, what: str) -> None:
    """Refuse scales that are not magnitudes of at most ``max_abs``."""
    require_bounded(scales, max_abs, what)
    require(not bool(scales.signbit().any()), f"{what} is negative")


def scales_of(codes: Codes) -> Tensor:
    """The scales, of a coder that has them."""
    if codes.scales is None:
        raise ValueError("these codes need scales")
    return codes.scales


def one_client(codes: Codes) -> Tensor:
    """The codes of a single client."""
    if codes.codes.dim() != 1:
        raise ValueError("pack takes one client's codes, a vector")
    return codes.codes


def from_bytes(payload: bytes, dtype: torch.dtype) -> Tensor:
    """Read numbers that :func:`fedsift.vector.raw_bytes` has written."""
    integers = np.frombuffer(payload, f"<i{dtype.itemsize}").copy()
    return torch.from_numpy(integers).view(dtype)
