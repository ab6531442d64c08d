"""A task on the GPU: the joined data of all clients, and the model's output and number formats."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from fedsift.engine.gpu.unsupported import UnsupportedModel
from fedsift.engine.memory_format import is_callable_with
from fedsift.selection.backend import can_use_triton
from fedsift.task import Task
from fedsift.task.samples import Tree, device_of, map_tree, model_arguments
from fedsift.vector import MOMENTS

if TYPE_CHECKING:
    from fedsift.engine.gpu.network import StackedNetwork

PRODUCT_PRECISIONS = {"fp32": "tf32x3", "tf32": "tf32", "bf16": "tf32"}
"""How Triton multiplies float32 matrices, for each precision that a user can choose."""


@dataclass(frozen=True)
class StackedTask:
    """A task, the data and labels of all clients end to end, the precision, and the state's names.

    ``is_live`` means that the data is one batch per client, overwritten by :meth:`load`.
    """

    task: Task
    data: Tree
    labels: Tree
    precision: str
    names: tuple[str, ...] = MOMENTS
    is_live: bool = False

    @property
    def device(self) -> torch.device:
        """The device of the data."""
        return device_of((self.data, self.labels))

    def load(self, x: Tree, y: Tree) -> None:
        """Overwrite the data and labels."""
        map_tree(lambda old, new: old.copy_(new), (self.data, self.labels), (x, y))
        if self.network is not None:
            self.network_data.copy_(self.to_network_format(self.data))

    @property
    def network(self) -> StackedNetwork | None:
        """The model for all clients at once; None without a GPU or for an unsupported model."""
        found = self.network_or_reason
        return None if isinstance(found, UnsupportedModel) else found

    @cached_property
    def network_or_reason(self) -> StackedNetwork | UnsupportedModel:
        """The model for all clients at once, or why there is none."""
        if not (isinstance(self.data, Tensor) and isinstance(self.labels, Tensor)):
            return UnsupportedModel("its inputs or labels are not one tensor")
        if not can_use_triton(self.data):
            return UnsupportedModel("Triton needs a GPU")
        if self.task.layout.dtype != torch.float32:
            return UnsupportedModel(f"its parameters are {self.task.layout.dtype}")
        from fedsift.engine.gpu.network import StackedNetwork  # needs Triton

        precision = PRODUCT_PRECISIONS[self.precision]
        try:
            return StackedNetwork(self.task.model, self.task.layout, precision, self.task.is_frozen)
        except UnsupportedModel as problem:
            return problem

    @cached_property
    def network_data(self) -> Tensor:
        """The clients' data as :class:`StackedNetwork` takes it."""
        return self.to_network_format(self.data)

    def to_network_format(self, data: Tensor) -> Tensor:
        """Return data with channels last, in the number format of the activations."""
        last = data.permute(0, 2, 3, 1) if data.dim() == 4 else data
        return last.to(self.dtype).contiguous()

    def output(self, values: Tensor, data: Tree) -> Any:
        """Return the model's output in evaluation mode with the given weights and buffers."""
        if self.network is not None:
            try:
                return self.network_output(self.network, values, data)
            except UnsupportedModel:
                pass
        self.task.model.eval()
        w, b = self.task.layout.split(values)
        return self.model_output({**self.parameters(w), **self.buffers(b)}, data)

    def network_output(self, network: StackedNetwork, values: Tensor, data: Tensor) -> Tensor:
        """Return the output of a stacked network with one client, in evaluation mode."""
        w, b = self.task.layout.split(values[None])
        return self.network_outputs(network, w, b, data[None], is_training=False)[0]

    def network_outputs(
        self, network: StackedNetwork, w: Tensor, b: Tensor, data: Tensor, is_training: bool
    ) -> Tensor:
        """Return the output of a stacked network at weights ``(clients, d)`` and buffers b."""
        from fedsift.engine.gpu.channels_last import ChannelsLastLayout

        layout = ChannelsLastLayout(self.task.layout)
        stack = w.new_zeros(len(w), layout.length)
        layout.pack(w, stack)
        weights = layout.weights(stack, stack.to(self.dtype), stack)
        formatted = self.to_network_format(data.flatten(0, 1))
        formatted = formatted.view(*data.shape[:2], *formatted.shape[1:])
        return network(formatted, weights, self.views(b), is_training).float()

    def model_output(self, named: dict[str, Tensor], data: Tree) -> Any:
        """Return the model's output with the given tensors, in the dtype of the weights."""
        output = functional_call(self.task.model, named, *model_arguments(data))
        return output.to(self.task.layout.dtype) if isinstance(output, Tensor) else output

    def training_loss(
        self, parameters: dict[str, Tensor], b: Tensor, data: Tree, labels: Tree
    ) -> tuple[Tensor, Tensor]:
        """Return one client's loss, and its buffers after the forward pass."""
        if self.task.layout.buffers is None:
            return self.task.loss(self.model_output(parameters, data), labels), b
        # Contiguous copies, because vmap would update a copy of any other tensor.
        copies = {name: x.clone() for name, x in self.buffers(b).items()}
        named = {f"model.{name}": x for name, x in {**parameters, **copies}.items()}
        output, changed = functional_call(self.with_buffers, named, *model_arguments(data))
        output = output.to(self.task.layout.dtype) if isinstance(output, Tensor) else output
        return self.task.loss(output, labels), self.task.layout.buffers.flatten(changed).to(b.dtype)

    def buffers(self, b: Tensor) -> dict[str, Tensor]:
        """Return one client's buffers by name, in the model's own data types."""
        named = ((name, x, self.task.model.get_buffer(name)) for name, x in self.views(b).items())
        return {name: x if own.is_floating_point() else x.round().to(own) for name, x, own in named}

    def views(self, b: Tensor) -> dict[str, Tensor]:
        """Return views of buffers ``(..., n)`` by name; none if training changes none."""
        buffers = self.task.layout.buffers
        return buffers.unflatten(b) if buffers and b.numel() else {}

    @cached_property
    def with_buffers(self) -> WithBuffers:
        """The model, which also returns the buffers that training changes."""
        buffers = self.task.layout.buffers
        return WithBuffers(self.task.model, buffers.names if buffers else ())

    def parameters(self, w: Tensor) -> dict[str, Tensor]:
        """Return the parameters by name, those of convolutions in the fastest memory format."""
        named = self.task.layout.unflatten(w)
        return channels_last(named) if self.takes_channels_last else named

    @cached_property
    def takes_channels_last(self) -> bool:
        """Whether the model runs with its convolutions' weights in channels-last format."""
        model, layout = self.task.model, self.task.layout
        named = channels_last(layout.unflatten(layout.split(layout.read(model))[0]))
        named |= {name: buffer.clone() for name, buffer in model.named_buffers()}
        return is_callable_with(partial(self.model_output, named), self.data)

    @cached_property
    def has_class_labels(self) -> bool:
        """Whether the loss is the cross-entropy of class labels, none of which is ignored."""
        if self.is_live or not isinstance(self.labels, Tensor):
            return False  # labels that are not known yet may be ignored ones
        is_index = self.labels.dtype == torch.int64 and self.labels.dim() == 1
        return self.task.loss is cross_entropy and is_index and bool((self.labels >= 0).all())

    @property
    def dtype(self) -> torch.dtype:
        """The number format of activations and matrix products."""
        return torch.bfloat16 if self.precision == "bf16" else torch.float32


class WithBuffers(nn.Module):
    """A model that also returns some of its buffers, as its forward pass leaves them.

    >>> layer = nn.BatchNorm1d(1)
    >>> _, buffers = WithBuffers(layer, ("running_mean",))(torch.tensor([[0.0], [2.0]]))
    >>> buffers["running_mean"]
    tensor([0.1000])
    """

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *arguments: Tree, **keywords: Tree) -> tuple[Any, dict[str, Tensor]]:
        """Return the model's output and the buffers by name."""
        output = self.model(*arguments, **keywords)
        return output, {name: self.model.get_buffer(name) for name in self.names}


def channels_last(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return parameters by name, those of convolutions in channels-last memory format."""
    fast = torch.channels_last
    return {
        name: p.contiguous(memory_format=fast) if p.dim() == 4 else p
        for name, p in parameters.items()
    }
