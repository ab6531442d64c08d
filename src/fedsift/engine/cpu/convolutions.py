"""The calls that a convolution is made of, and those of its gradient, each with its memory.

There are two ways. One multiplies every weight with every pixel that it meets. The other needs
fewer products (Toom and Cook; Winograd): some pixels beside each other and a row of the kernel are
polynomials, their convolution is a product of these, and at a point a product of polynomials is one
of numbers. So both are taken to enough points to know the result, multiplied there, and brought
back: for four pixels and a kernel of five columns that makes 8 products instead of 20.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedsift.engine.cpu.batchlast import between, frame_of, taps_and_sizes
from fedsift.engine.cpu.native import prepared

Call = Callable[[], object]

POINTS = (0.0, 1.0, -1.0, 2.0, -0.5, 0.5, -2.0)
"""Where polynomials are known; infinity is one more. So near to 1, float32's precision is kept."""
ONE = 1
"""The place of 1 among them: what is known there, and 0 elsewhere, comes back as a constant."""
MANY = 6
"""Channels of x from which on it pays to take them to points."""


class Unfit(Exception):
    """A layer cannot take what it is given: autograd will say why."""


class Value(NamedTuple):
    """Numbers, and the loss's gradient with respect to them; that of data is left empty."""

    x: Tensor
    gradient: Tensor

    @classmethod
    def empty(cls, *shape: int) -> Value:
        """Memory for both; zeros where a pool does not reach."""
        return cls(torch.empty(shape), torch.zeros(shape))

    @classmethod
    def of(cls, parameter: Tensor | None, size: int = 0) -> Value:
        """A parameter; zeros for a bias that a layer does not have."""
        if parameter is None:
            return cls(torch.zeros(size), torch.empty(size))
        assert parameter.grad is not None
        return cls(parameter.detach(), parameter.grad)


class Convolution:
    """A convolution of x (H, C, W, N), which is in its frame of zeros already."""

    def __init__(self, layer: nn.Conv2d, x: Tensor) -> None:
        self.x, self.weight, self.frame = x, Value.of(layer.weight), frame_of(layer)
        rows, self.channels, columns, self.batch = x.shape
        self.out, wanted, self.high, self.wide = self.weight.x.shape
        self.bias = Value.of(layer.bias, self.out)
        self.shape = rows - self.high + 1, self.out, columns - self.wide + 1, self.batch
        down, across = self.frame
        is_narrow = down < self.high and across < self.wide
        if self.channels != wanted or min(self.shape) < 1 or not is_narrow:
            raise Unfit

    def forward(self, y: Tensor) -> Iterator[Call]:
        """From x to y (H', O, W', N)."""
        ordered = torch.empty(self.high, self.wide, self.channels, self.out)
        yield rearranged(self.weight.x, lambda weight: weight.permute(2, 3, 1, 0), ordered)
        yield convolve(self.x, ordered, self.bias.x, y)

    def backward(self, of_y: Tensor, of_x: Tensor) -> Iterator[Call]:
        """From the gradient of y to those of bias and weight and, where it is wanted, of x."""
        yield partial(torch.sum, of_y, (0, 2, 3), out=self.bias.gradient)
        yield from self.gradients(of_y, of_x)

    def gradients(self, of_y: Tensor, of_x: Tensor) -> Iterator[Call]:
        """The gradients of weight and x."""
        yield self.weight.gradient.zero_
        yield weight_gradient(of_y, self.x, self.weight.gradient)
        if len(of_x):
            down, across = self.frame
            turned = torch.empty(self.high, self.wide, self.out, self.channels)
            yield rearranged(self.weight.x, lambda w: w.flip(2, 3).permute(2, 3, 0, 1), turned)
            frame = self.high - 1 - down, self.wide - 1 - across
            yield convolve(of_y, turned, torch.zeros(self.channels), of_x, frame)


