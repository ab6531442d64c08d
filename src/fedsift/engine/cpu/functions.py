"""Convolution and pooling as autograd functions on the C kernels.

Tensors are stored as (H, C, W, N), with the batch N as the innermost axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fedsift.engine.cpu import native


class BatchLastConvolution(torch.autograd.Function):
    """The sum over kernel rows i and columns j of weight[:, :, i, j] times the shifted x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """From x (H, C, W, N) and weight (O, C, KH, KW) to (H', O, W', N)."""
        x = x.contiguous()
        ctx.save_for_backward(x, weight)
        return convolve(x, weight.permute(2, 3, 1, 0), bias, padding=(0, 0))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, weight and bias."""
        x, weight = ctx.saved_tensors
        g = gradient.contiguous()
        x_gradient = input_gradient(g, weight) if ctx.needs_input_grad[0] else None
        bias_gradient = g.sum((0, 2, 3)) if ctx.needs_input_grad[2] else None
        return x_gradient, weight_gradient(g, x, weight.shape), bias_gradient


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, int]) -> Tensor:
    """Convolve x (H, C, W, N), padded with zeros, with weight (KH, KW, C, O)."""
    rows, channels, columns, batch = x.shape
    kernel_rows, kernel_columns, _, outputs = weight.shape
    pad_rows, pad_columns = padding
    out_rows = rows + 2 * pad_rows - kernel_rows + 1
    out_columns = columns + 2 * pad_columns - kernel_columns + 1
    y = x.new_empty(out_rows, outputs, out_columns, batch)
    start = x.new_zeros(outputs) if bias is None else bias.contiguous()
    sizes = (rows, columns, channels, kernel_rows, kernel_columns, outputs, *padding, batch)
    native.kernel("convolve")(x, weight.contiguous(), start, y, *sizes)
    return y


def input_gradient(g: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of a convolution's input, given that of its output."""
    rows, columns = weight.shape[2:]
    flipped = weight.flip(2, 3).permute(2, 3, 0, 1)
    return convolve(g, flipped, None, padding=(rows - 1, columns - 1))


def weight_gradient(g: Tensor, x: Tensor, shape: torch.Size) -> Tensor:
    """Return the gradient of a convolution's weight, given that of its output."""
    result = g.new_zeros(shape)
    offsets, sizes = weight_gradient_arguments(x, g.shape, shape)
    native.kernel("weight_gradient")(g, x, offsets, result, *sizes)
    return result


def weight_gradient_arguments(
    x: Tensor, output: Sequence[int], weight: torch.Size
) -> tuple[Tensor, tuple[int, ...]]:
    """Return the offsets and sizes that the kernels for a weight's gradient need."""
    rows, outputs, columns, batch = output
    offsets = tap_offsets(weight[1:], x.shape[2], batch)
    return offsets, (len(offsets), rows, columns, math.prod(x.shape[1:]), outputs, batch)


@cache
def tap_offsets(kernel: torch.Size, columns: int, batch: int) -> Tensor:
    """Return where in x the first pixel of each weight's (channel, row, column) lies.

    >>> tap_offsets(torch.Size([1, 2, 2]), columns=10, batch=3).tolist()
    [0, 3, 30, 33]
    """
    channel, row, column = (torch.arange(size) for size in kernel)
    planes = row[None, :, None] * len(channel) + channel[:, None, None]
    return (planes * columns + column).flatten() * batch


class BatchLastConvolutionPool(torch.autograd.Function):
    """A convolution followed by a 2 × 2 max pool and optionally a ReLU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
        """From x (H, C, W, N) and weight (O, C, KH, KW) to (H'/2, O, W'/2, N)."""
        x = x.contiguous()
        rows, channels, columns, batch = x.shape
        outputs, _, kernel_rows, kernel_columns = weight.shape
        ctx.shape = rows - kernel_rows + 1, outputs, columns - kernel_columns + 1, batch
        y = x.new_empty(ctx.shape[0] // 2, outputs, ctx.shape[2] // 2, batch)
        argmax = torch.empty(y.shape, dtype=torch.uint8)
        start = x.new_zeros(outputs) if bias is None else bias.contiguous()
        sizes = (rows, columns, channels, kernel_rows, kernel_columns, outputs, batch, relu)
        weight_last = weight.permute(2, 3, 1, 0).contiguous()
        buffer = row_pair_buffer(ctx.shape)
        native.kernel("convolve_pool")(x, weight_last, start, buffer, y, argmax, *sizes)
        ctx.save_for_backward(x, weight, argmax)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, weight and bias."""
        x, weight, argmax = ctx.saved_tensors
        g = gradient.contiguous()
        bias_result = bias_gradient(g, argmax) if ctx.needs_input_grad[2] else None
        if ctx.needs_input_grad[0]:
            unpooled = max_pool_gradient(g, argmax, ctx.shape)
            weight_result = weight_gradient(unpooled, x, weight.shape)
            return input_gradient(unpooled, weight), weight_result, bias_result, None
        weight_result = torch.zeros_like(weight)
        offsets, sizes = weight_gradient_arguments(x, ctx.shape, weight.shape)
        native.kernel("pool_weight_gradient")(
            g, argmax, x, offsets, row_pair_buffer(ctx.shape), weight_result, *sizes
        )
        return None, weight_result, bias_result, None


def row_pair_buffer(shape: Sequence[int]) -> Tensor:
    """Return memory for two rows of a convolution, which are pooled at once.

    An odd last column is never written and must be zero.
    """
    return torch.zeros(2, *shape[1:]) if shape[2] % 2 else torch.empty(2, *shape[1:])


def bias_gradient(g: Tensor, argmax: Tensor) -> Tensor:
    """Return the sum of the gradients that pass through the pool and the ReLU."""
    result = g.new_empty(g.shape[1])
    native.kernel("bias_gradient")(g, argmax, result, *g.shape)
    return result


class BatchLastMaxPool(torch.autograd.Function):
    """A 2 × 2 max pool. Among equal pixels, the first receives the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """From (H, C, W, N) to (H/2, C, W/2, N)."""
        rows, channels, columns, batch = ctx.shape = x.shape
        y = x.new_empty(rows // 2, channels, columns // 2, batch)
        ctx.argmax = torch.empty(y.shape, dtype=torch.uint8)
        native.kernel("max_pool")(x, y, ctx.argmax, *x.shape, False)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Return the gradient of x."""
        return max_pool_gradient(gradient.contiguous(), ctx.argmax, ctx.shape)


def max_pool_gradient(g: Tensor, argmax: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the gradient of a pool's input: each number goes to the pixel of the maximum."""
    is_even = shape[0] % 2 == shape[2] % 2 == 0
    result = g.new_empty(shape) if is_even else g.new_zeros(shape)
    native.kernel("max_pool_gradient")(g, argmax, result, *shape)
    return result
