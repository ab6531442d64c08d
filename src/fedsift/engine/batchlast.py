"""Convolution and pooling of few channels with the batch as the innermost axis of memory.

A convolution of 1 or 10 channels leaves most of a vector register empty when the channels lie side
by side in memory, and pooling does when the pixels do. The samples of a batch always fill it. So
tensors keep their shape (N, C, H, W) but lie in memory as (H, C, W, N); other layers take them as
they are. In that order the patches of a row of the output, (KH, KW, C) x (W, N), lie in one piece
once each row was copied KW times, and a convolution is one matrix product a row.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

BLOCK = 16
"""Channels that oneDNN computes together; it is hard to beat where it can fill its blocks."""
LARGE_KERNEL = 25
"""Weights of a kernel from which on the matrix product is worth the copy of its patches."""


def batch_last(model: nn.Module) -> bool:
    """Let a model compute with the batch innermost, if that is faster; tell whether it is.

    >>> model = nn.Sequential(nn.Conv2d(1, 10, 5), nn.MaxPool2d(2))
    >>> batch_last(model), model(torch.ones(3, 1, 28, 28)).stride(0)
    (True, 1)
    >>> batch_last(nn.Conv2d(1, 16, 3))
    False
    """
    layers = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    if not all(map(suits, layers)) or all(layer.out_channels % BLOCK == 0 for layer in layers):
        return False
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.__class__ = BatchLastConv2d
        elif type(module) is nn.MaxPool2d and is_halving(module):
            module.__class__ = BatchLastMaxPool2d
    return True


def suits(layer: nn.Conv2d) -> bool:
    """Whether a convolution is of the kind that is computed here."""
    return (
        type(layer) is nn.Conv2d
        and math.prod(layer.kernel_size) >= LARGE_KERNEL
        and layer.stride == layer.dilation == (1, 1)
        and layer.groups == 1
        and layer.padding_mode == "zeros"
        and not isinstance(layer.padding, str)
    )


def is_halving(layer: nn.MaxPool2d) -> bool:
    """Whether a pool takes each square of four pixels to one."""
    options = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
    return options == (2, 2, 0, 1) and not layer.ceil_mode and not layer.return_indices


class BatchLastConv2d(nn.Conv2d):
    """A convolution whose result has the batch innermost."""

    def forward(self, x: Tensor) -> Tensor:
        """The convolution of x (N, C, H, W)."""
        if x.dim() != 4:
            return super().forward(x)
        assert not isinstance(self.padding, str)
        down, across = self.padding
        if down or across:
            x = nn.functional.pad(x, (across, across, down, down))
        return from_rows(apply(Convolution, to_rows(x), self.weight, self.bias))


class BatchLastMaxPool2d(nn.MaxPool2d):
    """The largest of each four pixels, of tensors that have the batch innermost."""

    def forward(self, x: Tensor) -> Tensor:
        """The pooled x (N, C, H, W)."""
        if x.dim() != 4 or not to_rows(x).is_contiguous():
            pooled: Tensor = super().forward(x)
            return pooled
        return from_rows(apply(Halving, to_rows(x)))


def to_rows(x: Tensor) -> Tensor:
    """(N, C, H, W) seen as (H, C, W, N)."""
    return x.permute(2, 1, 3, 0)


def from_rows(x: Tensor) -> Tensor:
    """(H, C, W, N) seen as (N, C, H, W)."""
    return x.permute(3, 1, 0, 2)


def apply(function: type[torch.autograd.Function], *tensors: Tensor | None) -> Tensor:
    """A function of tensors that knows its own gradient."""
    y: Tensor = function.apply(*tensors)  # type: ignore[no-untyped-call]
    return y


class Convolution(torch.autograd.Function):
    """The sum over kernel rows i and columns j of weight[:, :, i, j] times the x there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """From x (H, C, W, N) and weight (O, C, KH, KW) to (H', O, W', N)."""
        columns, batch = x.shape[2:]
        out, _, high, wide = weight.shape
        kernel = weight.permute(0, 2, 3, 1).reshape(out, -1)
        patches = row_patches(x.contiguous(), high, wide)
        each = kernel.expand(len(patches), -1, -1)
        if bias is None:
            y = torch.bmm(each, patches)
        else:
            y = torch.baddbmm(bias[:, None], each, patches)
        ctx.save_for_backward(patches, kernel)
        ctx.shapes = x.shape, weight.shape
        return y.view(-1, out, columns - wide + 1, batch)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of x, weight and bias."""
        patches, kernel = ctx.saved_tensors
        x_shape, (out, channels, high, wide) = ctx.shapes
        g = gradient.contiguous().flatten(2)
        of_x = gradient_of_x(g, kernel, x_shape, high, wide) if ctx.needs_input_grad[0] else None
        of_kernel = torch.bmm(g, patches.transpose(1, 2)).sum(0)
        of_weight = of_kernel.view(out, high, wide, channels).permute(0, 3, 1, 2)
        of_bias = g.sum((0, 2)) if ctx.needs_input_grad[2] else None
        return of_x, of_weight, of_bias


def row_patches(x: Tensor, high: int, wide: int) -> Tensor:
    """For each row of the output its patches (KH·KW·C, W'·N), overlapping in memory.

    >>> row_patches(torch.arange(4.0).view(2, 1, 2, 1), 1, 2).tolist()
    [[[0.0], [1.0]], [[2.0], [3.0]]]
    """
    rows, channels, columns, batch = x.shape
    width = (columns - wide + 1) * batch
    strides = (channels * columns * batch, batch, columns * batch, 1)
    shifted = x.as_strided((rows, wide, channels, width), strides).contiguous()
    line = wide * channels
    return shifted.as_strided((rows - high + 1, high * line, width), (line * width, width, 1))


def gradient_of_x(
    g: Tensor, kernel: Tensor, shape: tuple[int, ...], high: int, wide: int
) -> Tensor:
    """Every patch's gradient added where the patch came from."""
    rows, channels, _, batch = shape
    shifted = g.new_zeros(rows, wide * channels, g.shape[2])
    for i, part in enumerate(kernel.view(-1, high, wide * channels).unbind(1)):
        each = part.t().expand(len(g), -1, -1)
        shifted[i : i + len(g)].baddbmm_(each, g)
    x = g.new_zeros(shape)
    for j, part in enumerate(shifted.view(rows, wide, channels, -1, batch).unbind(1)):
        x[:, :, j : j + part.shape[2]] += part
    return x


class Halving(torch.autograd.Function):
    """The largest of four pixels; where some are equal, the gradient goes to the first of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """From (H, C, W, N) to (H/2, C, W/2, N)."""
        rows, columns = x.shape[0] // 2 * 2, x.shape[2] // 2 * 2
        x_even = x[:rows, :, :columns]
        across, right = larger(x_even[:, :, ::2], x_even[:, :, 1::2])
        y, lower = larger(across[::2], across[1::2])
        ctx.save_for_backward(right, lower)
        ctx.shape = x.shape
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """The gradient of x."""
        right, lower = ctx.saved_tensors
        across = torch.empty_like(right)
        share(gradient, lower, across[::2], across[1::2])
        rows, columns = right.shape[0], 2 * right.shape[2]
        is_even = ctx.shape[0] == rows and ctx.shape[2] == columns
        x = gradient.new_empty(ctx.shape) if is_even else gradient.new_zeros(ctx.shape)
        share(across, right, x[:rows, :, :columns:2], x[:rows, :, 1:columns:2])
        return x


def larger(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The larger of each two numbers, and 1 where it is only the second's, else 0."""
    most = torch.maximum(a, b)
    return most, torch.gt(b, a, out=torch.empty_like(most))


def share(whole: Tensor, is_second: Tensor, first: Tensor, second: Tensor) -> None:
    """Write each number of a whole to one of two places."""
    torch.mul(whole, is_second, out=second)
    torch.sub(whole, second, out=first)
