"""Recorded convolutions: the kernel calls of a convolution and its gradients, with their memory.

There are two algorithms. The direct one multiplies every weight by every pixel that it meets. The
other is Winograd's (Toom and Cook's), which needs fewer products: a tile of neighboring pixels and
a row of the kernel are the coefficients of two polynomials, whose product is their convolution. At
a point, the product of two polynomials is the product of two numbers. So both are evaluated at
enough points to determine the result, multiplied there, and interpolated. For four output pixels
and a kernel of five columns, this takes 8 products instead of 20.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedsift.engine.cpu.functions import row_pair_buffer, weight_gradient_arguments
from fedsift.engine.cpu.kernel_support import padding_of
from fedsift.engine.cpu.native import prepared

Call = Callable[[], object]

POINTS = (0.0, 1.0, -1.0, 2.0, -0.5, 0.5, -2.0)
"""Where the polynomials are evaluated, in addition to infinity. Points close to 1 in magnitude
preserve the precision of float32."""
ONE = 1
"""The index of the point 1. A value there and 0 at all other points interpolates to a constant."""
MIN_WINOGRAD_CHANNELS = 6
"""The smallest number of input channels for which Winograd's algorithm is faster."""


class Unsupported(Exception):
    """A layer does not fit its input. Autograd then raises PyTorch's error."""


class Value(NamedTuple):
    """A tensor and the loss's gradient with respect to it (empty for the input data)."""

    x: Tensor
    gradient: Tensor

    @classmethod
    def empty(cls, *shape: int) -> Value:
        """Allocate both. The gradient is zero where a pool does not write."""
        return cls(torch.empty(shape), torch.zeros(shape))

    @classmethod
    def of(cls, parameter: Tensor | None, size: int = 0) -> Value:
        """Return a parameter and its gradient; zeros for a missing bias."""
        if parameter is None:
            return cls(torch.zeros(size), torch.empty(size))
        assert parameter.grad is not None
        return cls(parameter.detach(), parameter.grad)


class DirectConvolution:
    """A convolution of x (H, C, W, N), which already includes the padding."""

    def __init__(self, layer: nn.Conv2d, x: Tensor) -> None:
        self.x, self.weight, self.padding = x, Value.of(layer.weight), padding_of(layer)
        rows, self.channels, columns, self.batch = x.shape
        self.outputs, channels, self.kernel_rows, self.kernel_columns = self.weight.x.shape
        self.bias = Value.of(layer.bias, self.outputs)
        out_rows, out_columns = rows - self.kernel_rows + 1, columns - self.kernel_columns + 1
        self.shape = out_rows, self.outputs, out_columns, self.batch
        pad_rows, pad_columns = self.padding
        is_padding_narrow = pad_rows < self.kernel_rows and pad_columns < self.kernel_columns
        if self.channels != channels or min(self.shape) < 1 or not is_padding_narrow:
            raise Unsupported

    def forward(self, y: Tensor) -> Iterator[Call]:
        """From x to y (H', O, W', N)."""
        weight = torch.empty(self.kernel_rows, self.kernel_columns, self.channels, self.outputs)
        yield rearrange(self.weight.x, lambda w: w.permute(2, 3, 1, 0), weight)
        yield convolve(self.x, weight, self.bias.x, y)

    def backward(self, y_gradient: Tensor, x_gradient: Tensor) -> Iterator[Call]:
        """From the gradient of y to those of bias and weight, and of x unless it is empty."""
        yield partial(torch.sum, y_gradient, (0, 2, 3), out=self.bias.gradient)
        yield from self.gradients(y_gradient, x_gradient)

    def gradients(self, y_gradient: Tensor, x_gradient: Tensor) -> Iterator[Call]:
        """From the gradient of y to that of weight, and of x unless it is empty."""
        yield self.weight.gradient.zero_
        yield weight_gradient(y_gradient, self.x, self.weight.gradient)
        if len(x_gradient):
            pad_rows, pad_columns = self.padding
            flipped = torch.empty(
                self.kernel_rows, self.kernel_columns, self.outputs, self.channels
            )
            yield rearrange(self.weight.x, lambda w: w.flip(2, 3).permute(2, 3, 0, 1), flipped)
            padding = self.kernel_rows - 1 - pad_rows, self.kernel_columns - 1 - pad_columns
            yield convolve(y_gradient, flipped, torch.zeros(self.channels), x_gradient, padding)


