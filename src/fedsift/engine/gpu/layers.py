"""Layers of a network for all clients of a stack at once, on a GPU.

Each client has weights of its own, so that a layer is a batch of small products. Its gradient by
the weights goes straight to where the optimizer reads it, and autograd passes on only the gradient
by the activations. ``anchor`` is a tensor that requires a gradient for no other reason than that
autograd then calls the first layer's backward pass, too, although its input needs none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedsift.engine.gpu import triton as kernels


@dataclass(frozen=True)
class Weight:
    """A parameter of every client: its value ``(clients, ...)`` and where its gradient goes.

    ``short`` is the value in the format that products are computed in.
    """

    value: Tensor
    short: Tensor
    gradient: Tensor


@dataclass(frozen=True)
class Window:
    """A convolution's geometry: ``side`` × ``side`` taps."""

    side: int = 1
    stride: int = 1
    padding: int = 0

    def size(self, before: int) -> int:
        """Pixels along an axis after the convolution."""
        return (before + 2 * self.padding - self.side) // self.stride + 1


@dataclass(frozen=True)
class Tile:
    """How large a piece of a product one block computes, and with how many threads."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


class Convolution(torch.autograd.Function):
    """Every client's convolution of its own images with its own weights."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        x: Tensor,
        weight: Weight,
        bias: Weight | None,
        window: Window,
        relu: bool,
        precision: str,
    ) -> Tensor:
        """Convolve, and rectify if wanted."""
        clients, batch, height, width, _ = x.shape
        outputs = weight.value.shape[1]
        y = x.new_empty(clients, batch, window.size(height), window.size(width), outputs)
        convolve(x, weight.short, None if bias is None else bias.value, y, window, relu, precision)
        ctx.about = weight, bias, window, relu, precision
        ctx.save_for_backward(x, y if relu else x.new_empty(0))
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """The gradients: by the parameters to their places, by x handed on."""
        weight, bias, window, relu, precision = ctx.about
        x, y = ctx.saved_tensors
        if relu:
            gradient = torch.ops.aten.threshold_backward(gradient, y, 0)
        gradient = gradient.contiguous()
        by_bias = None if bias is None else bias.gradient
        weights_gradient(x, gradient, weight.gradient, by_bias, window, precision)
        by_x = None
        if ctx.needs_input_grad[1]:
            by_x = torch.empty_like(x)
            convolve_back(gradient, weight.short, by_x, window, precision)
        return None, by_x, None, None, None, None, None


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    y: Tensor,
    window: Window,
    relu: bool,
    precision: str,
) -> None:
    """Write the convolution of x with the weights to y."""
    channels = x.shape[-1]
    strides = (window.side**2 * channels, channels, 1)
    _windows(
        x, weight, bias, y, window, strides, relu, precision,
        step=window.stride, sign=1, shift=-window.padding, divisor=1,
    )  # fmt: skip


def convolve_back(
    gradient: Tensor, weight: Tensor, by_x: Tensor, window: Window, precision: str
) -> None:
    """Write the gradient by a convolution's input, given that by its output."""
    channels = by_x.shape[-1]
    strides = (1, channels, window.side**2 * channels)
    _windows(
        gradient, weight, None, by_x, window, strides, False, precision,
        step=1, sign=-1, shift=window.padding, divisor=window.stride,
    )  # fmt: skip


