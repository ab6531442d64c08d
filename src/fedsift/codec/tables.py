"""Symbols in a range coder, under a table of their frequencies: what masks and values share.

A table holds the logarithm of each symbol's frequency, in few bits. What fixes a probability or a
size is integer arithmetic on tensors, the same on every machine and device; so that a stack's sizes
are counted where the stack is, and are those of the bytes.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import constriction
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int64]

PRECISION = 24
"""The range coder's probabilities are multiples of 2**-24."""
TOP = 192
"""The largest log-weight: 24 octaves of 8 steps; 0 means an absent symbol."""
PIECE = 1 << 14
"""Symbols at a time: fresh memory would cost more than the arithmetic."""
COARSE = 2
"""A log-weight of four bits has steps of half an octave, 2**2 as large as others."""
COARSE_TOP = 15
LOSS = 371
"""2**-8 / ln 2 bits, and a little, times 2**16."""


def log_weights(seen: Tensor, coarse: bool = False) -> Tensor:
    """The log-weights nearest to frequencies (..., symbols), the largest at the top.

    >>> log_weights(torch.tensor([8, 0, 3, 1])).tolist()
    [192, 0, 181, 168]
    >>> log_weights(torch.tensor([8, 0, 3, 1]), coarse=True).tolist()
    [192, 0, 180, 168]
    """
    wider = COARSE if coarse else 0
    most = (COARSE_TOP if coarse else TOP) - 1
    below_top = log2(seen.amax(-1, keepdim=True)) - log2(seen)
    steps = torch.clamp((below_top + (1 << 12 + wider)) >> 13 + wider, max=most)
    return torch.where(seen > 0, TOP - (steps << wider), 0)


def to_coarse(logs: Ints) -> Ints:
    """Coarse log-weights as they travel, in four bits."""
    return np.where(logs > 0, COARSE_TOP - ((TOP - logs) >> COARSE), 0)


def from_coarse(given: Ints) -> Ints:
    """Log-weights from four bits.

    >>> from_coarse(np.array([0, 1, 15])), to_coarse(from_coarse(np.array([0, 1, 15])))
    (array([  0, 136, 192]), array([ 0,  1, 15]))
    """
    return np.where(given > 0, TOP - ((COARSE_TOP - given) << COARSE), 0)


def weights(logs: Tensor) -> Tensor:
    """Probabilities times 2**24, at least 1 if present; the first largest has the rest."""
    steps = torch.clamp(logs - 1, min=0)
    share = torch.where(logs > 0, constants(logs.device)[0][steps % 8] << (steps // 8), 0)
    free = (1 << PRECISION) - (share > 0).sum(-1, keepdim=True)
    whole = torch.clamp(share.sum(-1, keepdim=True), min=1)
    found = torch.where(share > 0, 1 + share * free // whole, 0)
    rest = (1 << PRECISION) - found.sum(-1, keepdim=True)
    return found.scatter_add(-1, logs.argmax(-1, keepdim=True), rest)


def cost(seen: Tensor, weights: Tensor) -> Tensor:
    """Bits times 2**16 of all symbols (...) under a table: their information, or a little more.

    A symbol shrinks the range, which is at least 2**32, to floor(range / 2**24) * weight, and the
    floor costs at most 2**-8 / ln 2 bits beyond the symbol's information. Less, the wider the range
    is: if p is the largest probability, each symbol leaves at most p of it, and between two words
    that leave the coder the losses are a geometric series, 1 / (1 - p) times the largest. Up to
    p = 1/2 that is less than the 2**-11 of the whole that :func:`code_bytes` adds; above, all words
    are charged it, or the likely symbols 2**-7 bits each. A symbol that is alone costs nothing.
    """
    information = (seen * ((PRECISION << 16) - log2(weights))).sum(-1)
    place = weights.argmax(-1, keepdim=True)
    room = (1 << PRECISION) - weights.gather(-1, place)[..., 0]
    by_symbol = seen.gather(-1, place)[..., 0] << 9
    by_word = ((information >> 21) + 2) * ((LOSS << PRECISION) // torch.clamp(room, min=1))
    is_likely = (room > 0) & (room < 1 << (PRECISION - 1))
    return information + torch.where(is_likely, torch.minimum(by_symbol, by_word), 0)


def code_bytes(total: Tensor) -> Tensor:
    """The bytes of a code whose symbols cost so much together.

    The range is then wider than one unit of the last byte, and holds a number of so many bytes.
    """
    return torch.where(total > 0, (((total + (total >> 11)) >> 16) + 8) >> 3, 0)


def log2(x: Tensor) -> Tensor:
    """2**16 log2 x rounded down, from the first 13 bits of x < 2**51; of 0, as of 1."""
    form = torch.clamp(x, min=1).double().view(torch.int64)
    return (((form >> 52) - 1023) << 16) + constants(x.device)[1][(form >> 40) & 4095]


@lru_cache(maxsize=8)
def constants(device: torch.device) -> tuple[Tensor, Tensor]:
    """1024 * 2**(j / 8), and the floor of 2**16 log2(1 + i / 4096).

    The latter is found bit by bit: square, and see whether 2 is passed.
    """
    mantissa = torch.tensor([1024, 1117, 1218, 1328, 1448, 1579, 1722, 1878])
    x, result = (torch.arange(4096) + 4096) << 18, torch.zeros(4096, dtype=torch.int64)
    for _ in range(16):
        x = x * x >> 30
        passed = x >> 31
        x = x >> passed
        result = 2 * result + passed
    return mantissa.to(device), result.to(device)


def alphabet(row: Ints) -> tuple[Ints, Any]:
    """The symbols of one table's weights, and their model if they are several.

    constriction gives symbol i of A the probability (1 + floor(p_i (2**24 - A) / sum p)) /
    2**24, which p_i = weight_i - 1 makes exactly the weight.
    """
    present = np.flatnonzero(row)
    choices = constriction.stream.model.Categorical
    return present, choices(row[present] - 1.0, perfect=False) if len(present) > 1 else None


def encoder() -> Any:
    """A range encoder; :func:`finish` gives its bytes."""
    return constriction.stream.queue.RangeEncoder()


def finish(encoder: Any, size: int) -> bytes:
    """What was encoded, as a number of ``size`` bytes in the encoder's range.

    The words are the lower end of the range, rounded up; rounded up to bytes, it is still inside.
    """
    code: bytes = encoder.get_compressed().astype(">u4").tobytes()
    kept = code[:size].ljust(size, b"\0")
    if any(code[size:]):
        kept = (int.from_bytes(kept, "big") + 1).to_bytes(size, "big")
    return kept


def decoder_of(code: bytes) -> Any:
    """A range decoder of what :func:`finish` has written; it raises AssertionError when lost."""
    words = np.frombuffer(code.ljust(-(-len(code) // 4) * 4, b"\0"), ">u4").astype(np.uint32)
    return constriction.stream.queue.RangeDecoder(words)
