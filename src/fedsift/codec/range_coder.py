"""Range coding under tables of quantized frequencies, shared by index and value coders.

A table holds the logarithm of each symbol's frequency in a few bits. Probabilities and sizes use
integer arithmetic on tensors only, so they are the same on every machine and device, and the sizes
of a stack of clients can be computed where the stack is.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Protocol

import constriction
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedsift.codec.bit_packing import ByteArray
from fedsift.codec.errors import FrameError

IntArray = npt.NDArray[np.int64]

PRECISION = 24
"""Probabilities are multiples of 2**-24."""
MAX_LOG = 192
"""The largest log-weight: 24 octaves of 8 steps. 0 marks an absent symbol."""
CHUNK = 1 << 14
"""Symbols processed at a time, to reuse memory: allocating costs more than the arithmetic."""
COARSE_SHIFT = 2
"""A coarse log-weight (four bits) has steps of half an octave, 2**2 as large as a fine one."""
MAX_COARSE = 15
"""The largest coarse log-weight."""
UNIFORM = constriction.stream.model.Uniform()
"""The model of low bits."""
LOW_BITS_AT_ONCE = 16
"""Low bits of a number are coded in symbols of at most this many bits."""
FLOOR_LOSS = 371
"""An upper bound of 2**16 * 2**-8 / ln 2: the bits that a rounded-down range loses per symbol."""


def log_weights(counts: Tensor, coarse: bool = False) -> Tensor:
    """Return the log-weights nearest to the counts (..., symbols); the largest is ``MAX_LOG``.

    >>> log_weights(torch.tensor([8, 0, 3, 1])).tolist()
    [192, 0, 181, 168]
    >>> log_weights(torch.tensor([8, 0, 3, 1]), coarse=True).tolist()
    [192, 0, 180, 168]
    """
    shift = COARSE_SHIFT if coarse else 0
    most = (MAX_COARSE if coarse else MAX_LOG) - 1
    below_top = log2(counts.amax(-1, keepdim=True)) - log2(counts)
    steps = torch.clamp((below_top + (1 << 12 + shift)) >> 13 + shift, max=most)
    return torch.where(counts > 0, MAX_LOG - (steps << shift), 0)


def to_coarse(logs: IntArray) -> IntArray:
    """Convert log-weights to the four bits in which coarse tables store them."""
    return np.where(logs > 0, MAX_COARSE - ((MAX_LOG - logs) >> COARSE_SHIFT), 0)


def from_coarse(stored: IntArray) -> IntArray:
    """Convert the four bits of coarse tables to log-weights.

    >>> from_coarse(np.array([0, 1, 15])), to_coarse(from_coarse(np.array([0, 1, 15])))
    (array([  0, 136, 192]), array([ 0,  1, 15]))
    """
    return np.where(stored > 0, MAX_LOG - ((MAX_COARSE - stored) << COARSE_SHIFT), 0)


def probabilities(logs: Tensor) -> Tensor:
    """Return the symbols' probabilities times 2**24: integers that add up to 2**24.

    Each present symbol gets at least 1; the first of the largest gets the remainder.
    """
    steps = torch.clamp(logs - 1, min=0)
    share = torch.where(logs > 0, constants(logs.device)[0][steps % 8] << (steps // 8), 0)
    free = (1 << PRECISION) - (share > 0).sum(-1, keepdim=True)
    whole = torch.clamp(share.sum(-1, keepdim=True), min=1)
    scaled = torch.where(share > 0, 1 + share * free // whole, 0)
    rest = (1 << PRECISION) - scaled.sum(-1, keepdim=True)
    return scaled.scatter_add(-1, logs.argmax(-1, keepdim=True), rest)


def code_bits(counts: Tensor, weights: Tensor) -> Tensor:
    """Bound the bits, times 2**16, that symbols with these counts take under :func:`probabilities`.

    The bound is the symbols' information plus the coder's rounding loss. A symbol shrinks the
    range, which is at least 2**32, to floor(range / 2**24) * weight, and the floor costs at most
    2**-8 / ln 2 bits. The loss is smaller for a wider range: if p is the largest probability, each
    symbol leaves at most p of the range, so the losses between two output words form a geometric
    series, at most 1 / (1 - p) times the largest. Up to p = 1/2 this is less than the 2**-11 of
    the total that :func:`code_bytes` adds. Above, the smaller of two bounds is added: this loss
    per word, or 2**-7 bits per occurrence of the likely symbol. A symbol that is alone costs
    nothing.
    """
    information = (counts * ((PRECISION << 16) - log2(weights))).sum(-1)
    likeliest = weights.argmax(-1, keepdim=True)
    rest = (1 << PRECISION) - weights.gather(-1, likeliest)[..., 0]
    by_symbol = counts.gather(-1, likeliest)[..., 0] << 9
    by_word = ((information >> 21) + 2) * ((FLOOR_LOSS << PRECISION) // torch.clamp(rest, min=1))
    is_likely = (rest > 0) & (rest < 1 << (PRECISION - 1))
    return information + torch.where(is_likely, torch.minimum(by_symbol, by_word), 0)


def code_bytes(bits: Tensor) -> Tensor:
    """Return the bytes of a code, from the total of :func:`code_bits`.

    The total is rounded up enough that the final range contains a number of this many bytes.
    """
    return torch.where(bits > 0, (((bits + (bits >> 11)) >> 16) + 8) >> 3, 0)


def log2(x: Tensor) -> Tensor:
    """Return 2**16 log2 x, rounded down, from the first 13 bits of x < 2**51; 0 counts as 1."""
    form = torch.clamp(x, min=1).double().view(torch.int64)
    return (((form >> 52) - 1023) << 16) + constants(x.device)[1][(form >> 40) & 4095]


@lru_cache(maxsize=8)
def constants(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the tables 1024 * 2**(j / 8) and floor(2**16 log2(1 + i / 4096)).

    The logarithms are computed bit by bit: square, and test whether the result reaches 2.
    """
    mantissa = torch.tensor([1024, 1117, 1218, 1328, 1448, 1579, 1722, 1878])
    x, result = (torch.arange(4096) + 4096) << 18, torch.zeros(4096, dtype=torch.int64)
    for _ in range(16):
        x = x * x >> 30
        carry = x >> 31
        x = x >> carry
        result = 2 * result + carry
    return mantissa.to(device), result.to(device)


