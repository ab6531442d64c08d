"""Value coders of a few bits a value and one scale a block: evenly spaced levels, or geometric."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedsift.codec import symbols
from fedsift.codec.bits import bytes_for, pack_bits, unpack_bits
from fedsift.codec.codes import (
    ROUNDING,
    TINY,
    WIDE,
    Codes,
    at_least_float32,
    from_bytes,
    one_client,
    require_finite,
    require_scales,
    scales_of,
)
from fedsift.codec.errors import require
from fedsift.vector import raw_bytes


@dataclass(frozen=True)
class Blocked:
    """b-bit codes of sign and level under one scale, the largest magnitude, for each block.

    Bytes: the scales, then the codes of b bits: the level and, above it, the sign. Level 0 has no
    sign. The codes are packed, the lowest bit first, or in a range coder if that is shorter: the
    length of the bytes tells which. ``block`` is a power of two, or None for one block of
    everything. Scales are float32, or float64 if ``wide``.
    """

    bits: int
    block: int | None = 256
    wide: bool = False

    prefix: ClassVar[str]
    kind: ClassVar[int]

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise ValueError(f"bits must be 2 to 8, not {self.bits}")
        if self.block is not None and (self.block < 2 or self.block.bit_count() != 1):
            raise ValueError(f"block must be a power of two above 1, or None, not {self.block}")

    @property
    def name(self) -> str:
        """What users call it."""
        return f"{self.prefix}{self.bits}"

    @property
    def wire_id(self) -> int:
        """See :func:`from_wire_id`."""
        exponent = 0 if self.block is None else self.block.bit_length() - 1
        return exponent << 8 | self.kind | self.bits | WIDE * self.wide

    @property
    def _scale(self) -> torch.dtype:
        return torch.float64 if self.wide else torch.float32

    @property
    def _top(self) -> int:
        return int(2 ** (self.bits - 1)) - 1

    def _blocks(self, n: int) -> int:
        return min(n, 1) if self.block is None else -(-n // self.block)

    def _scaled(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the blocks' scales (..., blocks) and the ratios x / scale in [-1, 1]."""
        n, x = x.shape[-1], x.to(at_least_float32(x.dtype))
        width, blocks = self.block or max(n, 1), self._blocks(n)
        padded = torch.nn.functional.pad(x, (0, blocks * width - n))
        largest = padded.view(*x.shape[:-1], blocks, width).abs().amax(-1)
        scales = largest.to(self._scale)
        if x.dtype.itemsize > self._scale.itemsize:  # rounded down it would leave a ratio above 1
            above = torch.nextafter(scales, torch.full_like(scales, torch.inf))
            scales = torch.where(scales < largest, above, scales)
        require_finite(scales)
        return scales, x / self._spread(scales.masked_fill(scales == 0, 1), n).to(x.dtype)

    def _spread(self, scales: Tensor, n: int) -> Tensor:
        """Repeat each scale over its block."""
        each = scales.unsqueeze(-1).expand(*scales.shape, self.block or n)
        return each.flatten(-2)[..., :n]

    def _scale_bytes(self, n: int) -> int:
        return self._scale.itemsize * self._blocks(n)

    def size(self, n: int) -> int:
        """The most bytes that n values take: those of packed codes."""
        return self._scale_bytes(n) + bytes_for(n, self.bits)

    def sizes(self, codes: Codes) -> Tensor:
        """``len(pack(...))`` of each client's codes (clients, n), counted where these are.

        >>> x = torch.tensor([[7.0, 7.0, 7.0, 7.0, 7.0], [1.0, 2.0, 3.0, 4.0, 5.0]])
        >>> Linear(4).sizes(Linear(4).quantize(x)).tolist(), Linear(4).size(5)
        ([6, 7], 7)
        """
        n = codes.codes.shape[-1]
        coded = symbols.sizes(symbols.count(codes.codes, self.bits))
        return self._scale_bytes(n) + torch.clamp(coded, max=bytes_for(n, self.bits))

    def pack(self, codes: Codes) -> bytes:
        """Write one client's codes."""
        raw = symbols.unsigned(one_client(codes), self.bits).numpy()
        coded = symbols.write(raw, self.bits, bytes_for(len(raw), self.bits))
        return raw_bytes(scales_of(codes)) + (coded or pack_bits(raw, self.bits))

    def unpack(self, payload: bytes, n: int, max_abs: float = float("inf")) -> Codes:
        """Read n valid codes, or raise :class:`FrameError`."""
        cut = self._scale_bytes(n)
        require(cut <= len(payload) <= self.size(n), f"{self.name}: wrong length")
        scales = from_bytes(payload[:cut], self._scale)
        require_scales(scales, max_abs, f"{self.name}: a scale")
        read = unpack_bits if len(payload) == self.size(n) else symbols.read
        raw = read(payload[cut:], n, self.bits)
        require(not (raw == self._top + 1).any(), f"{self.name}: an unused code")
        level = (raw & self._top).astype(np.int8)
        return Codes(torch.from_numpy(np.where(raw > self._top, -level, level)), scales)


