"""A model made of known layers, computed for all clients of a stack at once.

The model is traced once into a graph of calls. Each layer is then replaced by its counterpart in
:mod:`fedsift.engine.gpu.layers`, and a ReLU is computed by the layer before it where possible.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from fedsift.engine.gpu.batch_norm import RunningStatistics, StackedBatchNorm, moments
from fedsift.engine.gpu.layers import (
    StackedConvolution,
    StackedGroupNorm,
    StackedMaxPool,
    Window,
)
from fedsift.engine.gpu.unsupported import UnsupportedModel, reason_of
from fedsift.engine.gpu.weight import Weight
from fedsift.task import has_hooks
from fedsift.vector import Layout


class StackedNetwork:
    """The layers of a model in order, for a stack of clients.

    Raises :class:`UnsupportedModel` for a model with other layers than those listed in LAYERS.
    """

    def __init__(
        self, model: nn.Module, layout: Layout, precision: str, is_frozen: bool = False
    ) -> None:
        self.layout, self.precision, self.is_frozen = layout, precision, is_frozen
        if any(map(has_hooks, model.modules())):
            raise UnsupportedModel("it has hooks")
        try:
            self.traced = fx.symbolic_trace(model)
        except Exception as problem:  # a forward pass may raise anything
            raise UnsupportedModel(reason_of(problem)) from None
        self.modules = dict(self.traced.named_modules())
        nodes = self.traced.graph.nodes
        self.with_relu = {node.args[0] for node in nodes if self._is_fusible_relu(node)}
        self._check()

    def __call__(
        self,
        x: Tensor,
        weights: Mapping[str, Weight],
        buffers: Mapping[str, Tensor] | None = None,
        is_training: bool = True,
    ) -> Tensor:
        """Return the model's output ``(clients, batch, ...)``; in training, overwrite buffers."""
        anchor = torch.empty((), device=x.device, requires_grad=True)
        given = Given(weights, buffers or {}, is_training, anchor)
        values: dict[fx.Node, Any] = {}
        for node in self.traced.graph.nodes:
            inputs = [values[arg] if isinstance(arg, fx.Node) else arg for arg in node.args]
            if node.op == "placeholder":
                values[node] = x
            elif node.op == "output" or (self._is_relu(node) and node.args[0] in self.with_relu):
                values[node] = inputs[0]  # the layer before it has already applied the ReLU
            elif node.op == "call_module":
                call = LayerCall(self, str(node.target), given, node in self.with_relu)
                values[node] = call(*inputs)
            else:
                values[node] = FUNCTIONS[node.target](*inputs)
            for source in node.all_input_nodes:
                if next(reversed(source.users)) is node:
                    del values[source]  # this was its last use
        output: Tensor = values[node]
        return output

    def _check(self) -> None:
        """Raise UnsupportedModel for everything that can be seen without data."""
        used: list[str] = []
        for node in self.traced.graph.nodes:
            if node.kwargs.keys() - {"inplace"}:
                raise UnsupportedModel(f"operation {node.target} with {', '.join(node.kwargs)}")
            if self._is_relu(node) and self._overwrites_shared_input(node):
                raise UnsupportedModel(
                    "an in-place ReLU overwrites a tensor that is used elsewhere"
                )
            if node.op == "output" and not isinstance(node.args[0], fx.Node):
                raise UnsupportedModel("it has several outputs")
            if node.op == "call_module":
                module = self.modules[str(node.target)]
                used += [f"{node.target}.{name}" for name, _ in module.named_parameters()]
                if type(module) not in LAYERS:
                    raise UnsupportedModel(f"layer {type(module).__name__}")
            elif node.op not in ("placeholder", "output") and node.target not in FUNCTIONS:
                raise UnsupportedModel(f"operation {node.target}")
        if len(set(used)) < len(used) or not set(used) <= set(self.layout.names):
            raise UnsupportedModel("it shares or freezes parameters")

    def _overwrites_shared_input(self, node: fx.Node) -> bool:
        """Whether a ReLU changes, in place, a tensor with other uses."""
        module = self.modules.get(str(node.target))
        is_inplace = node.kwargs.get("inplace") or getattr(module, "inplace", False)
        return bool(is_inplace) and len(node.all_input_nodes[0].users) > 1

    def _is_relu(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return type(self.modules[str(node.target)]) is nn.ReLU
        return node.op == "call_function" and FUNCTIONS.get(node.target) is torch.relu

    def _is_fusible_relu(self, node: fx.Node) -> bool:
        """Whether a node is a ReLU that the layer before it can apply."""
        if not self._is_relu(node):
            return False
        before = node.args[0]
        if not isinstance(before, fx.Node) or before.op != "call_module" or len(before.users) > 1:
            return False
        return type(self.modules[str(before.target)]) in LAYERS_WITH_RELU


@dataclass(frozen=True)
class Given:
    """What a call of a network is given besides its input, and the anchor of its gradients."""

    weights: Mapping[str, Weight]
    buffers: Mapping[str, Tensor]
    is_training: bool
    anchor: Tensor


@dataclass(frozen=True)
class LayerCall:
    """One use of a layer: its name, what the network was given, and whether to apply a ReLU."""

    network: StackedNetwork
    name: str
    given: Given
    relu: bool

    def __call__(self, x: Tensor) -> Tensor:
        """Return the layer's output."""
        module = self.network.modules[self.name]
        return LAYERS[type(module)](self, module, x)

    def weight(self, name: str) -> Weight:
        """Return a parameter of the layer."""
        return self.given.weights[self.path(name)]

    def buffer(self, layer: nn.Module, name: str) -> Tensor:
        """Return a buffer of the layer ``(clients, ...)``, or its own for all clients."""
        found = self.given.buffers.get(self.path(name))
        return layer.get_buffer(name)[None] if found is None else found

    def path(self, name: str) -> str:
        """Return the full name of one of the layer's tensors."""
        return f"{self.name}.{name}" if self.name else name

    @property
    def anchor(self) -> Tensor:
        """The tensor that keeps the layer in the graph of gradients."""
        return self.given.anchor


def convolution(call: LayerCall, layer: nn.Conv2d, x: Tensor) -> Tensor:
    """A convolution with a square window."""
    sides, strides, paddings = set(layer.kernel_size), set(layer.stride), set(layer.padding)
    is_plain = layer.groups == 1 and set(layer.dilation) == {1} and layer.padding_mode == "zeros"
    is_square = len(sides) == len(strides) == len(paddings) == 1
    is_valid = x.dim() == 5 and x.shape[-1] == layer.in_channels
    if not (is_plain and is_square and is_valid and not isinstance(layer.padding, str)):
        raise UnsupportedModel(f"convolution {layer}")
    window = Window(layer.kernel_size[0], layer.stride[0], int(layer.padding[0]))
    return _convolve(call, layer, x, window)


def linear(call: LayerCall, layer: nn.Linear, x: Tensor) -> Tensor:
    """A linear layer, computed as a convolution of images of one pixel."""
    if x.dim() != 3 or x.shape[-1] != layer.in_features:
        raise UnsupportedModel("a linear layer on images, or on the wrong number of features")
    return _convolve(call, layer, x[:, :, None, None], Window()).flatten(2)


def _convolve(call: LayerCall, layer: nn.Conv2d | nn.Linear, x: Tensor, window: Window) -> Tensor:
    bias = None if layer.bias is None else call.weight("bias")
    weight, precision = call.weight("weight"), call.network.precision
    y: Tensor = StackedConvolution.apply(  # type: ignore[no-untyped-call]
        call.anchor, x.contiguous(), weight, bias, window, call.relu, precision
    )
    return y


def max_pool(call: LayerCall, layer: nn.MaxPool2d, x: Tensor) -> Tensor:
    """Max pooling over windows that do not overlap."""
    side, is_plain = layer.kernel_size, not (layer.padding or layer.ceil_mode)
    if not (isinstance(side, int) and layer.stride == side and is_plain and layer.dilation == 1):
        raise UnsupportedModel(f"pooling {layer}")
    y: Tensor = StackedMaxPool.apply(x.contiguous(), side, call.relu)  # type: ignore[no-untyped-call]
    return y


def group_norm(call: LayerCall, layer: nn.GroupNorm, x: Tensor) -> Tensor:
    """Group normalization of images."""
    channels = layer.num_channels
    if not layer.affine or x.dim() != 5 or x.shape[-1] != channels or channels & (channels - 1):
        raise UnsupportedModel(f"normalization {layer}")
    scale, bias = call.weight("weight"), call.weight("bias")
    y: Tensor = StackedGroupNorm.apply(  # type: ignore[no-untyped-call]
        call.anchor, x.contiguous(), scale, bias, layer.num_groups, layer.eps, call.relu
    )
    return y


def batch_norm(call: LayerCall, layer: nn.BatchNorm1d | nn.BatchNorm2d, x: Tensor) -> Tensor:
    """Batch normalization, with the statistics of each client's own batch while training."""
    axes, channels = (5 if isinstance(layer, nn.BatchNorm2d) else 3), layer.num_features
    if x.dim() != axes or x.shape[-1] != channels:
        raise UnsupportedModel(f"normalization {layer}")
    rows = x.flatten(1, -2).contiguous()
    running = running_statistics(call, layer)
    is_batch = running is None or (call.given.is_training and not call.network.is_frozen)
    mean, variance = moments(rows) if running is None or is_batch else running.values()
    if running is not None and is_batch:
        if rows.shape[1] < 2 or len(running.mean) != len(x):
            raise UnsupportedModel(f"normalization {layer} of one number, or of shared statistics")
        running.update(mean, variance, rows.shape[1])
    scale, bias = (call.weight(n) if layer.affine else None for n in ("weight", "bias"))
    inverse_std = (variance + layer.eps).rsqrt()
    y: Tensor = StackedBatchNorm.apply(  # type: ignore[no-untyped-call]
        call.anchor, rows, scale, bias, mean, inverse_std, is_batch, call.relu
    )
    return y.view(x.shape)


def running_statistics(
    call: LayerCall, layer: nn.BatchNorm1d | nn.BatchNorm2d
) -> RunningStatistics | None:
    """Return a layer's running statistics; None if it has none."""
    if layer.running_mean is None:
        return None
    mean, variance = call.buffer(layer, "running_mean"), call.buffer(layer, "running_var")
    batches = call.buffer(layer, "num_batches_tracked")
    return RunningStatistics(mean, variance, batches, layer.momentum)


def average(call: LayerCall, layer: nn.AdaptiveAvgPool2d, x: Tensor) -> Tensor:
    """The mean over all pixels."""
    if layer.output_size not in (1, (1, 1)):
        raise UnsupportedModel(f"pooling {layer}")
    return x.mean((2, 3), keepdim=True)


def flatten(call: LayerCall, layer: nn.Flatten, x: Tensor) -> Tensor:
    """Each sample as one row, in the order of channels-first memory."""
    if (layer.start_dim, layer.end_dim) != (1, -1):
        raise UnsupportedModel(f"flattening {layer}")
    return (x.permute(0, 1, 4, 2, 3) if x.dim() == 5 else x).flatten(2)


def elementwise(call: LayerCall, layer: nn.Module, x: Tensor) -> Tensor:
    """A layer that is the same function of every number."""
    y: Tensor = layer(x)
    return y


LAYERS: dict[type[nn.Module], Callable[[LayerCall, Any, Tensor], Tensor]] = {
    nn.Conv2d: convolution,
    nn.Linear: linear,
    nn.MaxPool2d: max_pool,
    nn.GroupNorm: group_norm,
    nn.BatchNorm1d: batch_norm,
    nn.BatchNorm2d: batch_norm,
    nn.AdaptiveAvgPool2d: average,
    nn.Flatten: flatten,
    nn.ReLU: lambda call, layer, x: torch.relu(x),
    **dict.fromkeys((nn.Identity, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU), elementwise),
}
LAYERS_WITH_RELU = (
    nn.Conv2d, nn.Linear, nn.MaxPool2d, nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d
)  # fmt: skip
FUNCTIONS: dict[Any, Callable[..., Tensor]] = {
    operator.add: operator.add,
    torch.add: operator.add,
    torch.relu: torch.relu,
    nn.functional.relu: torch.relu,
}
