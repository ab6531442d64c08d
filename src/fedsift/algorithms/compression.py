"""The pieces of a compressed message: a mask, few bits per value, and what they leave to later.

They compress the updates of :func:`~fedsift.algorithms.sift.sift`, and those of any other method in
:func:`~fedsift.algorithms.compressed.compressed`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import torch
from torch import Tensor

from fedsift.algorithms.method import Memory
from fedsift.algorithms.settings import SHARE, Setting
from fedsift.codec.update import Part, Role, residual_after, sparse
from fedsift.codec.values import Linear, Log, ValueCoder, lossless
from fedsift.selection.difference import Difference
from fedsift.selection.masks import top_k

V_BITS = 4
"""Bits per value of V, in logarithmic codes because its magnitudes span many octaves."""
EXACT = 32
"""As a number of bits: values are not quantized."""

DownDensity = Annotated[float, Setting("Share of coordinates the server sends", SHARE)]


def compress(w: Tensor, others: Mapping[Role, Tensor | Difference], k: int, bits: int) -> Part:
    """Return the k largest coordinates of W and the same coordinates of other vectors, in few bits.

    >>> part = compress(torch.tensor([[1.0, -7.0, 3.0]]), {}, k=2, bits=4)
    >>> part.indices.tolist(), part.values["w"].restore().tolist()
    ([[1, 2]], [[-7.0, 3.0]])
    """
    vectors = {"w": w, **others}
    coders = {role: coder_of(role, bits, w.dtype) for role in vectors}
    (part,) = sparse(vectors, top_k(w, k), coders, k=k)
    return part


def coder_of(role: Role, bits: int, dtype: torch.dtype) -> ValueCoder:
    """Return the coder of a vector's values: logarithmic codes for V, linear ones for the others.

    >>> coder_of("w", 4, torch.float32).bits, coder_of("w", EXACT, torch.float32).name
    (4, 'float32')
    """
    if bits == EXACT:
        return lossless(dtype)
    wide = dtype.itemsize > 4
    return Log(V_BITS, float64_scales=wide) if role == "v" else Linear(bits, float64_scales=wide)


def value_bits(role: Role, bits: int) -> int:
    """Return the bits per value of a vector.

    >>> value_bits("w", 3), value_bits("v", 3), value_bits("v", EXACT)
    (3, 4, 32)
    """
    return V_BITS if role == "v" and bits != EXACT else bits


def compress_with_residuals(
    vectors: Mapping[Role, Tensor], memory: Memory, k: int, bits: int
) -> tuple[Part, dict[str, Tensor]]:
    """Add its residual to each vector and compress the sums; return the part and new residuals."""
    sums = {role: x + memory[residual_name(role)] for role, x in vectors.items()}
    part = compress(sums["w"], {role: x for role, x in sums.items() if role != "w"}, k, bits)
    return part, {residual_name(role): residual_after(x, part, role) for role, x in sums.items()}


def residual_name(role: Role) -> str:
    """Return the name under which a residual is remembered.

    >>> residual_name("w"), residual_name("v")
    ('residual', 'residual_v')
    """
    return "residual" if role == "w" else f"residual_{role}"
