"""The losses of all clients in a stack at given weights, for methods that need no gradients."""

from __future__ import annotations

from collections.abc import Iterable
from operator import itemgetter

import torch
from torch import Tensor, nn

from fedsift.engine.gpu.gradients import (
    FlatBuffers,
    client_losses,
    require_no_convolution,
    supported_network,
)
from fedsift.engine.gpu.stacked_task import StackedTask
from fedsift.task.samples import Tree, map_tree, select_rows


class PointLosses(FlatBuffers):
    """Losses without autograd, of one client after another. The weights are in the layout's order.

    Dropout is refused: its random numbers would differ between the points.
    """

    def __init__(self, task: StackedTask, clients: int) -> None:
        super().__init__(task, clients)
        require_no_dropout(task.task.model)

    @torch.no_grad()
    def losses(self, points: Iterable[Tensor], rows: Tensor) -> Tensor:
        """Return the losses ``(clients, points)``, and add up their means."""
        trees = (select_rows(x, rows.view(-1)) for x in (self.task.data, self.task.labels))
        data, labels = (map_tree(lambda x: x.unflatten(0, rows.shape), tree) for tree in trees)
        self.task.task.train_mode(self.task.task.model)
        losses = torch.stack([self.losses_at(w, data, labels) for w in points], dim=-1)
        self.buffers.loss += losses.mean(-1)
        return losses

    def losses_at(self, w: Tensor, data: Tree, labels: Tree) -> Tensor:
        """Return the loss of each client at its own weights ``(clients, d)``."""
        clients = [
            map_tree(itemgetter(n), (w, self.buffers.b, data, labels)) for n in range(len(w))
        ]
        each = zip(*(self.loss_of(*client) for client in clients), strict=True)
        losses, changed = (torch.stack(x) for x in each)
        self.buffers.b.copy_(changed)
        return losses.to(w)

    def loss_of(self, w: Tensor, b: Tensor, data: Tree, labels: Tree) -> tuple[Tensor, Tensor]:
        """Return one client's loss, and its buffers after the forward pass."""
        return self.task.training_loss(self.task.parameters(w), b, data, labels)


class VmapPointLosses(PointLosses):
    """Losses of all clients at once, with PyTorch's operations batched by ``torch.vmap``."""

    def __init__(self, task: StackedTask, clients: int) -> None:
        require_no_convolution(task.task.model)
        super().__init__(task, clients)

    def losses_at(self, w: Tensor, data: Tree, labels: Tree) -> Tensor:
        """Return the loss of each client at its own weights ``(clients, d)``."""
        losses, changed = torch.vmap(self.loss_of)(w, self.buffers.b, data, labels)
        self.buffers.b.copy_(changed)
        result: Tensor = losses.to(w)
        return result


class LayerPointLosses(PointLosses):
    """Losses of all clients at once, layer by layer."""

    def __init__(self, task: StackedTask, clients: int) -> None:
        self.network = supported_network(task)
        super().__init__(task, clients)

    def losses_at(self, w: Tensor, data: Tree, labels: Tree) -> Tensor:
        """Return the loss of each client at its own weights ``(clients, d)``."""
        b = self.buffers.b
        output = self.task.network_outputs(self.network, w, b, data, is_training=True)
        return client_losses(self.task.task.loss, output, labels).to(w)


def require_no_dropout(model: nn.Module) -> None:
    """Refuse layers whose random numbers would differ between the points.

    >>> require_no_dropout(nn.Dropout(0.0))
    >>> require_no_dropout(nn.Dropout(0.1))
    Traceback (most recent call last):
    ...
    ValueError: without gradients, a GPU cannot train a model with dropout: ...
    """
    if any(isinstance(x, nn.modules.dropout._DropoutNd) and x.p > 0 for x in model.modules()):
        raise ValueError(
            "without gradients, a GPU cannot train a model with dropout: its random numbers would "
            "differ between the losses that are compared; train on the CPU or set p = 0"
        )
