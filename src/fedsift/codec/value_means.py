"""A value coder with four levels per block, each the mean of the values that it stands for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

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
    scales_of,
)
from fedsift.vector import all_finite, raw_bytes

LEVELS = 4
BITS = 2


@dataclass(frozen=True)
class Means:
    """Two bits per value, and four levels per block: the means of four bins of values.

    The bins end at the block's mean minus 2.25, minus 0.75 and plus 0.75 standard deviations, with
    n - 1 in the denominator. |error| is at most the block's largest value minus its smallest.
    Bytes: the levels of each block in ascending order of their bins, 0 for an empty bin, then the
    codes. ``block`` is a power of two. Levels are float32, or float64 with ``float64_scales``.

    >>> coder = Means(4)
    >>> coder.restore(coder.quantize(torch.tensor([1.0, 2.0, 10.0, -9.0])), torch.float32)
    tensor([ 1.5000,  1.5000, 10.0000, -9.0000])
    """

    block: int = 256
    float64_scales: bool = False

    name: ClassVar[str] = "means"

    def __post_init__(self) -> None:
        if self.block < 2 or self.block.bit_count() != 1:
            raise ValueError(f"block must be a power of two above 1, got {self.block}")

    @property
    def wire_id(self) -> int:
        """See :func:`fedsift.codec.values.from_wire_id`."""
        exponent = self.block.bit_length() - 1
        return exponent << 8 | 7 | FLOAT64_SCALES * self.float64_scales

    @property
    def _level_dtype(self) -> torch.dtype:
        return torch.float64 if self.float64_scales else torch.float32

    def quantize(self, x: Tensor, generator: torch.Generator | None = None) -> Quantized:
        """Quantize values (..., n)."""
        blocks, is_value = self._blocks(x.to(torch.float64))
        codes = bins(blocks, is_value)
        levels = torch.stack(
            [masked_mean(blocks, is_value & (codes == level)) for level in range(LEVELS)], -1
        ).flatten(-2)
        require_finite(levels)
        codes = codes.flatten(-2)[..., : x.shape[-1]]
        return Quantized(codes, levels.to(self._level_dtype))

    def _blocks(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return values as blocks (..., blocks, width), and which of their numbers are values."""
        n = x.shape[-1]
        number, width = -(-n // self.block), min(self.block, max(n, 1))
        shape = (number, width)
        padded = torch.nn.functional.pad(x, (0, number * width - n))
        is_value = torch.arange(number * width, device=x.device) < n
        return padded.view(*x.shape[:-1], *shape), is_value.view(shape)

    def restore(self, quantized: Quantized, dtype: torch.dtype) -> Tensor:
        """Return the values that the receiver uses."""
        codes, levels = quantized.codes.long(), scales_of(quantized)
        block = torch.arange(codes.shape[-1], device=codes.device) // self.block
        exact = levels.to(at_least_float32(dtype)).gather(-1, LEVELS * block + codes)
        return exact.to(dtype)

    def size(self, n: int) -> int:
        """Return the bytes of n values."""
        return self._level_bytes(n) + packed_size(n, BITS)

    def _level_bytes(self, n: int) -> int:
        return self._level_dtype.itemsize * LEVELS * -(-n // self.block)

    def pack(self, quantized: Quantized) -> bytes:
        """Return one client's values as bytes."""
        codes = one_client(quantized)
        return raw_bytes(scales_of(quantized)) + pack_bits(codes.numpy(), BITS)

    def unpack(self, payload: bytes, n: int) -> Quantized:
        """Read one client's n values; raise :class:`FrameError` if the bytes are malformed."""
        require(len(payload) == self.size(n), "means: wrong length")
        cut = self._level_bytes(n)
        levels = from_bytes(payload[:cut], self._level_dtype)
        require(all_finite(levels), "means: a level is not finite")
        return Quantized(torch.from_numpy(unpack_bits(payload[cut:], n, BITS)), levels)

    def error_bound(self, x: Tensor) -> Tensor:
        """Bound the error per coordinate."""
        blocks, is_value = self._blocks(x)
        largest = blocks.masked_fill(~is_value, -torch.inf).amax(-1, keepdim=True)
        smallest = blocks.masked_fill(~is_value, torch.inf).amin(-1, keepdim=True)
        rounding = torch.maximum(largest.abs(), smallest.abs()) * ROUNDING + TINY
        bound = (largest - smallest + rounding).expand_as(blocks)
        return bound.flatten(-2)[..., : x.shape[-1]]


def bins(blocks: Tensor, is_value: Tensor) -> Tensor:
    """Return the bin, from 0 to 3, of each value of blocks (..., blocks, width).

    >>> x = torch.tensor([[1.0, 2.0, 10.0, -9.0]])
    >>> bins(x, x == x)
    tensor([[2, 2, 3, 1]], dtype=torch.uint8)
    """
    size = is_value.sum(-1, keepdim=True)
    centered = blocks - masked_mean(blocks, is_value)[..., None]
    squares = (centered * centered * is_value).sum(-1, keepdim=True)
    width = 6 / LEVELS * (squares / (size - 1).clamp(min=1)).sqrt()
    ratio = centered / width.masked_fill(width == 0, 1)
    return (ratio + LEVELS // 2).round().clamp(0, LEVELS - 1).to(torch.uint8)


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of the masked numbers of each row; 0 if there are none.

    >>> x = torch.tensor([[1.0, 2.0], [-3.0, -5.0]])
    >>> masked_mean(x, x > 0)
    tensor([1.5000, 0.0000])
    """
    return x.masked_fill(~mask, 0).sum(-1) / mask.sum(-1).clamp(min=1)
