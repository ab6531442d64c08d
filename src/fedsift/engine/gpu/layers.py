"""Layers that compute all clients of a stack at once on a GPU.

Each client has its own weights, so a layer is a batch of small matrix products. The backward pass
writes the gradients of the parameters directly to the optimizer's buffer, and autograd propagates
only the gradients of the activations. Without a parameter in the graph, autograd would skip the
backward pass of the first layer, whose input needs no gradient. The ``anchor`` argument, a dummy
tensor that requires a gradient, prevents this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedsift.engine.gpu import triton as kernels
from fedsift.engine.gpu.weight import Weight


@dataclass(frozen=True)
class Window:
    """The geometry of a convolution with ``side`` × ``side`` taps."""

    side: int = 1
    stride: int = 1
    padding: int = 0

    def output_size(self, size: int) -> int:
        """Return the number of output pixels along an axis of ``size`` input pixels."""
        return (size + 2 * self.padding - self.side) // self.stride + 1


@dataclass(frozen=True)
class Tile:
    """The part of a matrix product that one GPU block computes, and its warps and stages."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


class StackedConvolution(torch.autograd.Function):
    """Convolve each client's images with its own weights."""

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
        """Convolve, then apply ReLU if ``relu``."""
        clients, batch, height, width, _ = x.shape
        outputs = weight.value.shape[1]
        size = window.output_size(height), window.output_size(width)
        y = x.new_empty(clients, batch, *size, outputs)
        offset = None if bias is None else bias.value
        convolve(x, weight.low_precision, offset, y, window, relu, precision)
        ctx.arguments = weight, bias, window, relu, precision
        ctx.save_for_backward(x, y if relu else x.new_empty(0))
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Return the gradient of x; write those of the parameters to their buffers."""
        weight, bias, window, relu, precision = ctx.arguments
        x, y = ctx.saved_tensors
        if relu:
            gradient = torch.ops.aten.threshold_backward(gradient, y, 0)
        gradient = gradient.contiguous()
        bias_gradient = None if bias is None else bias.gradient
        weight_gradient(x, gradient, weight.gradient, bias_gradient, window, precision)
        x_gradient = None
        if ctx.needs_input_grad[1]:
            x_gradient = torch.empty_like(x)
            input_gradient(gradient, weight.low_precision, x_gradient, window, precision)
        return None, x_gradient, None, None, None, None, None


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
    _launch_convolution(x, weight, bias, y, window, relu, precision, backward=False)


def input_gradient(
    gradient: Tensor, weight: Tensor, x_gradient: Tensor, window: Window, precision: str
) -> None:
    """Write the gradient with respect to a convolution's input, given that of its output."""
    _launch_convolution(gradient, weight, None, x_gradient, window, False, precision, backward=True)