def _windows(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    y: Tensor,
    window: Window,
    strides: tuple[int, int, int],
    relu: bool,
    precision: str,
    *,
    step: int,
    sign: int,
    shift: int,
    divisor: int,
) -> None:
    clients, batch, in_height, in_width, channels = x.shape
    _, _, height, width, outputs = y.shape
    rows = batch * height * width
    tile = window_tile(rows, outputs, channels, clients, x.element_size())
    even = channels % tile.depth == 0
    grid = (-(-rows // tile.rows) * -(-outputs // tile.columns), clients)
    kernels.windows_kernel[grid](
        x, weight, bias, y, rows, height, width, in_height, in_width, channels, outputs,
        step, sign, shift, x.stride(0), weight.stride(0), *strides,
        0 if bias is None else bias.stride(0), y.stride(0),
        TAPS=window.side**2, SIDE=window.side, CHANNELS=0 if even else channels, DIVISOR=divisor,
        BIAS=bias is not None, RELU=relu, PRECISION=precision, PADDED=shift != 0 or sign < 0,
        ROWS=tile.rows, OUTPUTS=tile.columns, DEPTH=tile.depth,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def window_tile(rows: int, outputs: int, channels: int, clients: int, item: int) -> Tile:
    """The piece of the output that one block computes."""
    if channels % 32:
        columns = min(64, power(outputs))
        return Tile(128 if columns == 16 else 64, columns, 32, 2, 2)
    depth = 64 if item == 2 and channels % 64 == 0 else 32
    columns = min(128, power(outputs))
    few = clients * rows * outputs < 128 * columns * 400
    tall = 64 if few else 128
    return Tile(tall, columns, depth, 8 if tall * columns >= 128 * 128 else 4, 3)


def weights_gradient(
    x: Tensor,
    gradient: Tensor,
    result: Tensor,
    by_bias: Tensor | None,
    window: Window,
    precision: str,
) -> None:
    """Write the gradient by the weights ``(clients, outputs, side, side, channels)`` and bias."""
    clients, batch, in_height, in_width, channels = x.shape
    _, _, height, width, outputs = gradient.shape
    rows, taps = batch * height * width, window.side**2
    tile = weight_tile(outputs, taps * channels, channels, x.element_size())
    even = channels % tile.columns == 0
    if even and by_bias is not None:
        torch.sum(gradient, (1, 2, 3), dtype=by_bias.dtype, out=by_bias)
        by_bias = None
    biased = by_bias is not None
    blocks = -(-outputs // tile.rows) * -(-(taps * channels + biased) // tile.columns)
    portions = portions_of(rows, blocks * clients, tile.depth)
    portion = -(-rows // portions // tile.depth) * tile.depth
    portions = -(-rows // portion)
    shares = None if by_bias is None else _shares(by_bias, portions)
    into = _shares(result, portions)
    kernels.weights_kernel[(blocks, clients, portions)](
        x, gradient, into, shares, rows, height, width, in_height, in_width, channels, outputs,
        window.stride, -window.padding, portion, x.stride(0), gradient.stride(0),
        into.stride(1), into.stride(0), *((0, 0) if shares is None else shares.stride()[1::-1]),
        TAPS=taps, SIDE=window.side, CHANNELS=0 if even else channels, PRECISION=precision,
        BIAS=biased, PADDED=window.padding != 0,
        OUTPUTS=tile.rows, INPUTS=tile.columns, DEPTH=tile.depth,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if portions > 1:
        torch.sum(into, 0, out=result)
        if shares is not None and by_bias is not None:
            torch.sum(shares, 0, out=by_bias)


def _shares(result: Tensor, portions: int) -> Tensor:
    """Where each portion's sum goes: to the result itself if there is but one."""
    return result[None] if portions == 1 else result.new_empty(portions, *result.shape)


def weight_tile(outputs: int, entries: int, channels: int, item: int) -> Tile:
    """The piece of the weights' gradient that one block computes."""
    rows = min(128, power(outputs))
    if channels % 32:
        rows, columns = min(64, rows), min(64, power(entries + 1))
        return Tile(rows, columns, 64, max(1, rows * columns // 1024), 2)
    columns = 128 if channels % 128 == 0 else 64 if channels % 64 == 0 else 32
    return Tile(rows, columns, 64 if item == 2 else 32, 8 if rows * columns >= 128 * 128 else 4, 3)


def portions_of(rows: int, blocks: int, depth: int) -> int:
    """Into how many portions to split a sum, so that there is work for the whole GPU.

    >>> portions_of(36864, 20, 64), portions_of(1024, 2880, 64)
    (40, 1)
    """
    return max(1, min(800 // blocks, rows // (4 * depth)))


class Pool(torch.autograd.Function):
    """Max pooling over windows that do not overlap; then a ReLU, if wanted."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, side: int, relu: bool) -> Tensor:
        """Pool, and rectify if wanted."""
        clients, batch, height, width, channels = x.shape
        y = x.new_empty(clients, batch, height // side, width // side, channels)
        where = torch.empty_like(y, dtype=torch.int8)
        kernels.pool_kernel[(-(-y.numel() // 512),)](
            x, y, where, y.numel(), *_pool_sizes(x, y), SIDE=side, RELU=relu, BLOCK=512
        )
        ctx.about = side, x.shape
        ctx.save_for_backward(where)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """The gradient by x."""
        side, shape = ctx.about
        (where,) = ctx.saved_tensors
        covered = shape[2] % side == 0 and shape[3] % side == 0
        by_x = (torch.empty if covered else torch.zeros)(
            shape, dtype=gradient.dtype, device=gradient.device
        )
        gradient = gradient.contiguous()
        kernels.unpool_kernel[(-(-gradient.numel() // 512),)](
            gradient, where, by_x, gradient.numel(), *_pool_sizes(by_x, gradient),
            SIDE=side, BLOCK=512,
        )  # fmt: skip
        return by_x, None, None


def _pool_sizes(x: Tensor, y: Tensor) -> tuple[int, int, int, int, int]:
    in_width, width = x.shape[3], y.shape[3]
    return width, y.shape[4], in_width, x.shape[2] * in_width, y.shape[2] * width


class GroupNorm(torch.autograd.Function):
    """Group normalization with every client's own scale and bias; then a ReLU, if wanted."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        x: Tensor,
        scale: Weight,
        bias: Weight,
        groups: int,
        eps: float,
        relu: bool,
    ) -> Tensor:
        """Normalize, and rectify if wanted."""
        clients, batch, height, width, channels = x.shape
        y = torch.empty_like(x)
        mean, spread = x.new_empty(2, clients * batch, groups, dtype=torch.float32)
        kernels.norm_kernel[(clients * batch,)](
            x, scale.value, bias.value, y, mean, spread,
            height * width, batch, scale.value.stride(0), eps,
            CHANNELS=channels, GROUPS=groups, RELU=relu, ROWS=norm_rows(channels), num_warps=4,
        )  # fmt: skip
        ctx.about = scale, bias, groups, relu
        ctx.save_for_backward(x, y, mean, spread)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """The gradients: by the parameters to their places, by x handed on."""
        scale, bias, groups, relu = ctx.about
        x, y, mean, spread = ctx.saved_tensors
        clients, batch, height, width, channels = x.shape
        by_x = torch.empty_like(x)
        shares = x.new_empty(2, clients, batch, channels, dtype=torch.float32)
        kernels.norm_gradient_kernel[(clients * batch,)](
            x, y, gradient.contiguous(), scale.value, mean, spread, by_x, shares[0], shares[1],
            height * width, batch, scale.value.stride(0),
            CHANNELS=channels, GROUPS=groups, RELU=relu, ROWS=norm_rows(channels), num_warps=4,
        )  # fmt: skip
        torch.sum(shares[0], 1, out=scale.gradient)
        torch.sum(shares[1], 1, out=bias.gradient)
        return None, by_x, None, None, None, None, None


def norm_rows(channels: int) -> int:
    """Pixels that a block of the normalization takes at a time."""
    return max(1, 4096 // channels)


def cross_entropy(output: Tensor, labels: Tensor, loss: Tensor) -> Tensor:
    """The gradient by the output; each client's mean loss is added to ``loss``."""
    clients, batch, classes = output.shape
    gradient = torch.empty_like(output)
    kernels.cross_entropy_kernel[(clients,)](
        output, labels, gradient, loss, batch, classes,
        BATCH=power(batch), CLASSES=power(classes),
    )  # fmt: skip
    return gradient


def power(number: int) -> int:
    """The smallest power of two that is at least the number, and at least 16.

    >>> power(10), power(25), power(128)
    (16, 32, 128)
    """
    return int(max(16, 1 << (number - 1).bit_length()))
