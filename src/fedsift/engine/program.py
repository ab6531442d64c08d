"""A whole network's loss and gradient as a list of calls, each with its memory.

Autograd takes half as long to follow a small network as the network takes to compute. So what it
would find out in every step is laid down once for a size of batch: which functions are called, and
on which memory. Tensors lie there as (H, C, W, N), as :mod:`fedsift.engine.batchlast` has them, and
its C functions do most of the work. Only sequences of layers that are known here can be laid down;
any other network is autograd's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedsift.engine import native
from fedsift.engine.batchlast import LANES, between, frame_of, kind, suits, taps
from fedsift.engine.native import prepared
from fedsift.engine.task import Loss, has_hooks

Call = Callable[[], object]


@dataclass
class Stage:
    """A convolution or a linear layer, and what follows it."""

    layer: nn.Conv2d | nn.Linear
    is_flat: bool
    halves: bool = False
    rectifies: bool = False

    @property
    def is_linear(self) -> bool:
        """Whether it takes features, and not images."""
        return isinstance(self.layer, nn.Linear)

    def takes(self, axes: int) -> bool:
        """Whether it can be given what comes of samples with so many axes."""
        return self.is_flat or axes == 1 if self.is_linear else axes == 3 and not self.is_flat


def stages_of(model: nn.Module, loss: Loss) -> list[Stage]:
    """The stages of a network whose parameters have their gradients; none if it is not known."""
    own = list(model.parameters())
    is_plain = all(p.dtype == torch.float32 and p.is_cpu and p.grad is not None for p in own)
    if loss is not cross_entropy or not is_plain or any(map(has_hooks, model.modules())):
        return []
    stages = read(model)
    used = sum(len(list(stage.layer.parameters())) for stage in stages)
    # The gradient of a parameter that is used twice would be a sum.
    return stages if used == len(own) and native.load() is not None else []


def read(model: nn.Module) -> list[Stage]:
    """The stages of a sequence that ends in a linear layer; none of any other network.

    >>> layers = nn.Conv2d(1, 4, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(36, 10)
    >>> [(stage.halves, stage.rectifies) for stage in read(nn.Sequential(*layers))]
    [(True, True), (False, False)]
    >>> read(nn.Sequential(nn.Tanh(), *layers))
    []
    """
    stages: list[Stage] = []
    is_flat = False
    for layer in leaves(model):
        last = stages[-1] if stages else None
        if type(layer) is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1):
            is_flat = True
        elif type(layer) is nn.Linear or (type(layer) is nn.Conv2d and suits(layer)):
            stages.append(Stage(layer, is_flat))
        elif last and kind(layer) == "relu":
            last.rectifies = True
        elif last and kind(layer) == "pool" and not (is_flat or last.is_linear or last.halves):
            last.halves = True
        else:
            return []
    return stages if stages and stages[-1].is_linear else []


def leaves(model: nn.Module) -> Iterator[nn.Module]:
    """The layers of a sequence, in their order."""
    if type(model) is not nn.Sequential:
        yield model
        return
    for part in model:
        yield from leaves(part)


class Value(NamedTuple):
    """Numbers, and the loss's gradient with respect to them; that of data is left empty."""

    x: Tensor
    gradient: Tensor

    @classmethod
    def empty(cls, *shape: int) -> Value:
        """Memory for both."""
        return cls(torch.empty(shape), torch.empty(shape))

    @classmethod
    def of(cls, parameter: Tensor | None, size: int) -> Value:
        """A parameter; zeros for a bias that a layer does not have."""
        if parameter is None:
            return cls(torch.zeros(size), torch.empty(size))
        assert parameter.grad is not None
        return cls(parameter.detach(), parameter.grad)


class Unfit(Exception):
    """A layer cannot take what it is given: autograd will say why."""


class Program:
    """What computes the loss and the gradient of batches of one size."""

    def __init__(self, stages: Sequence[Stage], shape: Sequence[int], batch: int) -> None:
        self.forward: list[Call] = []
        self.backward: list[Call] = []
        channels, rows, columns = (1, 1, math.prod(shape)) if stages[0].is_linear else shape
        self.images, self.loss = torch.empty(rows, channels, columns, batch), torch.empty(1)
        self.now = Value(self.images, torch.empty(0, batch))
        for stage in stages:
            self.add(stage)

    def __call__(self, data: Tensor, labels: Tensor, rows: Tensor) -> float | None:
        """Set the gradient to that of some rows, and give the loss; None if a label is no class."""
        native.kernel("gather")(data, rows, self.images, *self.images.shape)
        for call in self.forward:
            call()
        y, of_y = self.now
        sizes = y.shape[1], y.shape[3]
        native.kernel("cross_entropy")(y, labels, rows, of_y, self.loss, *sizes)
        if (loss := float(self.loss)) < 0:
            return None
        for call in self.backward:
            call()
        return loss

    def do(self, forward: Call, *backward: Call) -> None:
        """One call more, after all others; those for its gradient come before all others."""
        self.forward.append(forward)
        self.backward[:0] = backward

    def add(self, stage: Stage) -> None:
        """One stage more."""
        if isinstance(stage.layer, nn.Linear):
            self.flatten()
            self.multiply(stage.layer)
        else:
            self.convolve(stage.layer, stage)
        if stage.rectifies and not stage.halves:
            y, of_y = self.now
            gradient = torch.ops.aten.threshold_backward.grad_input
            self.do(y.relu_, partial(gradient, of_y, y, 0, grad_input=of_y))

    def flatten(self) -> None:
        """From (H, C, W, N) to the order that PyTorch has, (C, H, W, N)."""
        x, of_x = self.now
        rows, channels, columns, batch = x.shape
        if rows > 1:
            self.now = flat = Value.empty(channels, rows, columns, batch)
            back = flat.gradient.transpose(0, 1)
            self.do(partial(flat.x.copy_, x.transpose(0, 1)), partial(of_x.copy_, back))

    def multiply(self, layer: nn.Linear) -> None:
        """A linear layer of all numbers of a sample."""
        batch = self.now.x.shape[3]
        if self.now.x.numel() != layer.in_features * batch:
            raise Unfit
        x, of_x = (t.view(-1, batch) for t in self.now)
        self.now = Value.empty(1, layer.out_features, 1, batch)
        y, of_y = (t.view(-1, batch) for t in self.now)
        weight, bias = Value.of(layer.weight, 0), Value.of(layer.bias, layer.out_features)
        self.do(
            partial(torch.addmm, bias.x[:, None], weight.x, x, out=y),
            partial(torch.sum, of_y, 1, out=bias.gradient),
            partial(torch.mm, of_y, x.t(), out=weight.gradient),
            *([partial(torch.mm, weight.x.t(), of_y, out=of_x)] if len(of_x) else []),
        )

    def convolve(self, layer: nn.Conv2d, stage: Stage) -> None:
        """A convolution, with the pool and the ReLU that follow it."""
        of_x, work = self.now.gradient, Convolution(layer, self.framed(layer))
        self.do(work.order())
        rows, out, columns, batch = work.shape
        if stage.halves:
            self.now = Value.empty(rows // 2, out, columns // 2, batch)
            self.do(*work.halved(self.now, of_x, stage.rectifies))
        else:
            self.now = Value.empty(*work.shape)
            self.do(*work.plain(self.now, of_x))

    def framed(self, layer: nn.Conv2d) -> Tensor:
        """What there is, in the frame of zeros that a convolution asks for."""
        x, (down, across) = self.now.x, frame_of(layer)
        if not (down or across):
            return x
        rows, channels, columns, batch = x.shape
        framed = torch.zeros(rows + 2 * down, channels, columns + 2 * across, batch)
        inside = framed[down : down + rows, :, across : across + columns]
        self.do(partial(inside.copy_, x))
        return framed


class Convolution:
    """The calls for a convolution of x (H, C, W, N), which is in its frame of zeros already."""

    def __init__(self, layer: nn.Conv2d, x: Tensor) -> None:
        rows, channels, columns, batch = x.shape
        self.weight, self.bias = (
            Value.of(p, len(layer.weight)) for p in (layer.weight, layer.bias)
        )
        out, wanted, high, wide = self.weight.x.shape
        down, across = frame_of(layer)
        if channels != wanted or rows < high or columns < wide or down >= high or across >= wide:
            raise Unfit
        self.x, self.batch, self.back = x, batch, (high - 1 - down, wide - 1 - across)
        self.sizes = rows, columns, channels, high, wide, out
        self.shape = rows - high + 1, out, columns - wide + 1, batch
        self.ordered = torch.empty(high, wide, channels, out)

    def order(self) -> Call:
        """The weight (KH, KW, C, O), as the C functions want it."""
        return rearranged(self.weight.x, lambda weight: weight.permute(2, 3, 1, 0), self.ordered)

    def plain(self, y: Value, of_x: Tensor) -> Iterator[Call]:
        """The convolution; then the calls for its gradient."""
        memory = self.x, self.ordered, self.bias.x, y.x
        yield prepared("convolve", *memory, *self.sizes, 0, 0, self.batch)
        yield partial(torch.sum, y.gradient, (0, 2, 3), out=self.bias.gradient)
        yield from self.gradients(y.gradient, of_x)

    def halved(self, y: Value, of_x: Tensor, rectifies: bool) -> Iterator[Call]:
        """The convolution with the largest of each four pixels; then the calls for its gradient."""
        which = torch.empty(y.x.shape, dtype=torch.uint8)
        memory = self.x, self.ordered, self.bias.x, between(self.shape), y.x, which
        yield prepared("convolve_halve", *memory, *self.sizes, self.batch, rectifies)
        yield prepared("bias_gradient", y.gradient, which, self.bias.gradient, *y.x.shape)
        if len(of_x):
            spread = torch.zeros(self.shape)
            yield prepared("halve_gradient", y.gradient, which, spread, *self.shape)
            yield from self.gradients(spread, of_x)
        else:
            places = self.x, self.taps, between(self.shape), self.weight.gradient
            yield self.weight.gradient.zero_
            yield prepared("halve_weight_gradient", y.gradient, which, *places, *self.tap_sizes)

    def gradients(self, of_y: Tensor, of_x: Tensor) -> Iterator[Call]:
        """Those of the weight and, where it is wanted, of x."""
        memory = self.x, self.taps, self.weight.gradient
        yield self.weight.gradient.zero_
        yield prepared("weight_gradient", of_y, *memory, *self.tap_sizes)
        if len(of_x):
            _, _, channels, high, wide, out = self.sizes
            turned, zeros = torch.empty(high, wide, out, channels), torch.zeros(channels)
            sizes = self.shape[0], self.shape[2], out, high, wide, channels
            yield rearranged(self.weight.x, lambda w: w.flip(2, 3).permute(2, 3, 0, 1), turned)
            yield prepared("convolve", of_y, turned, zeros, of_x, *sizes, *self.back, self.batch)

    @property
    def taps(self) -> Tensor:
        """Where in x each weight finds its first pixel."""
        return taps(self.weight.x.shape[1:], self.x.shape[2], self.batch)

    @property
    def tap_sizes(self) -> tuple[int, ...]:
        """What the gradient of the weight wants to know."""
        rows, out, columns, batch = self.shape
        return len(self.taps), rows, columns, math.prod(self.x.shape[1:]), out, batch


def rearranged(x: Tensor, how: Callable[[Tensor], Tensor], into: Tensor) -> Call:
    """The call that copies numbers to where a function would have them."""
    places = how(torch.arange(x.numel()).view_as(x)).flatten()
    return partial(torch.index_select, x.view(-1), 0, places, out=into.view(-1))


def program_of(stages: Sequence[Stage], shape: Sequence[int], batch: int) -> Program | None:
    """The program for batches of samples of some shape, if there can be one."""
    if not stages or batch < LANES or not all(stage.takes(len(shape)) for stage in stages):
        return None
    try:
        return Program(stages, shape, batch)
    except Unfit:
        return None


def takes(data: Tensor, labels: Tensor) -> bool:
    """Whether data and labels lie in memory as a program reads them."""
    is_plain = data.is_contiguous() and labels.is_contiguous() and labels.dim() == 1
    return is_plain and data.dtype == torch.float32 and labels.dtype == torch.int64