def _launch_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    y: Tensor,
    window: Window,
    relu: bool,
    precision: str,
    *,
    backward: bool,
) -> None:
    clients, batch, in_height, in_width, channels = x.shape
    _, _, height, width, outputs = y.shape
    rows = batch * height * width
    tile = convolution_tile(rows, outputs, channels, clients, x.element_size())
    is_even = channels % tile.depth == 0
    grid = (-(-rows // tile.rows) * -(-outputs // tile.columns), clients)
    kernels.convolution_kernel[grid](
        x, weight, bias, y, rows, height, width, in_height, in_width, channels, outputs,
        x.stride(0), weight.stride(0), 0 if bias is None else bias.stride(0), y.stride(0),
        SIDE=window.side, STRIDE=window.stride, PADDING=window.padding, BACKWARD=backward,
        CHANNELS=0 if is_even else channels, BIAS=bias is not None, RELU=relu, PRECISION=precision,
        ROWS=tile.rows, OUTPUTS=tile.columns, DEPTH=tile.depth,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def convolution_tile(rows: int, outputs: int, channels: int, clients: int, item_size: int) -> Tile:
    """Return the tile of a convolution's output that one block computes."""
    if channels % 32:
        columns = min(64, block_size(outputs))
        return Tile(128 if columns == 16 else 64, columns, 32, 2, 2)
    depth = 64 if item_size == 2 and channels % 64 == 0 else 32
    columns = min(128, block_size(outputs))
    is_small = clients * rows * outputs < 128 * columns * 400
    tile_rows = 64 if is_small else 128
    return Tile(tile_rows, columns, depth, 8 if tile_rows * columns >= 128 * 128 else 4, 3)


def weight_gradient(
    x: Tensor,
    gradient: Tensor,
    result: Tensor,
    bias_result: Tensor | None,
    window: Window,
    precision: str,
) -> None:
    """Write the gradients of the weights ``(clients, outputs, side, side, channels)`` and bias."""
    clients, batch, in_height, in_width, channels = x.shape
    _, _, height, width, outputs = gradient.shape
    rows, taps = batch * height * width, window.side**2
    tile = weight_tile(outputs, taps * channels, channels, x.element_size())
    is_even = channels % tile.columns == 0
    if is_even and bias_result is not None:
        torch.sum(gradient, (1, 2, 3), dtype=bias_result.dtype, out=bias_result)
        bias_result = None
    has_bias = bias_result is not None
    blocks = -(-outputs // tile.rows) * -(-(taps * channels + has_bias) // tile.columns)
    portions = num_portions(rows, blocks * clients, tile.depth)
    portion = -(-rows // portions // tile.depth) * tile.depth
    portions = -(-rows // portion)
    bias_sums = None if bias_result is None else _partial_sums(bias_result, portions)
    sums = _partial_sums(result, portions)
    kernels.weight_gradient_kernel[(blocks, clients, portions)](
        x, gradient, sums, bias_sums, rows, height, width, in_height, in_width, channels, outputs,
        portion, x.stride(0), gradient.stride(0), sums.stride(1), sums.stride(0),
        *((0, 0) if bias_sums is None else bias_sums.stride()[1::-1]),
        SIDE=window.side, STRIDE=window.stride, PADDING=window.padding,
        CHANNELS=0 if is_even else channels, BIAS=has_bias, PRECISION=precision,
        OUTPUTS=tile.rows, INPUTS=tile.columns, DEPTH=tile.depth,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if portions > 1:
        torch.sum(sums, 0, out=result)
        if bias_sums is not None and bias_result is not None:
            torch.sum(bias_sums, 0, out=bias_result)


def _partial_sums(result: Tensor, portions: int) -> Tensor:
    """Return memory for the sum of each portion. A single portion writes to the result itself."""
    return result[None] if portions == 1 else result.new_empty(portions, *result.shape)


def weight_tile(outputs: int, entries: int, channels: int, item_size: int) -> Tile:
    """Return the tile of the weights' gradient that one block computes."""
    rows = min(128, block_size(outputs))
    if channels % 32:
        rows, columns = min(64, rows), min(64, block_size(entries + 1))
        return Tile(rows, columns, 64, max(1, rows * columns // 1024), 2)
    columns = 128 if channels % 128 == 0 else 64 if channels % 64 == 0 else 32
    warps = 8 if rows * columns >= 128 * 128 else 4
    return Tile(rows, columns, 64 if item_size == 2 else 32, warps, 3)


def num_portions(rows: int, blocks: int, depth: int) -> int:
    """Return the number of portions of a sum that gives the whole GPU work.

    >>> num_portions(36864, 20, 64), num_portions(1024, 2880, 64)
    (40, 1)
    """
    return max(1, min(800 // blocks, rows // (4 * depth)))


class StackedMaxPool(torch.autograd.Function):
    """Max pooling over windows that do not overlap, optionally followed by ReLU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, side: int, relu: bool) -> Tensor:
        """Pool, then apply ReLU if ``relu``."""
        clients, batch, height, width, channels = x.shape
        y = x.new_empty(clients, batch, height // side, width // side, channels)
        argmax = torch.empty_like(y, dtype=torch.int8)
        kernels.pool_kernel[(-(-y.numel() // 512),)](
            x, y, argmax, y.numel(), *_pool_sizes(x, y), SIDE=side, RELU=relu, BLOCK=512
        )
        ctx.arguments = side, x.shape
        ctx.save_for_backward(argmax)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Return the gradient of x."""
        side, shape = ctx.arguments
        (argmax,) = ctx.saved_tensors
        is_covered = shape[2] % side == 0 and shape[3] % side == 0
        x_gradient = (torch.empty if is_covered else torch.zeros)(
            shape, dtype=gradient.dtype, device=gradient.device
        )
        gradient = gradient.contiguous()
        kernels.unpool_kernel[(-(-gradient.numel() // 512),)](
            gradient, argmax, x_gradient, gradient.numel(), *_pool_sizes(x_gradient, gradient),
            SIDE=side, BLOCK=512,
        )  # fmt: skip
        return x_gradient, None, None


def _pool_sizes(x: Tensor, y: Tensor) -> tuple[int, int, int, int, int]:
    in_width, width = x.shape[3], y.shape[3]
    return width, y.shape[4], in_width, x.shape[2] * in_width, y.shape[2] * width


class StackedGroupNorm(torch.autograd.Function):
    """Group normalization with each client's scale and bias, optionally followed by ReLU."""

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
        """Normalize, then apply ReLU if ``relu``."""
        clients, batch, height, width, channels = x.shape
        y = torch.empty_like(x)
        mean, inverse_std = x.new_empty(2, clients * batch, groups, dtype=torch.float32)
        kernels.norm_kernel[(clients * batch,)](
            x, scale.value, bias.value, y, mean, inverse_std,
            height * width, batch, scale.value.stride(0), eps,
            CHANNELS=channels, GROUPS=groups, RELU=relu, ROWS=norm_rows(channels), num_warps=4,
        )  # fmt: skip
        ctx.arguments = scale, bias, groups, relu
        ctx.save_for_backward(x, y, mean, inverse_std)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Return the gradient of x; write those of the parameters to their buffers."""
        scale, bias, groups, relu = ctx.arguments
        x, y, mean, inverse_std = ctx.saved_tensors
        clients, batch, height, width, channels = x.shape
        x_gradient = torch.empty_like(x)
        sums = x.new_empty(2, clients, batch, channels, dtype=torch.float32)
        kernels.norm_gradient_kernel[(clients * batch,)](
            x, y, gradient.contiguous(), scale.value, mean, inverse_std, x_gradient,
            sums[0], sums[1], height * width, batch, scale.value.stride(0),
            CHANNELS=channels, GROUPS=groups, RELU=relu, ROWS=norm_rows(channels), num_warps=4,
        )  # fmt: skip
        torch.sum(sums[0], 1, out=scale.gradient)
        torch.sum(sums[1], 1, out=bias.gradient)
        return None, x_gradient, None, None, None, None, None


def norm_rows(channels: int) -> int:
    """Return the number of pixels that a block of the normalization loads at a time."""
    return max(1, 4096 // channels)


def cross_entropy(output: Tensor, labels: Tensor, loss: Tensor) -> Tensor:
    """Return the gradient of the output, and add each client's mean loss to ``loss``."""
    clients, batch, classes = output.shape
    gradient = torch.empty_like(output)
    kernels.cross_entropy_kernel[(clients,)](
        output, labels, gradient, loss, batch, classes,
        BATCH=block_size(batch), CLASSES=block_size(classes),
    )  # fmt: skip
    return gradient


def block_size(number: int) -> int:
    """Return the smallest power of two that is at least ``number`` and at least 16.

    >>> block_size(10), block_size(25), block_size(128)
    (16, 32, 128)
    """
    return int(max(16, 1 << (number - 1).bit_length()))
