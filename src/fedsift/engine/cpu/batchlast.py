"""Convolution and pooling with the batch as the innermost axis of memory.

A convolution of 1 or 10 channels leaves most of a vector register empty when the channels lie side
by side in memory, and pooling does when the pixels do. The samples of a batch always fill it. So
tensors keep their shape (N, C, H, W) but lie in memory as (H, C, W, N); other layers take them as
they are. The work itself is done in C (``batchlast.c``).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import once_differentiable

from fedsift.engine.cpu import native
from fedsift.task import has_hooks

LANES = 16
"""Samples from which on the batch fills a vector register of every processor."""
WIDE = 64
"""Channels up to which this is faster than PyTorch's convolutions."""


def batch_last(model: nn.Module) -> bool:
    """Let a model compute with the batch innermost, if that is faster; tell whether it does.

    >>> batch_last(nn.Sequential(nn.Conv2d(1, 512, 5), nn.MaxPool2d(2)))
    False
    """
    layers = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    sequences = [module for module in model.modules() if type(module) is nn.Sequential]
    in_sequence = Counter(layer for sequence in sequences for layer in sequence)
    # Elsewhere there may be a pool that is no layer, and slow in this order of memory; and what
    # follows a convolution must be the same wherever it is used.
    if not layers or not all(in_sequence[layer] == 1 and suits(layer) for layer in layers):
        return False
    if any(map(has_hooks, model.modules())) or native.load() is None:
        return False
    if calls_only_whole(model, sequences):
        for sequence in sequences:
            join_pools(sequence)
    for module in model.modules():
        if type(module) is nn.Conv2d:
            module.__class__ = BatchLastConv2d
        elif kind(module) == "pool":
            module.__class__ = BatchLastMaxPool2d
    return True


def calls_only_whole(model: nn.Module, sequences: Sequence[nn.Sequential]) -> bool:
    """Whether only the sequences themselves call their layers, as far as it can be told.

    >>> layers = nn.Sequential(nn.Conv2d(1, 1, 3), nn.MaxPool2d(2))
    >>> calls_only_whole(layers, [layers])
    True
    """
    tracer = Callers(model)
    try:
        tracer.trace(model)
    except Exception:  # a model may do anything in its forward pass
        return False
    homes = {layer: [s for s in sequences if layer in set(s)] for s in sequences for layer in s}
    return all(caller in homes.get(layer, [caller]) for caller, layer in tracer.calls)


class Callers(fx.Tracer):
    """Follows a model's forward pass, and notes which module calls which."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inside = [model]
        self.calls: list[tuple[nn.Module, nn.Module]] = []

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Note the call, and follow it."""
        self.calls.append((self.inside[-1], m))
        self.inside.append(m)
        try:
            return super().call_module(m, forward, args, kwargs)
        finally:
            self.inside.pop()


def join_pools(sequence: nn.Sequential) -> None:
    """Let each convolution do the work of a pool, and of a ReLU beside that, that follow it."""
    layers = list(sequence)
    for number, layer in enumerate(layers):
        after = layers[number + 1 : number + 3]
        match [kind(follower) for follower in after]:
            case ["pool", "relu"] | ["relu", "pool"]:
                joined = after
            case ["pool", *_]:
                joined = after[:1]
            case _:
                continue
        if type(layer) is nn.Conv2d:
            layer.__class__ = BatchLastConvPool2d
            setattr(layer, "rectifies", len(joined) == 2)  # noqa: B010, its class is new
            for place in range(number + 1, number + 1 + len(joined)):
                sequence[place] = nn.Identity()  # only here: a ReLU may have more places


def kind(layer: nn.Module) -> str:
    """What a convolution can do of a layer's work."""
    if type(layer) is nn.MaxPool2d and is_halving(layer):
        return "pool"
    return "relu" if type(layer) is nn.ReLU else ""


def suits(layer: nn.Conv2d) -> bool:
    """Whether a convolution is of the kind that is computed here."""
    return (
        type(layer) is nn.Conv2d
        and layer.weight.dtype == torch.float32
        and layer.weight.is_cpu
        and max(layer.in_channels, layer.out_channels) <= WIDE
        and layer.stride == layer.dilation == (1, 1)
        and layer.groups == 1
        and layer.padding_mode == "zeros"
        and not isinstance(layer.padding, str)
    )


def is_halving(layer: nn.MaxPool2d) -> bool:
    """Whether a pool takes each square of four pixels to one."""
    options = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
    return options == (2, 2, 0, 1) and not layer.ceil_mode and not layer.return_indices


def fits(x: Tensor) -> bool:
    """Whether the C functions take tensors of this type and batch size."""
    return x.dim() == 4 and len(x) >= LANES and x.dtype == torch.float32 and x.is_cpu