class HalvedConvolution(Convolution):
    """A convolution, the largest of each four of its pixels, and maybe a ReLU, in one pass."""

    def __init__(self, layer: nn.Conv2d, x: Tensor, rectifies: bool) -> None:
        super().__init__(layer, x)
        self.whole, self.rectifies = self.shape, rectifies
        rows, out, columns, batch = self.whole
        self.shape = rows // 2, out, columns // 2, batch
        self.which = torch.empty(self.shape, dtype=torch.uint8)

    def forward(self, y: Tensor) -> Iterator[Call]:
        """From x to y (H'/2, O, W'/2, N)."""
        rows, _, columns, _ = self.x.shape
        ordered = torch.empty(self.high, self.wide, self.channels, self.out)
        yield rearranged(self.weight.x, lambda weight: weight.permute(2, 3, 1, 0), ordered)
        memory = self.x, ordered, self.bias.x, between(self.whole), y, self.which
        sizes = rows, columns, self.channels, self.high, self.wide, self.out, self.batch
        yield prepared("convolve_halve", *memory, *sizes, self.rectifies)

    def backward(self, of_y: Tensor, of_x: Tensor) -> Iterator[Call]:
        """From the gradient of y to those of bias and weight and, where it is wanted, of x."""
        yield prepared("bias_gradient", of_y, self.which, self.bias.gradient, *self.shape)
        if len(of_x):
            spread = torch.zeros(self.whole)
            yield prepared("halve_gradient", of_y, self.which, spread, *self.whole)
            yield from self.gradients(spread, of_x)
        else:
            places, sizes = taps_and_sizes(self.x, self.whole, self.weight.x.shape)
            memory = of_y, self.which, self.x, places, between(self.whole), self.weight.gradient
            yield self.weight.gradient.zero_
            yield prepared("halve_weight_gradient", *memory, *sizes)


