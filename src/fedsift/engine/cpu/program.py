"""A whole network's loss and gradient as a list of calls, each with its memory.

For a small network, autograd's bookkeeping takes half as long as the arithmetic. This module does
the bookkeeping once per batch size: it records which functions are called, and on which memory.
Tensors are laid out as (H, C, W, N), as in :mod:`fedsift.engine.cpu.batchlast`, whose C functions
do most of the work. Only sequences of known layers can be recorded; autograd runs the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedsift.engine.cpu import native
from fedsift.engine.cpu.batchlast import LANES, frame_of, kind, suits
from fedsift.engine.cpu.convolutions import (
    Call,
    Convolution,
    HalvedConvolution,
    PointConvolution,
    Unfit,
    Value,
)
from fedsift.engine.cpu.native import prepared
from fedsift.task import Loss, has_hooks


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

    def do(self, forward: Iterable[Call], backward: Iterable[Call] = ()) -> None:
        """Calls after all others; and those for the gradient, which come before all others."""
        self.forward += forward
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
            self.do([y.relu_], [partial(gradient, of_y, y, 0, grad_input=of_y)])

    def flatten(self) -> None:
        """From (H, C, W, N) to the order that PyTorch has, (C, H, W, N)."""
        x, of_x = self.now
        rows, channels, columns, batch = x.shape
        if rows > 1:
            self.now = flat = Value.empty(channels, rows, columns, batch)
            back = flat.gradient.transpose(0, 1)
            self.do([partial(flat.x.copy_, x.transpose(0, 1))], [partial(of_x.copy_, back)])

    def multiply(self, layer: nn.Linear) -> None:
        """A linear layer of all numbers of a sample."""
        batch = self.now.x.shape[3]
        if self.now.x.numel() != layer.in_features * batch:
            raise Unfit
        x, of_x = (t.view(-1, batch) for t in self.now)
        self.now = Value.empty(1, layer.out_features, 1, batch)
        y, of_y = (t.view(-1, batch) for t in self.now)
        weight, bias = Value.of(layer.weight), Value.of(layer.bias, layer.out_features)
        of_parameters = (
            partial(torch.sum, of_y, 1, out=bias.gradient),
            partial(torch.mm, of_y, x.t(), out=weight.gradient),
        )
        back = [partial(torch.mm, weight.x.t(), of_y, out=of_x)] if len(of_x) else []
        start = bias.x[:, None]
        self.do([partial(torch.addmm, start, weight.x, x, out=y)], [*of_parameters, *back])

    def convolve(self, layer: nn.Conv2d, stage: Stage) -> None:
        """A convolution, with the pool and the ReLU that follow it."""
        of_x, x = self.now.gradient, self.framed(layer)
        if PointConvolution.suits(layer, x):
            work: Convolution = PointConvolution(layer, x)
        elif stage.halves:
            work = HalvedConvolution(layer, x, stage.rectifies)
        else:
            work = Convolution(layer, x)
        self.now = y, of_y = Value.empty(*work.shape)
        self.do(work.forward(y), work.backward(of_y, of_x))
        if stage.halves and not isinstance(work, HalvedConvolution):
            self.halve(stage.rectifies)

    def halve(self, rectifies: bool) -> None:
        """The largest of each four pixels, and maybe a ReLU."""
        x, of_x = self.now
        rows, channels, columns, batch = x.shape
        self.now = y, of_y = Value.empty(rows // 2, channels, columns // 2, batch)
        which = torch.empty(y.shape, dtype=torch.uint8)
        self.do(
            [prepared("halve", x, y, which, *x.shape, rectifies)],
            [prepared("halve_gradient", of_y, which, of_x, *x.shape)],
        )

    def framed(self, layer: nn.Conv2d) -> Tensor:
        """What there is, in the frame of zeros that a convolution asks for."""
        x, (down, across) = self.now.x, frame_of(layer)
        if not (down or across):
            return x
        rows, channels, columns, batch = x.shape
        framed = torch.zeros(rows + 2 * down, channels, columns + 2 * across, batch)
        inside = framed[down : down + rows, :, across : across + columns]
        self.do([partial(inside.copy_, x)])
        return framed


def program_of(stages: Sequence[Stage], shape: Sequence[int], batch: int) -> Program | None:
    """The program for batches of samples of some shape, if there can be one."""
    if not stages or batch < LANES or not all(stage.takes(len(shape)) for stage in stages):
        return None
    try:
        return Program(stages, shape, batch)
    except Unfit:
        return None


def takes(data: Tensor, labels: Tensor) -> bool:
    """Whether data and labels lie in memory as a program reads them, with a label per sample."""
    is_plain = data.is_contiguous() and labels.is_contiguous() and labels.shape == data.shape[:1]
    on_cpu = data.is_cpu and labels.is_cpu
    return is_plain and on_cpu and (data.dtype, labels.dtype) == (torch.float32, torch.int64)