def fits_layer(layer: nn.Conv2d, x: Tensor, smallest: int = 1) -> bool:
    """Whether the C functions can convolve x to at least ``smallest`` pixels on each side.

    They check no bounds. Any other input is left to PyTorch, which computes it or raises the error.

    >>> layer = nn.Conv2d(1, 2, 3)
    >>> fits_layer(layer, torch.ones(16, 1, 3, 3)), fits_layer(layer, torch.ones(16, 3, 3, 3))
    (True, False)
    """
    if not fits(x) or x.shape[1] != layer.in_channels:
        return False
    axes = zip(x.shape[2:], frame_of(layer), layer.kernel_size, strict=True)
    return all(size + 2 * frame - kernel + 1 >= smallest for size, frame, kernel in axes)


class BatchLastConv2d(nn.Conv2d):
    """A convolution whose result has the batch innermost."""

    def forward(self, x: Tensor) -> Tensor:
        """The convolution of x (N, C, H, W)."""
        if not fits_layer(self, x):
            return super().forward(x)
        return from_rows(apply(Convolution, to_rows(padded(self, x)), self.weight, self.bias))


class BatchLastConvPool2d(nn.Conv2d):
    """A convolution, the largest of each four of its pixels, and maybe a ReLU."""

    rectifies: bool

    def forward(self, x: Tensor) -> Tensor:
        """The pooled convolution of x (N, C, H, W)."""
        if not fits_layer(self, x, smallest=2):
            y = nn.functional.max_pool2d(super().forward(x), 2)
            return y.relu() if self.rectifies else y
        rows = to_rows(padded(self, x))
        return from_rows(apply(ConvolutionHalving, rows, self.weight, self.bias, self.rectifies))


class BatchLastMaxPool2d(nn.MaxPool2d):
    """The largest of each four pixels, of tensors that have the batch innermost."""

    def forward(self, x: Tensor) -> Tensor:
        """The pooled x (N, C, H, W)."""
        if not fits(x) or min(x.shape[2:]) < 2 or not to_rows(x).is_contiguous():
            pooled: Tensor = super().forward(x)
            return pooled
        return from_rows(apply(Halving, to_rows(x)))


def frame_of(layer: nn.Conv2d) -> tuple[int, int]:
    """Rows and columns of zeros that a layer asks for on each side."""
    assert not isinstance(layer.padding, str)
    down, across = layer.padding
    return down, across


def padded(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """X in the frame of zeros that a layer asks for."""
    down, across = frame_of(layer)
    return nn.functional.pad(x, (across, across, down, down)) if down or across else x


def to_rows(x: Tensor) -> Tensor:
    """(N, C, H, W) seen as (H, C, W, N)."""
    return x.permute(2, 1, 3, 0)


def from_rows(x: Tensor) -> Tensor:
    """(H, C, W, N) seen as (N, C, H, W)."""
    return x.permute(3, 1, 0, 2)


def apply(function: type[torch.autograd.Function], *inputs: Tensor | bool | None) -> Tensor:
    """A function that knows its own gradient."""
    y: Tensor = function.apply(*inputs)  # type: ignore[no-untyped-call]
    return y


class Convolution(torch.autograd.Function):
    """The sum over kernel rows i and columns j of weight[:, :, i, j] times the x there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """From x (H, C, W, N) and weight (O, C, KH, KW) to (H', O, W', N)."""
        x = x.contiguous()
        ctx.save_for_backward(x, weight)
        return convolved(x, weight.permute(2, 3, 1, 0), bias, padding=(0, 0))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of x, weight and bias."""
        x, weight = ctx.saved_tensors
        g = gradient.contiguous()
        of_x = gradient_of_x(g, weight) if ctx.needs_input_grad[0] else None
        of_bias = g.sum((0, 2, 3)) if ctx.needs_input_grad[2] else None
        return of_x, gradient_of_weight(g, x, weight.shape), of_bias


def convolved(x: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, int]) -> Tensor:
    """X (H, C, W, N), framed with zeros, convolved with weight (KH, KW, C, O)."""
    rows, channels, columns, batch = x.shape
    high, wide, _, out = weight.shape
    down, across = padding
    shape = rows + 2 * down - high + 1, out, columns + 2 * across - wide + 1, batch
    y = x.new_empty(shape)
    start = x.new_zeros(out) if bias is None else bias.contiguous()
    sizes = (rows, columns, channels, high, wide, out, down, across, batch)
    native.kernel("convolve")(x, weight.contiguous(), start, y, *sizes)
    return y