class PointConvolution(Convolution):
    """A convolution with fewer products: rows of pixels are multiplied at points."""

    def __init__(self, layer: nn.Conv2d, x: Tensor) -> None:
        super().__init__(layer, x)
        rows, out, columns, batch = self.shape
        self.step = 4 if columns % 4 == 0 else 2
        self.pixels, self.taps, self.back = matrices(self.step, self.wide)
        self.points, self.tiles = len(self.taps), columns // self.step
        self.x_there = torch.empty(self.points, len(x), self.channels, self.tiles, batch)
        self.of_y_there = torch.empty(self.points, rows, out, self.tiles, batch)

    @staticmethod
    def suits(layer: nn.Conv2d, x: Tensor) -> bool:
        """Whether this is faster, and known."""
        columns = x.shape[2] - layer.kernel_size[1] + 1
        return layer.in_channels >= MANY and layer.kernel_size[1] in (3, 5) and columns % 2 == 0

    def forward(self, y: Tensor) -> Iterator[Call]:
        """From x to y (H', O, W', N)."""
        weight = torch.empty(self.points, self.high, 1, self.channels, self.out)
        yield from self.weight_there(lambda weight: weight.permute(3, 2, 1, 0), weight)
        yield self.there(self.x, self.pixels, self.x_there)
        y_there, zeros = torch.empty_like(self.of_y_there), torch.zeros(self.out)
        for p in range(self.points):
            bias = self.bias.x if p == ONE else zeros
            yield convolve(self.x_there[p], weight[p], bias, y_there[p])
        yield self.here(y_there, self.back, y)

    def gradients(self, of_y: Tensor, of_x: Tensor) -> Iterator[Call]:
        """The gradients of weight and x: all that :meth:`forward` does, transposed."""
        of_weight = torch.empty(self.points, self.out, self.channels, self.high, 1)
        yield self.there(of_y, self.back.t().contiguous(), self.of_y_there)
        yield of_weight.zero_
        for p in range(self.points):
            yield weight_gradient(self.of_y_there[p], self.x_there[p], of_weight[p])
        whole = self.weight.gradient.view(-1, self.wide)
        yield partial(torch.mm, of_weight.view(self.points, -1).t(), self.taps, out=whole)
        if len(of_x):
            yield from self.gradient_of_x(of_x)

    def gradient_of_x(self, of_x: Tensor) -> Iterator[Call]:
        """The gradient of x without its frame."""
        (down, across), zeros = self.frame, torch.zeros(self.channels)
        weight = torch.empty(self.points, self.high, 1, self.out, self.channels)
        yield from self.weight_there(lambda weight: weight.flip(2).permute(3, 2, 0, 1), weight)
        of_x_there = torch.empty(self.points, len(of_x), self.channels, self.tiles, self.batch)
        for p in range(self.points):
            frame = self.high - 1 - down, 0
            yield convolve(self.of_y_there[p], weight[p], zeros, of_x_there[p], frame)
        framed = torch.empty(len(of_x), *self.x.shape[1:]) if across else of_x
        yield self.here(of_x_there, self.pixels.t().contiguous(), framed)
        if across:
            yield partial(of_x.copy_, framed[:, :, across:-across])

    def weight_there(self, how: Callable[[Tensor], Tensor], into: Tensor) -> Iterator[Call]:
        """The weight at all points, after a function that puts its columns first."""
        first = torch.empty(self.wide, self.weight.x.numel() // self.wide)
        yield rearranged(self.weight.x, how, first)
        yield partial(torch.mm, self.taps, first, out=into.view(self.points, -1))

    def there(self, x: Tensor, matrix: Tensor, into: Tensor) -> Call:
        """Rows of pixels (H, C, W, N) taken to points (P, H, C, tiles, N)."""
        sizes = x.shape[2], self.tiles, matrix.shape[1], self.step, self.points, self.batch
        return prepared("to_points", x, matrix, into, len(x) * x.shape[1], *sizes)

    def here(self, points: Tensor, matrix: Tensor, into: Tensor) -> Call:
        """The way back, to (H, C, W, N)."""
        sizes = into.shape[2], self.tiles, len(matrix), self.step, self.points, self.batch
        return prepared("from_points", points, matrix, into, len(into) * into.shape[1], *sizes)


@cache
def matrices(pixels: int, taps: int) -> tuple[Tensor, Tensor, Tensor]:
    """What takes a tile's columns to points, and a kernel's; and what brings their products back.

    >>> columns, kernel = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1.0, 10.0, 100.0])
    >>> of_columns, of_kernel, back = matrices(pixels=2, taps=3)
    >>> (back @ ((of_columns @ columns) * (of_kernel @ kernel))).round().tolist()
    [321.0, 432.0]
    """
    points = pixels + taps - 1
    known = torch.linalg.inv(values(points, points)).t()
    both = known, values(points, taps), values(points, pixels).t()
    of_pixels, of_taps, back = (matrix.float().contiguous() for matrix in both)
    return of_pixels, of_taps, back


def values(points: int, size: int) -> Tensor:
    """The matrix from a polynomial's coefficients to its values at so many points."""
    finite = torch.tensor(POINTS[: points - 1], dtype=torch.float64)[:, None] ** torch.arange(size)
    return torch.cat([finite, torch.eye(size, dtype=torch.float64)[-1:]])


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor, y: Tensor, frame: tuple[int, int] = (0, 0)
) -> Call:
    """A convolution of x in a frame of zeros with weight (KH, KW, C, O)."""
    rows, channels, columns, batch = x.shape
    high, wide, _, out = weight.shape
    sizes = rows, columns, channels, high, wide, out
    return prepared("convolve", x, weight, bias, y, *sizes, *frame, batch)


def weight_gradient(of_y: Tensor, x: Tensor, into: Tensor) -> Call:
    """The gradient of a weight (O, C, KH, KW), added to what is there."""
    places, sizes = taps_and_sizes(x, of_y.shape, into.shape)
    return prepared("weight_gradient", of_y, x, places, into, *sizes)


def rearranged(x: Tensor, how: Callable[[Tensor], Tensor], into: Tensor) -> Call:
    """The copy of numbers to where a function would have them."""
    places = how(torch.arange(x.numel()).view_as(x)).flatten()
    return partial(torch.index_select, x.view(-1), 0, places, out=into.view(-1))
