"""Value coders with a few bits per value: Linear and Log with one scale per block, and Integer."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedsift.codec import value_entropy
from fedsift.codec.bit_packing import pack_bits, packed_size, unpack_bits
from fedsift.codec.errors import require
from fedsift.codec.value_coder import (
    FLOAT64_SCALES,
    ROUNDING,
    TINY,
    Quantized,
    at_least_float32,
    from_bytes,
    one_client,
    require_finite,
    require_scales,
    scales_of,
)
from fedsift.vector import raw_bytes


@dataclass(frozen=True)
class BlockCoder:
    """b-bit codes of a sign and a level, and one scale per block: the block's largest magnitude.

    Bytes: the scales, then the codes of b bits each: the level, and above it the sign. Level 0 has
    no sign. The codes are bit-packed or entropy-coded, whichever is shorter; the number of bytes
    says which. ``block`` is a power of two, or None for a single block. Scales are float32, or
    float64 with ``float64_scales``.
    """

    bits: int
    block: int | None = 256
    float64_scales: bool = False

    prefix: ClassVar[str]
    kind: ClassVar[int]

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise ValueError(f"bits must be 2 to 8, got {self.bits}")
        if self.block is not None and (self.block < 2 or self.block.bit_count() != 1):
            raise ValueError(f"block must be None or a power of two above 1, got {self.block}")

    @property
    def name(self) -> str:
        """The coder's name, for example ``"int4"``."""
        return f"{self.prefix}{self.bits}"

    @property
    def wire_id(self) -> int:
        """See :func:`from_wire_id`."""
        exponent = 0 if self.block is None else self.block.bit_length() - 1
        return exponent << 8 | self.kind | self.bits | FLOAT64_SCALES * self.float64_scales

    @property
    def _scale_dtype(self) -> torch.dtype:
        return torch.float64 if self.float64_scales else torch.float32

    @property
    def _top_level(self) -> int:
        return int(2 ** (self.bits - 1)) - 1

    def _num_blocks(self, n: int) -> int:
        return min(n, 1) if self.block is None else -(-n // self.block)

    def _block_width(self, n: int) -> int:
        """Return the length of a block of n values: a single block ends with the values."""
        return max(n, 1) if self.block is None else min(self.block, max(n, 1))

    def _scaled(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the blocks' scales (..., blocks) and the ratios x / scale in [-1, 1]."""
        n, x = x.shape[-1], x.to(at_least_float32(x.dtype))
        width, blocks = self._block_width(n), self._num_blocks(n)
        padded = torch.nn.functional.pad(x, (0, blocks * width - n))
        largest = padded.view(*x.shape[:-1], blocks, width).abs().amax(-1)
        scales = largest.to(self._scale_dtype)
        if x.dtype.itemsize > self._scale_dtype.itemsize:  # round up: no ratio may exceed 1
            above = torch.nextafter(scales, torch.full_like(scales, torch.inf))
            scales = torch.where(scales < largest, above, scales)
        require_finite(scales)
        return scales, x / self._spread(scales.masked_fill(scales == 0, 1), n).to(x.dtype)

    def _spread(self, scales: Tensor, n: int) -> Tensor:
        """Repeat each scale over the values of its block."""
        repeated = scales.unsqueeze(-1).expand(*scales.shape, self._block_width(n))
        return repeated.flatten(-2)[..., :n]

    def _scale_bytes(self, n: int) -> int:
        return self._scale_dtype.itemsize * self._num_blocks(n)

    def size(self, n: int) -> int:
        """Return the maximum bytes of n values, those of bit-packed codes."""
        return self._scale_bytes(n) + packed_size(n, self.bits)

    def sizes(self, quantized: Quantized) -> Tensor:
        """Return ``len(pack(...))`` per client for codes (clients, n), on the codes' device.

        >>> x = torch.tensor([[7.0, 7.0, 7.0, 7.0, 7.0], [1.0, 2.0, 3.0, 4.0, 5.0]])
        >>> Linear(4).sizes(Linear(4).quantize(x)).tolist(), Linear(4).size(5)
        ([6, 7], 7)
        """
        n = quantized.codes.shape[-1]
        coded = value_entropy.coded_sizes(value_entropy.count_codes(quantized.codes, self.bits))
        return self._scale_bytes(n) + torch.clamp(coded, max=packed_size(n, self.bits))

    def pack(self, quantized: Quantized) -> bytes:
        """Return one client's values as bytes."""
        raw = value_entropy.to_unsigned(one_client(quantized), self.bits).numpy()
        coded = value_entropy.encode_codes(raw, self.bits, packed_size(len(raw), self.bits))
        return raw_bytes(scales_of(quantized)) + (coded or pack_bits(raw, self.bits))

    def unpack(self, payload: bytes, n: int) -> Quantized:
        """Read one client's n values; raise :class:`FrameError` if the bytes are malformed."""
        cut = self._scale_bytes(n)
        require(cut <= len(payload) <= self.size(n), f"{self.name}: wrong length")
        scales = from_bytes(payload[:cut], self._scale_dtype)
        require_scales(scales, self.name)
        read = unpack_bits if len(payload) == self.size(n) else value_entropy.decode_codes
        raw = read(payload[cut:], n, self.bits)
        require(not (raw == self._top_level + 1).any(), f"{self.name}: an unused code")
        level = (raw & self._top_level).astype(np.int8)
        signed = np.where(raw > self._top_level, -level, level)
        return Quantized(torch.from_numpy(signed), scales)


@dataclass(frozen=True)
class Linear(BlockCoder):
    """Evenly spaced levels: x becomes c scale / s, s = 2**(b-1) - 1, c = round(s x / scale).

    |error| <= scale / (2 s), rounding half to even. With ``stochastic``, c is rounded up or down
    at random so that the mean of the restored values is x, and |error| <= scale / s.

    >>> coder = Linear(4)
    >>> coder.restore(coder.quantize(torch.tensor([7.0, -3.2, 0.4])), torch.float32)
    tensor([ 7., -3.,  0.])
    """

    stochastic: bool = False

    prefix: ClassVar[str] = "int"
    kind: ClassVar[int] = 0x10

    def quantize(self, x: Tensor, generator: torch.Generator | None = None) -> Quantized:
        """Quantize values (..., n)."""
        scales, ratio = self._scaled(x)
        steps = ratio * self._top_level
        if self.stochastic:
            noise = torch.rand(x.shape, generator=generator, dtype=steps.dtype, device=x.device)
            steps = torch.floor(steps + noise)
        codes = steps.round().clamp(-self._top_level, self._top_level).to(torch.int8)
        return Quantized(codes, scales)

    def restore(self, quantized: Quantized, dtype: torch.dtype) -> Tensor:
        """Return the values that the receiver uses."""
        scales = scales_of(quantized).to(at_least_float32(dtype))
        # Divide by a tensor: a GPU multiplies by the inverse of a Python number, which differs.
        steps = scales / torch.full_like(scales, self._top_level)
        restored = quantized.codes * self._spread(steps, quantized.codes.shape[-1])
        largest = torch.finfo(scales.dtype).max  # s (scale / s) can overflow: the step is rounded
        return restored.clamp_(-largest, largest).to(dtype)

    def error_bound(self, x: Tensor) -> Tensor:
        """Bound the error per coordinate."""
        scale = self._spread(self._scaled(x)[0], x.shape[-1]).to(x.dtype)
        return scale * ((1.0 if self.stochastic else 0.5) / self._top_level + ROUNDING) + TINY


@dataclass(frozen=True)
class Log(BlockCoder):
    """Geometric levels, for values of many magnitudes: 0 and scale 2**(-R (L - l) / (L - 1)).

    l = 1..L, L = 2**(b-1) - 1; the levels span R = 2 (b - 1) octaves below the scale. Each value is
    rounded to the nearest level. With r = 2**(R / (L - 1)), the ratio of adjacent levels, |error|
    <= max(|x| (r - 1) / (r + 1), half the lowest level); for b = 2, L = 1, it is scale / 2.

    >>> coder = Log(4)
    >>> coder.restore(coder.quantize(torch.tensor([1.0, 0.26, -0.01, 0.0])), torch.float32)
    tensor([ 1.0000,  0.2500, -0.0156,  0.0000])
    """

    prefix: ClassVar[str] = "log"
    kind: ClassVar[int] = 0x20

    def quantize(self, x: Tensor, generator: torch.Generator | None = None) -> Quantized:
        """Quantize values (..., n)."""
        scales, ratio = self._scaled(x)
        levels = _log_levels(self.bits, x.device).to(ratio.dtype)
        nearest = torch.bucketize(ratio.abs(), (levels[1:] + levels[:-1]) / 2)
        return Quantized((nearest * ratio.sign()).to(torch.int8), scales)

    def restore(self, quantized: Quantized, dtype: torch.dtype) -> Tensor:
        """Return the values that the receiver uses."""
        codes = quantized.codes
        ratio = _log_levels(self.bits, codes.device)[codes.abs().long()] * codes.sign()
        scales = scales_of(quantized).to(at_least_float32(dtype))
        return (ratio * self._spread(scales, codes.shape[-1])).to(dtype)

    def error_bound(self, x: Tensor) -> Tensor:
        """Bound the error per coordinate."""
        scale = self._spread(self._scaled(x)[0], x.shape[-1]).to(x.dtype)
        levels = _log_levels(self.bits, torch.device("cpu")).tolist()
        second = levels[-2]  # 1 / r; 0 for b = 2, which has a single level above 0
        relative = (1 - second) / (1 + second) if second else 0.0
        bound = torch.maximum(x.abs() * relative, scale * (levels[1] / 2))
        return bound + scale * ROUNDING + TINY


@dataclass(frozen=True)
class Integer(BlockCoder):
    """Whole numbers from -s to s, s = 2**(b-1) - 1, without a scale; others are rounded to these.

    Sums of such values are exact, so they have the same bits in any order. Sender and receiver
    agree on what the number 1 stands for.

    |error| <= 1/2 up to s, and |x| - s beyond, rounding half to even.

    >>> coder = Integer(4)
    >>> coder.restore(coder.quantize(torch.tensor([2.2, -3.5, 9.0])), torch.float32)
    tensor([ 2., -4.,  7.])
    """

    block: int | None = field(default=None, init=False)
    float64_scales: bool = field(default=False, init=False)

    prefix: ClassVar[str] = "whole"
    kind: ClassVar[int] = 0x30

    @property
    def largest(self) -> int:
        """The largest number s."""
        return self._top_level

    def _num_blocks(self, n: int) -> int:
        return 0

    def quantize(self, x: Tensor, generator: torch.Generator | None = None) -> Quantized:
        """Quantize values (..., n)."""
        require_finite(x)
        codes = x.round().clamp(-self.largest, self.largest).to(torch.int8)
        return Quantized(codes, x.new_zeros(*x.shape[:-1], 0))

    def restore(self, quantized: Quantized, dtype: torch.dtype) -> Tensor:
        """Return the values that the receiver uses."""
        return quantized.codes.to(dtype)

    def error_bound(self, x: Tensor) -> Tensor:
        """Bound the error per coordinate."""
        beyond = (x.abs() - self.largest) * (1 + torch.finfo(x.dtype).eps)  # itself rounded
        return beyond.clamp_min(0.5)


@cache
def _log_levels(bits: int, device: torch.device) -> Tensor:
    """Return the log levels of a block with scale 1; computed once per device."""
    octaves, top = 2 * (bits - 1), 2 ** (bits - 1) - 1
    above_zero = [2 ** (-octaves * i / max(top - 1, 1)) for i in reversed(range(top))]
    return torch.tensor([0.0, *above_zero], dtype=torch.float32, device=device)