class PooledConvolution(DirectConvolution):
    """A convolution, a 2 × 2 max pool and optionally a ReLU in one pass."""

    def __init__(self, layer: nn.Conv2d, x: Tensor, relu: bool) -> None:
        super().__init__(layer, x)
        self.unpooled_shape, self.relu = self.shape, relu
        rows, outputs, columns, batch = self.unpooled_shape
        self.shape = rows // 2, outputs, columns // 2, batch
        self.argmax = torch.empty(self.shape, dtype=torch.uint8)

    def forward(self, y: Tensor) -> Iterator[Call]:
        """From x to y (H'/2, O, W'/2, N)."""
        rows, _, columns, _ = self.x.shape
        kernel = self.kernel_rows, self.kernel_columns
        weight = torch.empty(*kernel, self.channels, self.outputs)
        yield rearrange(self.weight.x, lambda w: w.permute(2, 3, 1, 0), weight)
        buffer = row_pair_buffer(self.unpooled_shape)
        sizes = rows, columns, self.channels, *kernel, self.outputs, self.batch, self.relu
        yield prepared("convolve_pool", self.x, weight, self.bias.x, buffer, y, self.argmax, *sizes)

    def backward(self, y_gradient: Tensor, x_gradient: Tensor) -> Iterator[Call]:
        """From the gradient of y to those of bias and weight, and of x unless it is empty."""
        yield prepared("bias_gradient", y_gradient, self.argmax, self.bias.gradient, *self.shape)
        if len(x_gradient):
            unpooled, sizes = torch.zeros(self.unpooled_shape), self.unpooled_shape
            yield prepared("max_pool_gradient", y_gradient, self.argmax, unpooled, *sizes)
            yield from self.gradients(unpooled, x_gradient)
            return
        yield self.weight.gradient.zero_
        offsets, arguments = weight_gradient_arguments(
            self.x, self.unpooled_shape, self.weight.x.shape
        )
        buffer = row_pair_buffer(self.unpooled_shape)
        memory = y_gradient, self.argmax, self.x, offsets, buffer, self.weight.gradient
        yield prepared("pool_weight_gradient", *memory, *arguments)


class WinogradConvolution(DirectConvolution):
    """A convolution with fewer products, whose rows of pixels are multiplied at points."""

    def __init__(self, layer: nn.Conv2d, x: Tensor) -> None:
        super().__init__(layer, x)
        rows, outputs, columns, batch = self.shape
        self.tile = 4 if columns % 4 == 0 else 2
        matrices = winograd_matrices(self.tile, self.kernel_columns)
        self.evaluate_x, self.evaluate_weight, self.interpolate = matrices
        self.points, self.tiles = len(self.evaluate_weight), columns // self.tile
        self.x_at_points = torch.empty(self.points, len(x), self.channels, self.tiles, batch)
        self.y_gradient_at_points = torch.empty(self.points, rows, outputs, self.tiles, batch)

    @staticmethod
    def is_faster(layer: nn.Conv2d, x: Tensor) -> bool:
        """Whether the algorithm supports a layer and is faster than the direct one."""
        columns = x.shape[2] - layer.kernel_size[1] + 1
        is_supported = layer.kernel_size[1] in (3, 5) and columns % 2 == 0
        return layer.in_channels >= MIN_WINOGRAD_CHANNELS and is_supported

    def forward(self, y: Tensor) -> Iterator[Call]:
        """From x to y (H', O, W', N)."""
        weight = torch.empty(self.points, self.kernel_rows, 1, self.channels, self.outputs)
        yield from self.weight_to_points(lambda w: w.permute(3, 2, 1, 0), weight)
        yield self.to_points(self.x, self.evaluate_x, self.x_at_points)
        y_at_points, zeros = torch.empty_like(self.y_gradient_at_points), torch.zeros(self.outputs)
        for p in range(self.points):
            bias = self.bias.x if p == ONE else zeros
            yield convolve(self.x_at_points[p], weight[p], bias, y_at_points[p])
        yield self.from_points(y_at_points, self.interpolate, y)

    def gradients(self, y_gradient: Tensor, x_gradient: Tensor) -> Iterator[Call]:
        """From the gradient of y to that of weight, and of x unless it is empty.

        Each linear step of :meth:`forward` is transposed.
        """
        at_points = self.y_gradient_at_points
        weight = torch.empty(self.points, self.outputs, self.channels, self.kernel_rows, 1)
        yield self.to_points(y_gradient, self.interpolate.t().contiguous(), at_points)
        yield weight.zero_
        for p in range(self.points):
            yield weight_gradient(at_points[p], self.x_at_points[p], weight[p])
        result = self.weight.gradient.view(-1, self.kernel_columns)
        yield partial(torch.mm, weight.view(self.points, -1).t(), self.evaluate_weight, out=result)
        if len(x_gradient):
            yield from self.input_gradient(x_gradient)

    def input_gradient(self, x_gradient: Tensor) -> Iterator[Call]:
        """Compute the gradient of x without its padding."""
        (pad_rows, pad_columns), zeros = self.padding, torch.zeros(self.channels)
        weight = torch.empty(self.points, self.kernel_rows, 1, self.outputs, self.channels)
        yield from self.weight_to_points(lambda w: w.flip(2).permute(3, 2, 0, 1), weight)
        rows, padding = len(x_gradient), (self.kernel_rows - 1 - pad_rows, 0)
        at_points = torch.empty(self.points, rows, self.channels, self.tiles, self.batch)
        for p in range(self.points):
            yield convolve(self.y_gradient_at_points[p], weight[p], zeros, at_points[p], padding)
        with_padding = torch.empty(rows, *self.x.shape[1:]) if pad_columns else x_gradient
        yield self.from_points(at_points, self.evaluate_x.t().contiguous(), with_padding)
        if pad_columns:
            yield partial(x_gradient.copy_, with_padding[:, :, pad_columns:-pad_columns])

    def weight_to_points(self, order: Callable[[Tensor], Tensor], out: Tensor) -> Iterator[Call]:
        """Evaluate the weight at all points; ``order`` permutes it so that columns come first."""
        columns_first = torch.empty(
            self.kernel_columns, self.weight.x.numel() // self.kernel_columns
        )
        yield rearrange(self.weight.x, order, columns_first)
        out = out.view(self.points, -1)
        yield partial(torch.mm, self.evaluate_weight, columns_first, out=out)

    def to_points(self, x: Tensor, matrix: Tensor, out: Tensor) -> Call:
        """Evaluate rows of pixels (H, C, W, N) at the points (P, H, C, tiles, N)."""
        sizes = x.shape[2], self.tiles, matrix.shape[1], self.tile, self.points, self.batch
        return prepared("to_points", x, matrix, out, len(x) * x.shape[1], *sizes)

    def from_points(self, x: Tensor, matrix: Tensor, out: Tensor) -> Call:
        """Interpolate pixels (H, C, W, N) from their values at the points."""
        sizes = out.shape[2], self.tiles, len(matrix), self.tile, self.points, self.batch
        return prepared("from_points", x, matrix, out, len(out) * out.shape[1], *sizes)


