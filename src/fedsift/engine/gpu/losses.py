"""The losses of all clients in a stack at given weights, for methods that need no gradients."""

from __future__ import annotations

from collections.abc import Iterable
from operator import itemgetter

import torch
from torch import Tensor, nn

from fedsift.engine.gpu.gradients import FlatBuffers, can_vmap, client_losses
from fedsift.engine.gpu.stacked_task import StackedTask
from fedsift.task.samples import Tree, map_tree, select_rows


class PointLosses(FlatBuffers):
    """Losses without autograd. The weights are in the layout's own order."""

    def __init__(self, task: StackedTask, rows: Tensor) -> None:
        super().__init__(task, len(rows))
        require_no_dropout(task.task.model)
        self.network = task.network
        self.can_vmap = self.network is None and can_vmap(task, rows)

    @torch.no_grad()
    def losses(self, points: Iterable[Tensor], rows: Tensor) -> Tensor:
        """Return the losses ``(clients, points)``, and add up their means."""
        trees = (select_rows(x, rows.view(-1)) for x in (self.task.data, self.task.labels))
        data, labels = (map_tree(lambda x: x.unflatten(0, rows.shape), tree) for tree in trees)
        losses = torch.stack([self.losses_at(w, data, labels) for w in points], dim=-1)
        self.buffers.loss += losses.mean(-1)
        return losses

    def losses_at(self, w: Tensor, data: Tree, labels: Tree) -> Tensor:
        """Return the loss of each client at its own weights ``(clients, d)``."""
        b = self.buffers.b
        if self.network is not None:
            from fedsift.engine.gpu.network import UnsupportedModel

            try:
                output = self.task.network_outputs(self.network, w, b, data, is_training=True)
                return client_losses(self.task.task.loss, output, labels).to(w)
            except UnsupportedModel:
                self.network = None
        self.task.task.train_mode(self.task.task.model)
        if self.can_vmap:
            losses, changed = torch.vmap(self._loss)(w, b, data, labels)
        else:
            clients = [map_tree(itemgetter(n), (w, b, data, labels)) for n in range(len(w))]
            each = zip(*(self._loss(*client) for client in clients), strict=True)
            losses, changed = (torch.stack(x) for x in each)
        b.copy_(changed)
        return losses.to(w)

    def _loss(self, w: Tensor, b: Tensor, data: Tree, labels: Tree) -> tuple[Tensor, Tensor]:
        return self.task.training_loss(self.task.parameters(w), b, data, labels)


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
