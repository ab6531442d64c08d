"""What the kernels for blocks of Transformers compute, as functions of tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from fedsift.engine.gpu.layers import (
    Tile,
    Window,
    block_size,
    weight_gradient,
)
from fedsift.engine.gpu.one_batch import triton_blocks as kernels
from fedsift.engine.gpu.one_batch.layers import as_image
from fedsift.engine.gpu.one_batch.norms import client_stride, portions_of

ATTENTION_ROWS = 64
"""Queries that a GPU block computes at a time."""


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, added: Tensor | None = None
) -> Tensor:
    """Return rows ``(clients, n, inputs)`` times matrices ``(clients, inputs, outputs)``.

    The bias ``(clients, outputs)`` and ``added``, a tensor like the result, are added.
    """
    y = x.new_empty(*x.shape[:2], weight.shape[2])
    _multiply(x, weight, bias, added, y, None, "" if added is None else "add")
    return y


def product_and_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return GELU of the product, and the derivative of GELU there."""
    y, slope = x.new_empty(2, *x.shape[:2], weight.shape[2])
    _multiply(x, weight, bias, None, y, slope, "gelu")
    return y, slope


def product_times(x: Tensor, weight: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Return the product times ``factor``, a tensor like it, and its sum over the rows."""
    clients, rows, outputs = factor.shape
    y, blocks = torch.empty_like(factor), -(-rows // product_tile(outputs, x.shape[2]).rows)
    sums = x.new_empty(clients, blocks, outputs, dtype=torch.float32)
    _multiply(x, weight, None, factor, y, sums, "times")
    return y, sums.sum(1)


def _multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    other: Tensor | None,
    y: Tensor,
    extra: Tensor | None,
    after: str,
) -> None:
    (clients, rows, inputs), outputs = x.shape, weight.shape[2]
    tile = product_tile(outputs, inputs)
    kernels.product_kernel[(-(-rows // tile.rows) * -(-outputs // tile.columns), clients)](
        x, weight, bias, other, y, extra, rows, inputs, outputs,
        weight.stride(0), weight.stride(2), weight.stride(1), client_stride(bias),
        EVEN=inputs % tile.depth == 0, BIAS=bias is not None, AFTER=after,
        ROWS=tile.rows, OUTPUTS=tile.columns, DEPTH=tile.depth,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def product_tile(outputs: int, inputs: int) -> Tile:
    """Return the part of a product that one GPU block computes.

    It is small, because with few inputs a block spends its time on reading and writing: several
    blocks per processor overlap these.
    """
    depth = 64 if inputs % 64 == 0 else 32
    return Tile(128, 64, depth, 4, 3) if outputs % 128 else Tile(64, 128, depth, 4, 3)


def gradient_of_weight(x: Tensor, gradient: Tensor, result: Tensor) -> None:
    """Write the gradient ``(clients, outputs, inputs)`` of the matrices of a product."""
    place = result[:, :, None, None]
    weight_gradient(as_image(x), as_image(gradient), place, None, Window(), "ieee")


def attention(qkv: Tensor, is_causal: bool) -> Tensor:
    """Return ``(samples, tokens, heads, width)`` from ``(samples, tokens, 3, heads, width)``."""
    samples, tokens, _, heads, width = qkv.shape
    y = qkv.new_empty(samples, tokens, heads, width)
    keys = block_size(tokens)
    kernels.attention_kernel[(samples * heads,)](
        qkv, y, tokens, width**-0.5, HEADS=heads, WIDTH=width, CAUSAL=is_causal,
        ROWS=min(keys, ATTENTION_ROWS), KEYS=keys, num_warps=4,
    )  # fmt: skip
    return y


def attention_gradient(qkv: Tensor, gradient: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Return the gradient of queries, keys and values, and each sample's sum of it."""
    samples, tokens, _, heads, width = qkv.shape
    result, keys = torch.empty_like(qkv), block_size(tokens)
    sums = qkv.new_empty(samples, 3 * heads * width, dtype=torch.float32)
    kernels.attention_gradient_kernel[(samples * heads,)](
        qkv, gradient, result, sums, tokens, width**-0.5,
        HEADS=heads, WIDTH=width, CAUSAL=is_causal,
        ROWS=min(keys, ATTENTION_ROWS), KEYS=keys, num_warps=4 if keys <= 64 else 8,
    )  # fmt: skip
    return result, sums


def residual_norm_gradient(
    x: Tensor, gradient: Tensor, skipped: Tensor, weight: Tensor, mean: Tensor, inverse_std: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradient of x, which a layer normalization and a residual connection use.

    Also return the sums over the rows ``(3, clients, width)``: the gradients of scale and bias, and
    the sum of ``skipped``, the gradient of the residual connection.
    """
    clients, rows, width = x.shape
    block, height, portions, portion = portions_of(clients, rows, width)
    result = torch.empty_like(x)
    sums = x.new_empty(3, clients, portions, width, dtype=torch.float32)
    kernels.residual_norm_gradient_kernel[(portions, clients)](
        x, gradient, skipped, weight, mean, inverse_std, result, sums,
        rows, portion, client_stride(weight), sums.stride(0),
        WIDTH=width, ROWS=height, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return result, sums.sum(2)
