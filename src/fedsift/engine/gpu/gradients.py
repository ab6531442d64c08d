"""Ways to compute the gradients of all clients in a stack; ``ways.py`` chooses one of them.

- :class:`LayerGradients`, for models made of known layers: all clients at once, with one batched
  matrix product per layer.
- :mod:`fedsift.engine.gpu.one_batch`, for models whose layers compute each sample on its own, such
  as Transformers: all clients' samples in one batch.
- :class:`VmapGradients`, for other models without convolutions: PyTorch batches their operations
  over the clients, if it can.
- :class:`StreamGradients`, for all other models: each client's forward and backward pass runs on
  its own CUDA stream.
- :class:`SingleGradients`, for models that no CUDA graph can record: one client after another.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn
from torch.func import grad_and_value
from torch.nn.functional import cross_entropy

from fedsift.engine.gpu.graph import new_stream
from fedsift.engine.gpu.stacked_task import StackedTask
from fedsift.engine.gpu.unsupported import UnsupportedModel
from fedsift.task import Loss, has_statistics
from fedsift.task.losses import IGNORED
from fedsift.task.samples import map_tree, select_rows
from fedsift.vector import State

if TYPE_CHECKING:
    from fedsift.engine.gpu.network import StackedNetwork

MAX_LOGITS = 1 << 14
"""The largest number of logits in a client's batch whose cross-entropy one GPU block computes."""
STREAMS = 20
"""Clients whose passes run at the same time. More streams are no faster on one GPU."""


class StackBuffers:
    """The state, gradients and losses of the clients in a stack, overwritten by every step.

    ``low_precision`` holds the weights in the number format of the matrix products. It is the
    weights themselves if they already have that format. ``b`` are the buffers that training
    changes, ``(clients, 0)`` if there are none.
    """

    def __init__(
        self, task: StackedTask, clients: int, length: int, dtype: torch.dtype | None = None
    ) -> None:
        layout = task.task.layout
        like = torch.empty(0, dtype=layout.dtype, device=task.device)
        lengths = {name: dict(layout.lengths).get(name, length) for name in task.names}
        self.x = State(**{name: like.new_zeros(clients, n) for name, n in lengths.items()})
        self.low_precision = self.x.w if dtype in (None, like.dtype) else self.x.w.to(dtype)
        self.b = self.x.b if layout.buffers else like.new_zeros(clients, 0)
        self.gradient = torch.zeros_like(self.x.w)
        self.loss = like.new_zeros(clients)


class StackGradients(Protocol):
    """Computes the gradients of all clients in a stack.

    ``remark`` says what a user may want to know about how it does so; it may be empty.
    """

    buffers: StackBuffers
    remark: str

    def pack(self, stack: Tensor, out: Tensor) -> None:
        """Copy a stack ``(clients, d)`` into ``out``, one of the buffers."""

    def unpack(self, stack: Tensor) -> Tensor:
        """Return a buffer as a new stack ``(clients, d)``."""

    def check(self, rows: Tensor) -> None:
        """Raise UnsupportedModel if the gradients would be wrong, given the first batches."""

    def compute(self, rows: Tensor) -> None:
        """Set the gradients to those of the given rows of the data, and add up the losses."""


class LayerGradients:
    """All clients at once, layer by layer."""

    remark = ""

    def __init__(self, task: StackedTask, network: StackedNetwork, clients: int) -> None:
        from fedsift.engine.gpu.channels_last import ChannelsLastLayout

        layout = ChannelsLastLayout(task.task.layout)
        self.buffers = buffers = StackBuffers(task, clients, layout.length, task.dtype)
        self.task, self.network = task, network
        self.pack, self.unpack = layout.pack, layout.unpack
        self.weights = layout.weights(buffers.x.w, buffers.low_precision, buffers.gradient)
        self.statistics = task.views(buffers.b)

    def check(self, rows: Tensor) -> None:
        """Accept every model that is made of known layers."""

    def compute(self, rows: Tensor) -> None:
        """Set the gradients to those of the given rows of the data, and add up the losses."""
        flat = rows.view(-1)
        data = self.task.network_data.index_select(0, flat)
        labels = self.task.labels.index_select(0, flat)
        data, labels = (x.view(*rows.shape, *x.shape[1:]) for x in (data, labels))
        output = self.network(data, self.weights, self.statistics).contiguous()
        if self.task.has_class_labels and output.dim() == 3 and output[0].numel() <= MAX_LOGITS:
            from fedsift.engine.gpu.layers import cross_entropy as fused_cross_entropy

            gradient = fused_cross_entropy(output.detach(), labels, self.buffers.loss)
            output.backward(gradient)  # type: ignore[no-untyped-call]
            return
        losses = client_losses(self.task.task.loss, output.float(), labels)
        losses.sum().backward()  # type: ignore[no-untyped-call]
        self.buffers.loss += losses.detach()


def supported_network(task: StackedTask) -> StackedNetwork:
    """Return the model for all clients at once; raise UnsupportedModel if there is none."""
    found = task.network_or_reason
    if isinstance(found, UnsupportedModel):
        raise found
    return found


def layer_gradients(task: StackedTask, clients: int) -> LayerGradients:
    """Return the gradients of all clients, layer by layer, if the model allows it."""
    return LayerGradients(task, supported_network(task), clients)