def symbol_model(weights: IntArray) -> tuple[IntArray, Any]:
    """Return one table's present symbols, and their model, or None for a single symbol.

    constriction assigns symbol i of A the probability (1 + floor(p_i (2**24 - A) / sum p)) /
    2**24, which for p_i = weight_i - 1 is exactly weight_i / 2**24.
    """
    present = np.flatnonzero(weights)
    if len(present) < 2:
        return present, None
    return present, constriction.stream.model.Categorical(weights[present] - 1.0, perfect=False)


def new_encoder() -> Any:
    """Return a range encoder; :func:`final_code` returns its bytes."""
    return constriction.stream.queue.RangeEncoder()


def final_code(encoder: Any, size: int) -> bytes:
    """Return the code as a number of ``size`` bytes within the encoder's final range.

    The encoder's words are the lower end of the range, rounded up. Cut to ``size`` bytes and
    rounded up again, the number is still within the range.
    """
    code: bytes = encoder.get_compressed().astype(">u4").tobytes()
    cut = code[:size].ljust(size, b"\0")
    if any(code[size:]):
        cut = (int.from_bytes(cut, "big") + 1).to_bytes(size, "big")
    return cut


class Decoder(Protocol):
    """Reads the symbols of a range code in order.

    Raises :class:`FrameError` for bytes that no encoder writes.
    """

    def symbols(self, weights: IntArray, n: int) -> ByteArray:
        """Read n symbols with these probabilities times 2**24; a symbol that is alone is free."""

    def numbers(self, buckets: ByteArray, lowest: IntArray, bits: IntArray) -> IntArray:
        """Read the low bits of a number per bucket, and add the bucket's lowest number."""


class PythonDecoder:
    """Reads a range code with the library constriction."""

    def __init__(self, code: bytes) -> None:
        words = np.frombuffer(code.ljust(-(-len(code) // 4) * 4, b"\0"), ">u4").astype(np.uint32)
        self.decoder = constriction.stream.queue.RangeDecoder(words)

    def symbols(self, weights: IntArray, n: int) -> ByteArray:
        """Read n symbols."""
        present, model = symbol_model(weights)
        found = np.full(n, present[0], np.uint8)
        for start in range(0, n if model else 0, CHUNK):
            chunk = found[start : start + CHUNK]
            chunk[:] = present[self._read(model, len(chunk))]
        return found

    def numbers(self, buckets: ByteArray, lowest: IntArray, bits: IntArray) -> IntArray:
        """Read a number per bucket."""
        found: IntArray = lowest[buckets]
        for shift, positions, sizes in low_bit_chunks(bits, buckets):
            found[positions] += self._read(UNIFORM, sizes).astype(np.int64) << shift
        return found

    def _read(self, model: Any, argument: Any) -> Any:
        try:
            return self.decoder.decode(model, argument)
        except AssertionError as error:  # constriction raises it for bytes outside every symbol
            raise FrameError("entropy: no encoder writes this code") from error


def low_bit_chunks(
    bits: IntArray, buckets: ByteArray
) -> Iterator[tuple[int, IntArray, npt.NDArray[np.int32]]]:
    """Yield the shift, the positions of numbers with low bits, and how many values these have.

    ``bits`` is the number of low bits of each bucket. They are coded 16 at a time.
    """
    low = bits.astype(np.int32)
    for shift in (0, LOW_BITS_AT_ONCE):
        for start in range(0, len(buckets), CHUNK):
            width = low[buckets[start : start + CHUNK]] - shift
            with_bits = np.flatnonzero(width > 0)
            if len(with_bits):
                sizes = np.int32(1) << np.minimum(width[with_bits], LOW_BITS_AT_ONCE)
                yield shift, with_bits + start, sizes
