"""A model of known layers, rewritten to run all clients of a stack at once.

Images are kept with their channels last, and so are the weights of convolutions: an
:class:`Order` says where each coordinate of the flat vector goes. Elementwise optimizers do not
mind, so that a stack is brought into this order when a round begins and back when it ends.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, fx, nn

from fedsift.engine.gpu import layers
from fedsift.engine.gpu.layers import Weight, Window
from fedsift.task import has_hooks
from fedsift.vector import Layout

ALIGNMENT = 16
BLOCK = 1024


class Unknown(Exception):
    """The model has a layer, or a use of one, that is not known here."""


@dataclass(frozen=True)
class Order:
    """Where the parameters lie while a stack trains: convolutions' weights channels last.

    Every parameter begins at a multiple of ALIGNMENT, which lets the GPU load many numbers at once.
    """

    layout: Layout

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each parameter begins, and where the last one ends."""
        room = (-(-size // ALIGNMENT) * ALIGNMENT for size in self.layout.sizes)
        return tuple(accumulate(room, initial=0))

    @property
    def length(self) -> int:
        """Numbers in a row of a stack, a multiple of what a block of the optimizer takes."""
        return -(-self.offsets[-1] // BLOCK) * BLOCK

    def shaped(self, stack: Tensor) -> dict[str, Tensor]:
        """Views ``(clients, *shape)`` of a stack ``(clients, length)`` in this order."""
        named = zip(
            self.layout.names, self.layout.shapes, self.layout.sizes, self.offsets, strict=False
        )
        return {
            name: stack[:, start : start + size].view(len(stack), *_channels_last(shape))
            for name, shape, size, start in named
        }

    def weights(self, value: Tensor, short: Tensor, gradient: Tensor) -> dict[str, Weight]:
        """Every parameter by name, as views of three stacks ``(clients, length)``."""
        views = [self.shaped(x) for x in (value, short, gradient)]
        return {name: Weight(*(view[name] for view in views)) for name in self.layout.names}

    def enter(self, stack: Tensor, into: Tensor) -> None:
        """Copy a stack ``(clients, d)`` from the layout's order into this one.

        >>> order = Order(Layout.of(nn.Conv2d(2, 1, (1, 2), bias=False)))
        >>> there = torch.zeros(1, order.length)
        >>> order.enter(torch.tensor([[1.0, 2.0, 3.0, 4.0]]), there)
        >>> there[:, :5].tolist(), order.leave(there).tolist()
        ([[1.0, 3.0, 2.0, 4.0, 0.0]], [[1.0, 2.0, 3.0, 4.0]])
        """
        ours = self.shaped(into)
        for name, theirs in self.layout.unflatten(stack).items():
            ours[name].copy_(theirs.permute(0, 1, 3, 4, 2) if theirs.dim() == 5 else theirs)

    def leave(self, stack: Tensor) -> Tensor:
        """A copy ``(clients, d)`` of a stack in the layout's own order."""
        result = stack.new_empty(len(stack), self.layout.d)
        theirs = self.layout.unflatten(result)
        for name, ours in self.shaped(stack).items():
            theirs[name].copy_(ours.permute(0, 1, 4, 2, 3) if ours.dim() == 5 else ours)
        return result


def _channels_last(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[0], *shape[2:], shape[1]) if len(shape) == 4 else shape


class Network:
    """The layers of a model in their order, for a stack of clients.

    A model that is not made of layers known here is refused with :class:`Unknown`.
    """

    def __init__(self, model: nn.Module, layout: Layout, precision: str) -> None:
        self.layout, self.precision = layout, precision
        if any(map(has_hooks, model.modules())):
            raise Unknown("it has hooks")
        try:
            self.traced = fx.symbolic_trace(model)
        except Exception as problem:  # a model may do anything in its forward pass
            raise Unknown(str(problem)) from None
        self.modules = dict(self.traced.named_modules())
        self.rectified = {node.args[0] for node in self.traced.graph.nodes if self._joins(node)}
        self._check()

    def __call__(self, x: Tensor, weights: Mapping[str, Weight]) -> Tensor:
        """The model's output ``(clients, batch, ...)``."""
        anchor = torch.empty((), device=x.device, requires_grad=True)
        values: dict[fx.Node, Any] = {}
        for node in self.traced.graph.nodes:
            given = [values[each] if isinstance(each, fx.Node) else each for each in node.args]
            if node.op == "placeholder":
                values[node] = x
            elif node.op == "output" or (self._is_relu(node) and node.args[0] in self.rectified):
                values[node] = given[0]  # the layer before has done a ReLU in passing
            elif node.op == "call_module":
                call = Call(self, str(node.target), weights, anchor, node in self.rectified)
                values[node] = call(*given)
            else:
                values[node] = FUNCTIONS[node.target](*given)
            for each in node.all_input_nodes:
                if next(reversed(each.users)) is node:
                    del values[each]  # nobody else wants it
        output: Tensor = values[node]
        return output

    def _check(self) -> None:
        """Refuse what cannot be done, as far as it shows before the data does."""
        used: list[str] = []
        for node in self.traced.graph.nodes:
            if node.kwargs.keys() - {"inplace"}:
                self._refuse(f"operation {node.target} with {', '.join(node.kwargs)}")
            if self._is_relu(node) and self._writes_over(node):
                self._refuse("a ReLU writes over what is used elsewhere")
            if node.op == "output" and not isinstance(node.args[0], fx.Node):
                self._refuse("it has several outputs")
            if node.op == "call_module":
                module = self.modules[str(node.target)]
                used += [f"{node.target}.{name}" for name, _ in module.named_parameters()]
                if type(module) not in MODULES:
                    self._refuse(f"layer {type(module).__name__}")
            elif node.op not in ("placeholder", "output") and node.target not in FUNCTIONS:
                self._refuse(f"operation {node.target}")
        if len(set(used)) < len(used) or not set(used) <= set(self.layout.names):
            self._refuse("it shares or freezes parameters")

    def _writes_over(self, node: fx.Node) -> bool:
        """Whether a ReLU changes, in place, what others use too."""
        module = self.modules.get(str(node.target))
        is_inplace = node.kwargs.get("inplace") or getattr(module, "inplace", False)
        return bool(is_inplace) and len(node.all_input_nodes[0].users) > 1

    def _refuse(self, what: str) -> None:
        raise Unknown(what)

    def _is_relu(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return type(self.modules[str(node.target)]) is nn.ReLU
        return node.op == "call_function" and FUNCTIONS.get(node.target) is torch.relu

    def _joins(self, node: fx.Node) -> bool:
        """Whether a node is a ReLU that the layer before it can do in passing."""
        if not self._is_relu(node):
            return False
        before = node.args[0]
        if not isinstance(before, fx.Node) or before.op != "call_module" or len(before.users) > 1:
            return False
        return type(self.modules[str(before.target)]) in RECTIFYING


@dataclass(frozen=True)
class Call:
    """One use of a layer: whose parameters, and whether a ReLU follows."""

    network: Network
    name: str
    weights: Mapping[str, Weight]
    anchor: Tensor
    relu: bool

    def __call__(self, x: Tensor) -> Tensor:
        """The layer's output."""
        module = self.network.modules[self.name]
        return MODULES[type(module)](self, module, x)

    def weight(self, name: str) -> Weight:
        """A parameter of the layer."""
        return self.weights[f"{self.name}.{name}" if self.name else name]


def convolution(call: Call, layer: nn.Conv2d, x: Tensor) -> Tensor:
    """A convolution with a square window."""
    sides, strides, paddings = set(layer.kernel_size), set(layer.stride), set(layer.padding)
    plain = layer.groups == 1 and set(layer.dilation) == {1} and layer.padding_mode == "zeros"
    square = len(sides) == len(strides) == len(paddings) == 1
    fits = x.dim() == 5 and x.shape[-1] == layer.in_channels
    if not (plain and square and fits and not isinstance(layer.padding, str)):
        raise Unknown(f"convolution {layer}")
    window = Window(layer.kernel_size[0], layer.stride[0], int(layer.padding[0]))
    return _convolve(call, layer, x, window)


def linear(call: Call, layer: nn.Linear, x: Tensor) -> Tensor:
    """A linear layer: a convolution of images of one pixel."""
    if x.dim() != 3 or x.shape[-1] != layer.in_features:
        raise Unknown("a linear layer on images, or on another number of features")
    return _convolve(call, layer, x[:, :, None, None], Window()).flatten(2)


def _convolve(call: Call, layer: nn.Conv2d | nn.Linear, x: Tensor, window: Window) -> Tensor:
    bias = None if layer.bias is None else call.weight("bias")
    weight, precision = call.weight("weight"), call.network.precision
    y: Tensor = layers.Convolution.apply(  # type: ignore[no-untyped-call]
        call.anchor, x.contiguous(), weight, bias, window, call.relu, precision
    )
    return y


def max_pool(call: Call, layer: nn.MaxPool2d, x: Tensor) -> Tensor:
    """Max pooling over windows that do not overlap."""
    side, plain = layer.kernel_size, not (layer.padding or layer.ceil_mode)
    if not (isinstance(side, int) and layer.stride == side and plain and layer.dilation == 1):
        raise Unknown(f"pooling {layer}")
    pooled = layers.Pool.apply(x.contiguous(), side, call.relu)  # type: ignore[no-untyped-call]
    y: Tensor = pooled
    return y


def group_norm(call: Call, layer: nn.GroupNorm, x: Tensor) -> Tensor:
    """Group normalization of images."""
    channels = layer.num_channels
    if not layer.affine or x.dim() != 5 or x.shape[-1] != channels or channels & (channels - 1):
        raise Unknown(f"normalization {layer}")
    scale, bias = call.weight("weight"), call.weight("bias")
    y: Tensor = layers.GroupNorm.apply(  # type: ignore[no-untyped-call]
        call.anchor, x.contiguous(), scale, bias, layer.num_groups, layer.eps, call.relu
    )
    return y


def average(call: Call, layer: nn.AdaptiveAvgPool2d, x: Tensor) -> Tensor:
    """The mean over all pixels."""
    if layer.output_size not in (1, (1, 1)):
        raise Unknown(f"pooling {layer}")
    return x.mean((2, 3), keepdim=True)


def flatten(call: Call, layer: nn.Flatten, x: Tensor) -> Tensor:
    """A sample's numbers in one row, in the order that they have with the channels first."""
    if (layer.start_dim, layer.end_dim) != (1, -1):
        raise Unknown(f"flattening {layer}")
    return (x.permute(0, 1, 4, 2, 3) if x.dim() == 5 else x).flatten(2)


def elementwise(call: Call, layer: nn.Module, x: Tensor) -> Tensor:
    """A layer that treats every number alike."""
    y: Tensor = layer(x)
    return y


MODULES: dict[type[nn.Module], Callable[[Call, Any, Tensor], Tensor]] = {
    nn.Conv2d: convolution,
    nn.Linear: linear,
    nn.MaxPool2d: max_pool,
    nn.GroupNorm: group_norm,
    nn.AdaptiveAvgPool2d: average,
    nn.Flatten: flatten,
    nn.ReLU: lambda call, layer, x: torch.relu(x),
    **dict.fromkeys((nn.Identity, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU), elementwise),
}
RECTIFYING = (nn.Conv2d, nn.Linear, nn.MaxPool2d, nn.GroupNorm)
FUNCTIONS: dict[Any, Callable[..., Tensor]] = {
    operator.add: operator.add,
    torch.add: operator.add,
    torch.relu: torch.relu,
    nn.functional.relu: torch.relu,
}