def client_losses(loss: Loss, output: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of each client.

    >>> output, labels = torch.randn(2, 3, 4), torch.tensor([[0, 1, 2], [3, 0, 1]])
    >>> expected = [cross_entropy(o, y) for o, y in zip(output, labels)]
    >>> torch.allclose(client_losses(cross_entropy, output, labels), torch.stack(expected))
    True
    """
    if loss is cross_entropy and output.dim() == 3 and labels.dim() == 2:
        losses = cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="none")
        return losses.view(labels.shape).sum(1) / (labels != IGNORED).sum(1)
    result: Tensor = torch.vmap(loss)(output, labels)
    return result


class FlatBuffers:
    """Keeps the buffers in the layout's own order, without padding."""

    remark = ""

    def __init__(self, task: StackedTask, clients: int) -> None:
        self.task, self.buffers = task, StackBuffers(task, clients, task.task.layout.d)

    def pack(self, stack: Tensor, out: Tensor) -> None:
        """Copy a stack ``(clients, d)`` into ``out``, one of the buffers."""
        out.copy_(stack)

    def unpack(self, stack: Tensor) -> Tensor:
        """Return a copy of a buffer."""
        return stack.clone()

    def check(self, rows: Tensor) -> None:
        """Accept every model: a batch is computed as it would be alone."""


class VmapGradients(FlatBuffers):
    """All clients at once, with PyTorch's operations batched by ``torch.vmap``.

    Convolutions are refused because they are slow when batched. ``torch.vmap`` itself refuses
    random operations, which must differ between clients.
    """

    def __init__(self, task: StackedTask, clients: int) -> None:
        require_no_convolution(task.task.model)
        super().__init__(task, clients)

    def compute(self, rows: Tensor) -> None:
        """Set the gradients to those of the given rows of the data, and add up the losses."""
        task, flat, buffers = self.task.task, rows.view(-1), self.buffers
        task.train_mode(task.model)
        selected = (select_rows(x, flat) for x in (self.task.data, self.task.labels))
        data, labels = (
            map_tree(lambda x: x.view(*rows.shape, *x.shape[1:]), tree) for tree in selected
        )
        parameters = task.layout.unflatten(buffers.x.w)
        compute = torch.vmap(grad_and_value(self.task.training_loss, has_aux=True))
        gradients, (losses, b) = compute(parameters, buffers.b, data, labels)
        pieces = [gradients[name].flatten(1) for name in task.layout.names]
        torch.cat(pieces, 1, out=buffers.gradient)
        buffers.loss += losses
        buffers.b.copy_(b)


def require_no_convolution(model: nn.Module) -> None:
    """Raise UnsupportedModel for a model with convolutions.

    >>> require_no_convolution(nn.Conv2d(1, 1, 1))
    Traceback (most recent call last):
    ...
    fedsift.engine.gpu.unsupported.UnsupportedModel: convolutions are slow when batched
    """
    if any(isinstance(module, nn.modules.conv._ConvNd) for module in model.modules()):
        raise UnsupportedModel("convolutions are slow when batched")


class SingleGradients(FlatBuffers):
    """One forward and backward pass per client, one after another, for any model."""

    def compute(self, rows: Tensor) -> None:
        """Set the gradients to those of the given rows of the data, and add up the losses."""
        self.task.task.train_mode(self.task.task.model)
        for place in range(len(rows)):
            self.compute_client(place, rows[place])

    def compute_client(self, place: int, rows: Tensor) -> None:
        """Write one client's gradient and loss to its row of the buffers."""
        w, b = self.buffers.x.w[place], self.buffers.b[place]
        data, labels = select_rows(self.task.data, rows), select_rows(self.task.labels, rows)
        parameters = {n: p.detach().requires_grad_() for n, p in self.task.parameters(w).items()}
        loss, changed = self.task.training_loss(parameters, b, data, labels)
        gradients = torch.autograd.grad(
            loss, tuple(parameters.values()), allow_unused=True, materialize_grads=True
        )
        flat = [g.to_dense().reshape(-1) if g.is_sparse else g.reshape(-1) for g in gradients]
        torch.cat(flat, out=self.buffers.gradient[place])
        self.buffers.loss[place] += loss.detach()
        b.copy_(changed.detach())


class StreamGradients(SingleGradients):
    """One forward and backward pass per client, each on its own stream."""

    def __init__(self, task: StackedTask, clients: int) -> None:
        require_momentum(task.task.model)
        super().__init__(task, clients)
        self.streams = [new_stream() for _ in range(STREAMS)] if task.device.type == "cuda" else []

    def compute(self, rows: Tensor) -> None:
        """Set the gradients to those of the given rows of the data, and add up the losses."""
        self.task.task.train_mode(self.task.task.model)
        for place in range(len(rows)):
            with self._stream(place):
                self.compute_client(place, rows[place])
        for stream in self.streams[: len(rows)]:  # a graph must not wait for one that did nothing
            torch.cuda.current_stream().wait_stream(stream)

    def _stream(self, place: int) -> AbstractContextManager[object]:
        if not self.streams:
            return ExitStack()
        stream = self.streams[place % len(self.streams)]
        stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(stream)


def require_momentum(model: nn.Module) -> None:
    """Refuse layers whose running statistics need a number from the GPU, which a graph forbids.

    >>> require_momentum(nn.BatchNorm1d(2, momentum=None))
    Traceback (most recent call last):
    ...
    fedsift.engine.gpu.unsupported.UnsupportedModel: running statistics with momentum=None
    """
    if any(has_statistics(x) and getattr(x, "momentum", 0) is None for x in model.modules()):
        raise UnsupportedModel("running statistics with momentum=None")