@cache
def winograd_matrices(pixels: int, taps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the matrices that evaluate columns, evaluate a kernel, and interpolate their product.

    >>> columns, kernel = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1.0, 10.0, 100.0])
    >>> of_columns, of_kernel, interpolate = winograd_matrices(pixels=2, taps=3)
    >>> (interpolate @ ((of_columns @ columns) * (of_kernel @ kernel))).round().tolist()
    [321.0, 432.0]
    """
    points = pixels + taps - 1
    inverse = torch.linalg.inv(evaluation_matrix(points, points)).t()
    matrices = inverse, evaluation_matrix(points, taps), evaluation_matrix(points, pixels).t()
    of_pixels, of_taps, interpolate = (matrix.float().contiguous() for matrix in matrices)
    return of_pixels, of_taps, interpolate


def evaluation_matrix(points: int, size: int) -> Tensor:
    """Return the matrix from ``size`` coefficients of a polynomial to its values at the points."""
    finite = torch.tensor(POINTS[: points - 1], dtype=torch.float64)[:, None] ** torch.arange(size)
    return torch.cat([finite, torch.eye(size, dtype=torch.float64)[-1:]])


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor, y: Tensor, padding: tuple[int, int] = (0, 0)
) -> Call:
    """Convolve x, padded with zeros, with weight (KH, KW, C, O)."""
    rows, channels, columns, batch = x.shape
    kernel_rows, kernel_columns, _, outputs = weight.shape
    sizes = rows, columns, channels, kernel_rows, kernel_columns, outputs
    return prepared("convolve", x, weight, bias, y, *sizes, *padding, batch)


def weight_gradient(y_gradient: Tensor, x: Tensor, out: Tensor) -> Call:
    """Add the gradient of a weight (O, C, KH, KW) to ``out``."""
    offsets, sizes = weight_gradient_arguments(x, y_gradient.shape, out.shape)
    return prepared("weight_gradient", y_gradient, x, offsets, out, *sizes)


def rearrange(x: Tensor, order: Callable[[Tensor], Tensor], out: Tensor) -> Call:
    """Copy ``order(x)``, a permutation of the elements of x, to ``out``."""
    indices = order(torch.arange(x.numel()).view_as(x)).flatten()
    return partial(torch.index_select, x.view(-1), 0, indices, out=out.view(-1))
