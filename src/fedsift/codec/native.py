"""The codec's C kernels: they read range codes and add sparse values, without Python's lock.

Each function has an implementation in Python, which is used without a C compiler and which defines
the result.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedsift.codec.bit_packing import ByteArray
from fedsift.codec.errors import require
from fedsift.codec.range_coder import Decoder, IntArray, PythonDecoder
from fedsift.native import Library

LIBRARY = Library(Path(__file__).with_name("kernels.c"))
FAILED = 4
"""The place in the decoder's state that says whether it met bytes that no encoder writes."""


class NativeDecoder:
    """Reads a range code with the C kernels."""

    def __init__(self, code: bytes) -> None:
        self.code, self.size = np.frombuffer(code + b"\0", np.uint8), len(code)
        self.state = np.zeros(5, np.int64)
        LIBRARY.kernel("start_decoder")(self.state, self.code, self.size)

    def symbols(self, weights: IntArray, n: int) -> ByteArray:
        """Read n symbols; see :class:`fedsift.codec.range_coder.Decoder`."""
        present = np.flatnonzero(weights)
        out = np.full(n, present[0], np.uint8)
        if len(present) > 1:
            self._run("decode_symbols", np.ascontiguousarray(weights), len(weights), out, n)
        return out

    def numbers(self, buckets: ByteArray, lowest: IntArray, bits: IntArray) -> IntArray:
        """Read a number per bucket; see :class:`fedsift.codec.range_coder.Decoder`."""
        out = np.empty(len(buckets), np.int64)
        self._run("decode_low_bits", buckets, lowest, bits, out, len(buckets))
        return out

    def _run(self, name: str, *arguments: IntArray | ByteArray | int) -> None:
        LIBRARY.kernel(name)(self.state, self.code, self.size, *arguments)
        require(not self.state[FAILED], "entropy: no encoder writes this code")


def decoder_of(code: bytes) -> Decoder:
    """Return a decoder of a range code, in C if possible."""
    return PythonDecoder(code) if LIBRARY.load() is None else NativeDecoder(code)


def add_at(target: Tensor, indices: Tensor, values: Tensor) -> None:
    """Add values ``(k,)`` to the coordinates ``indices`` of a vector ``(d,)`` in place.

    >>> total = torch.zeros(3)
    >>> add_at(total, torch.tensor([0, 2]), torch.tensor([1.0, 2.0]))
    >>> total.tolist()
    [1.0, 0.0, 2.0]
    """
    tensors = (target, indices, values)
    are_plain = all(x.is_cpu and x.is_contiguous() for x in tensors)
    types = (torch.float32, torch.int64, torch.float32)
    if not are_plain or tuple(x.dtype for x in tensors) != types or LIBRARY.load() is None:
        target.index_add_(0, indices, values)
        return
    if len(indices) != len(values):
        raise ValueError(f"{len(indices)} indices, but {len(values)} values")
    outside = np.zeros(1, np.int64)
    LIBRARY.kernel("add_at")(target, len(target), indices, values, len(indices), outside)
    if outside[0]:
        raise IndexError(f"an index is outside of the {len(target)} coordinates")
