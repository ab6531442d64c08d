"""The loss and gradient of a whole network as a recorded list of calls with fixed memory.

For a small network, autograd's bookkeeping takes half as long as the arithmetic. This module does
the bookkeeping once per batch size: it records which functions are called and on which memory.
Tensors are stored as (H, C, W, N), and the C kernels do most of the work. Only sequences of
supported layers can be recorded. Autograd runs all other networks.
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
from fedsift.engine.cpu.kernel_support import (
    MIN_BATCH,
    fusible_kind,
    is_supported_convolution,
    padding_of,
)
from fedsift.engine.cpu.native import prepared
from fedsift.engine.cpu.recorded_convolutions import (
    Call,
    DirectConvolution,
    PooledConvolution,
    Unsupported,
    Value,
    WinogradConvolution,
)
from fedsift.task import Loss, has_hooks
from fedsift.task.samples import Tree


@dataclass
class Stage:
    """A convolution or a linear layer, and whether a pool and a ReLU follow it.

    ``is_flat`` says whether the layer's input has been flattened.
    """

    layer: nn.Conv2d | nn.Linear
    is_flat: bool
    has_pool: bool = False
    has_relu: bool = False

    @property
    def is_linear(self) -> bool:
        """Whether the layer is linear, so that its input is features and not images."""
        return isinstance(self.layer, nn.Linear)

    def accepts(self, axes: int) -> bool:
        """Whether the network may take samples with this number of axes."""
        return self.is_flat or axes == 1 if self.is_linear else axes == 3 and not self.is_flat


def read_stages(model: nn.Module, loss: Loss) -> list[Stage]:
    """Return the stages of a network with bound gradients; none if it cannot be recorded."""
    parameters = list(model.parameters())
    is_plain = all(p.dtype == torch.float32 and p.is_cpu and p.grad is not None for p in parameters)
    if loss is not cross_entropy or not is_plain or any(map(has_hooks, model.modules())):
        return []
    stages = stages_of(model)
    used = sum(len(list(stage.layer.parameters())) for stage in stages)
    # The gradient of a parameter that is used twice would be a sum.
    return stages if used == len(parameters) and native.load() is not None else []


def stages_of(model: nn.Module) -> list[Stage]:
    """Return the stages of a sequence that ends in a linear layer; none for any other network.

    >>> layers = nn.Conv2d(1, 4, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(36, 10)
    >>> [(stage.has_pool, stage.has_relu) for stage in stages_of(nn.Sequential(*layers))]
    [(True, True), (False, False)]
    >>> stages_of(nn.Sequential(nn.Tanh(), *layers))
    []
    """
    stages: list[Stage] = []
    is_flat = False
    for layer in leaves(model):
        last = stages[-1] if stages else None
        kind = fusible_kind(layer)
        if type(layer) is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1):
            is_flat = True
        elif type(layer) is nn.Linear or (
            type(layer) is nn.Conv2d and is_supported_convolution(layer)
        ):
            stages.append(Stage(layer, is_flat))
        elif last and kind == "relu":
            last.has_relu = True
        elif last and kind == "pool" and not (is_flat or last.is_linear or last.has_pool):
            last.has_pool = True
        else:
            return []
    return stages if stages and stages[-1].is_linear else []


def leaves(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers of nested sequences in order."""
    if type(model) is not nn.Sequential:
        yield model
        return
    for part in model:
        yield from leaves(part)


class RecordedNetwork:
    """Computes the loss and gradient of batches of one size."""

    def __init__(self, stages: Sequence[Stage], shape: Sequence[int], batch: int) -> None:
        self.forward: list[Call] = []
        self.backward: list[Call] = []
        self.gather, self.cross_entropy = map(native.kernel, ("gather", "cross_entropy"))
        channels, rows, columns = (1, 1, math.prod(shape)) if stages[0].is_linear else shape
        self.all_rows = torch.arange(batch)
        self.images, self.loss = torch.empty(rows, channels, columns, batch), torch.empty(1)
        self.last = Value(self.images, torch.empty(0, batch))
        for stage in stages:
            self._add_stage(stage)

    def __call__(self, data: Tensor, labels: Tensor, rows: Tensor | None = None) -> float | None:
        """Set the gradient for some rows of the data, or all, and return the loss.

        Returns None if a label is not a class.
        """
        rows = self.all_rows if rows is None else rows
        self.gather(data, rows, self.images, *self.images.shape)
        for call in self.forward:
            call()
        y, y_gradient = self.last
        sizes = y.shape[1], y.shape[3]
        self.cross_entropy(y, labels, rows, y_gradient, self.loss, *sizes)
        if (loss := float(self.loss)) < 0:
            return None
        for call in self.backward:
            call()
        return loss

    def _record(self, forward: Iterable[Call], backward: Iterable[Call] = ()) -> None:
        """Append calls to the forward pass and insert calls before the recorded backward pass."""
        self.forward += forward
        self.backward[:0] = backward

    def _add_stage(self, stage: Stage) -> None:
        if isinstance(stage.layer, nn.Linear):
            self._add_flatten()
            self._add_linear(stage.layer)
        else:
            self._add_convolution(stage.layer, stage)
        if stage.has_relu and not stage.has_pool:
            y, y_gradient = self.last
            gradient = torch.ops.aten.threshold_backward.grad_input
            self._record([y.relu_], [partial(gradient, y_gradient, y, 0, grad_input=y_gradient)])

    def _add_flatten(self) -> None:
        """Go from (H, C, W, N) to PyTorch's order (C, H, W, N)."""
        x, x_gradient = self.last
        rows, channels, columns, batch = x.shape
        if rows > 1:
            self.last = flat = Value.empty(channels, rows, columns, batch)
            back = flat.gradient.transpose(0, 1)
            self._record(
                [partial(flat.x.copy_, x.transpose(0, 1))], [partial(x_gradient.copy_, back)]
            )

    def _add_linear(self, layer: nn.Linear) -> None:
        """Add a linear layer of all numbers of a sample."""
        batch = self.last.x.shape[3]
        if self.last.x.numel() != layer.in_features * batch:
            raise Unsupported
        x, x_gradient = (t.view(-1, batch) for t in self.last)
        self.last = Value.empty(1, layer.out_features, 1, batch)
        y, y_gradient = (t.view(-1, batch) for t in self.last)
        weight, bias = Value.of(layer.weight), Value.of(layer.bias, layer.out_features)
        backward = [
            partial(torch.sum, y_gradient, 1, out=bias.gradient),
            partial(torch.mm, y_gradient, x.t(), out=weight.gradient),
        ]
        if len(x_gradient):
            backward.append(partial(torch.mm, weight.x.t(), y_gradient, out=x_gradient))
        self._record([partial(torch.addmm, bias.x[:, None], weight.x, x, out=y)], backward)

    def _add_convolution(self, layer: nn.Conv2d, stage: Stage) -> None:
        """Add a convolution with the pool that follows it, and a ReLU after or before the pool."""
        x_gradient, x = self.last.gradient, self._padded(layer)
        if WinogradConvolution.is_faster(layer, x):
            convolution: DirectConvolution = WinogradConvolution(layer, x)
        elif stage.has_pool:
            convolution = PooledConvolution(layer, x, stage.has_relu)
        else:
            convolution = DirectConvolution(layer, x)
        self.last = y, y_gradient = Value.empty(*convolution.shape)
        self._record(convolution.forward(y), convolution.backward(y_gradient, x_gradient))
        if stage.has_pool and not isinstance(convolution, PooledConvolution):
            self._add_pool(stage.has_relu)

    def _add_pool(self, relu: bool) -> None:
        """Add a 2 × 2 max pool and optionally a ReLU."""
        x, x_gradient = self.last
        rows, channels, columns, batch = x.shape
        self.last = y, y_gradient = Value.empty(rows // 2, channels, columns // 2, batch)
        argmax = torch.empty(y.shape, dtype=torch.uint8)
        self._record(
            [prepared("max_pool", x, y, argmax, *x.shape, relu)],
            [prepared("max_pool_gradient", y_gradient, argmax, x_gradient, *x.shape)],
        )

    def _padded(self, layer: nn.Conv2d) -> Tensor:
        """Return the last output with the zeros that a convolution adds on each side."""
        x, (pad_rows, pad_columns) = self.last.x, padding_of(layer)
        if not (pad_rows or pad_columns):
            return x
        rows, channels, columns, batch = x.shape
        padded = torch.zeros(rows + 2 * pad_rows, channels, columns + 2 * pad_columns, batch)
        inside = padded[pad_rows : pad_rows + rows, :, pad_columns : pad_columns + columns]
        self._record([partial(inside.copy_, x)])
        return padded


def record(stages: Sequence[Stage], shape: Sequence[int], batch: int) -> RecordedNetwork | None:
    """Record a network for batches of samples of one shape; None if it is not supported."""
    if not stages or batch < MIN_BATCH or not all(stage.accepts(len(shape)) for stage in stages):
        return None
    try:
        return RecordedNetwork(stages, shape, batch)
    except Unsupported:
        return None


def has_recorded_format(data: Tree, labels: Tree) -> bool:
    """Whether data and labels have the memory format of a recorded network, one label per sample.

    >>> has_recorded_format(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64))
    True
    """
    if not (isinstance(data, Tensor) and isinstance(labels, Tensor)):
        return False
    is_plain = data.is_contiguous() and labels.is_contiguous() and labels.shape == data.shape[:1]
    is_on_cpu = data.is_cpu and labels.is_cpu
    return is_plain and is_on_cpu and (data.dtype, labels.dtype) == (torch.float32, torch.int64)