@dataclass(frozen=True)
class Linear(Blocked):
    """Evenly spaced levels: x becomes c scale / s, s = 2**(b-1) - 1, c = round(s x / scale).

    |error| <= scale / (2 s), rounding half to even; with ``stochastic`` c is one of the two
    integers around s x / scale, x is the mean of what comes back, and |error| <= scale / s.

    >>> coder = Linear(4)
    >>> coder.restore(coder.quantize(torch.tensor([7.0, -3.2, 0.4])), torch.float32)
    tensor([ 7., -3.,  0.])
    """

    stochastic: bool = False

    prefix: ClassVar[str] = "int"
    kind: ClassVar[int] = 0x10

    def quantize(self, x: Tensor, generator: torch.Generator | None = None) -> Codes:
        """Turn values (..., n) into codes."""
        scales, ratio = self._scaled(x)
        steps = ratio * self._top
        if self.stochastic:
            noise = torch.rand(x.shape, generator=generator, dtype=steps.dtype, device=x.device)
            steps = torch.floor(steps + noise)
        return Codes(steps.round().clamp(-self._top, self._top).to(torch.int8), scales)

    def restore(self, codes: Codes, dtype: torch.dtype) -> Tensor:
        """Turn codes back into values."""
        scales = scales_of(codes).to(at_least_float32(dtype))
        # By a tensor: a GPU multiplies by the inverse of a plain number, which is not the same.
        steps = scales / torch.full_like(scales, self._top)
        return (codes.codes * self._spread(steps, codes.codes.shape[-1])).to(dtype)

    def error_bound(self, x: Tensor) -> Tensor:
        """Bound the error of each coordinate."""
        scale = self._spread(self._scaled(x)[0], x.shape[-1]).to(x.dtype)
        return scale * ((1.0 if self.stochastic else 0.5) / self._top + ROUNDING) + TINY


@dataclass(frozen=True)
class Log(Blocked):
    """Geometric levels for values of many magnitudes: 0 and scale 2**(-R (L - l) / (L - 1)).

    l = 1..L, L = 2**(b-1) - 1, R = 2 (b - 1) octaves below the block's largest magnitude; each
    value goes to the nearest level. With r = 2**(R / (L - 1)) the ratio of two levels, |error| <=
    max(|x| (r - 1) / (r + 1), half the lowest level); for b = 2, L = 1 it is scale / 2.

    >>> coder = Log(4)
    >>> coder.restore(coder.quantize(torch.tensor([1.0, 0.26, -0.01, 0.0])), torch.float32)
    tensor([ 1.0000,  0.2500, -0.0156,  0.0000])
    """

    prefix: ClassVar[str] = "log"
    kind: ClassVar[int] = 0x20

    def quantize(self, x: Tensor, generator: torch.Generator | None = None) -> Codes:
        """Turn values (..., n) into codes."""
        scales, ratio = self._scaled(x)
        levels = _levels(self.bits, x.device).to(ratio.dtype)
        nearest = torch.bucketize(ratio.abs(), (levels[1:] + levels[:-1]) / 2)
        return Codes((nearest * ratio.sign()).to(torch.int8), scales)

    def restore(self, codes: Codes, dtype: torch.dtype) -> Tensor:
        """Turn codes back into values."""
        signed = codes.codes
        ratio = _levels(self.bits, signed.device)[signed.abs().long()] * signed.sign()
        scales = scales_of(codes).to(at_least_float32(dtype))
        return (ratio * self._spread(scales, signed.shape[-1])).to(dtype)

    def error_bound(self, x: Tensor) -> Tensor:
        """Bound the error of each coordinate."""
        scale = self._spread(self._scaled(x)[0], x.shape[-1]).to(x.dtype)
        levels = _levels(self.bits, torch.device("cpu")).tolist()
        second = levels[-2]  # 1 / r; for b = 2, with a single level above 0, it is 0
        relative = (1 - second) / (1 + second) if second else 0.0
        bound = torch.maximum(x.abs() * relative, scale * (levels[1] / 2))
        return bound + scale * ROUNDING + TINY


@cache
def _levels(bits: int, device: torch.device) -> Tensor:
    """Tabulate the log levels of a block with scale 1, once for each device."""
    octaves, top = 2 * (bits - 1), 2 ** (bits - 1) - 1
    above_zero = [2 ** (-octaves * i / max(top - 1, 1)) for i in reversed(range(top))]
    return torch.tensor([0.0, *above_zero], dtype=torch.float32, device=device)