def gradient_of_x(g: Tensor, weight: Tensor) -> Tensor:
    """Every output's gradient, handed back to the pixels that it came from."""
    high, wide = weight.shape[2:]
    turned = weight.flip(2, 3).permute(2, 3, 0, 1)
    return convolved(g, turned, None, padding=(high - 1, wide - 1))


def gradient_of_weight(g: Tensor, x: Tensor, shape: torch.Size) -> Tensor:
    """Every tap's product with the pixels that it met."""
    of_weight = g.new_zeros(shape)
    places, sizes = taps_and_sizes(x, g.shape, shape)
    native.kernel("weight_gradient")(g, x, places, of_weight, *sizes)
    return of_weight


def taps_and_sizes(
    x: Tensor, shape: Sequence[int], weight: torch.Size
) -> tuple[Tensor, tuple[int, ...]]:
    """What the gradient of a weight wants to know of x, and of y by its shape."""
    rows, out, columns, batch = shape
    places = taps(weight[1:], x.shape[2], batch)
    return places, (len(places), rows, columns, math.prod(x.shape[1:]), out, batch)


@cache
def taps(kernel: torch.Size, columns: int, batch: int) -> Tensor:
    """Where each weight's (channel, row, column) first pixel lies in memory.

    >>> taps(torch.Size([1, 2, 2]), columns=10, batch=3).tolist()
    [0, 3, 30, 33]
    """
    channels, high, wide = (torch.arange(size) for size in kernel)
    planes = high[None, :, None] * len(channels) + channels[:, None, None]
    return (planes * columns + wide).flatten() * batch


class ConvolutionHalving(torch.autograd.Function):
    """A convolution and the largest of each four of its pixels, negative ones made 0 if asked."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, rectify: bool) -> Tensor:
        """From x (H, C, W, N) and weight (O, C, KH, KW) to (H'/2, O, W'/2, N)."""
        x = x.contiguous()
        rows, channels, columns, batch = x.shape
        out, _, high, wide = weight.shape
        ctx.shape = rows - high + 1, out, columns - wide + 1, batch
        y = x.new_empty(ctx.shape[0] // 2, out, ctx.shape[2] // 2, batch)
        which = torch.empty(y.shape, dtype=torch.uint8)
        start = x.new_zeros(out) if bias is None else bias.contiguous()
        sizes = (rows, columns, channels, high, wide, out, batch, rectify)
        native.kernel("convolve_halve")(
            x, weight.permute(2, 3, 1, 0).contiguous(), start, between(ctx.shape), y, which, *sizes
        )
        ctx.save_for_backward(x, weight, which)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of x, weight and bias."""
        x, weight, which = ctx.saved_tensors
        g = gradient.contiguous()
        of_bias = gradient_of_bias(g, which) if ctx.needs_input_grad[2] else None
        if ctx.needs_input_grad[0]:
            spread = gradient_of_larger(g, which, ctx.shape)
            of_weight = gradient_of_weight(spread, x, weight.shape)
            return gradient_of_x(spread, weight), of_weight, of_bias, None
        of_weight = torch.zeros_like(weight)
        places, sizes = taps_and_sizes(x, ctx.shape, weight.shape)
        native.kernel("halve_weight_gradient")(
            g, which, x, places, between(ctx.shape), of_weight, *sizes
        )
        return None, of_weight, of_bias, None


def between(shape: tuple[int, ...]) -> Tensor:
    """Two rows of the convolution, which are pooled at once; an odd last column is 0."""
    return torch.zeros(2, *shape[1:]) if shape[2] % 2 else torch.empty(2, *shape[1:])


def gradient_of_bias(g: Tensor, which: Tensor) -> Tensor:
    """The sum of the gradients that go on to a pixel."""
    of_bias = g.new_empty(g.shape[1])
    native.kernel("bias_gradient")(g, which, of_bias, *g.shape)
    return of_bias


class Halving(torch.autograd.Function):
    """The largest of four pixels; where some are equal, the gradient goes to the first of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """From (H, C, W, N) to (H/2, C, W/2, N)."""
        rows, channels, columns, batch = ctx.shape = x.shape
        y = x.new_empty(rows // 2, channels, columns // 2, batch)
        ctx.which = torch.empty(y.shape, dtype=torch.uint8)
        native.kernel("halve")(x, y, ctx.which, *x.shape, False)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """The gradient of x."""
        return gradient_of_larger(gradient.contiguous(), ctx.which, ctx.shape)


def gradient_of_larger(g: Tensor, which: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Each number handed back to the pixel that was the largest."""
    is_even = shape[0] % 2 == shape[2] % 2 == 0
    x = g.new_empty(shape) if is_even else g.new_zeros(shape)
    native.kernel("halve_gradient")(g, which, x, *shape)
    return x
