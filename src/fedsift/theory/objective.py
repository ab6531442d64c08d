"""A task's losses F_n and F as functions of one flat vector: gradients and curvature."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.func import functional_call

from fedsift.task import Task
from fedsift.task.samples import TensorPair, require_tensors


@dataclass(frozen=True)
class Objective:
    """The clients' losses Fₙ(w) = f(w, 𝒟ₙ), and F, their mean weighted by |𝒟ₙ|.

    >>> from fedsift.vector import Layout
    >>> model = nn.Linear(1, 1, bias=False)
    >>> data = [(torch.ones(2, 1), torch.zeros(2, 1))]
    >>> task = Task(model, nn.functional.mse_loss, data, None, None, 0, Layout.of(model))
    >>> Objective(task).gradient(torch.tensor([3.0]))  # f = w²
    tensor([6.])
    """

    task: Task

    @cached_property
    def all_data(self) -> TensorPair:
        """∪𝒟ₙ: the data of all clients as one set."""
        xs, ys = zip(*map(require_tensors, self.task.clients), strict=True)
        return torch.cat(xs), torch.cat(ys)

    def loss(self, w: Tensor, data: TensorPair) -> Tensor:
        """f(w, data)."""
        x, y = data
        parameters = self.task.layout.unflatten(w)
        return self.task.loss(functional_call(self.task.model, parameters, (x,)), y)

    def value(self, w: Tensor) -> float:
        """F(w)."""
        with torch.no_grad():
            return float(self.loss(w, self.all_data))

    def gradient(self, w: Tensor, client: int | None = None) -> Tensor:
        """∇Fₙ(w) for a client, or ∇F(w) if no client is given."""
        data = self.all_data if client is None else require_tensors(self.task.clients[client])
        return self.data_gradient(w, data)

    def data_gradient(self, w: Tensor, data: TensorPair) -> Tensor:
        """∇f(w, data)."""
        point = w.detach().requires_grad_()
        (found,) = torch.autograd.grad(self.loss(point, data), point)
        return found

    def sample_gradients(self, w: Tensor, data: TensorPair) -> Tensor:
        """∇f(w, ξ) for every sample ξ, ``(samples, d)``."""
        samples = zip(*(torch.split(x, 1) for x in data), strict=True)
        return torch.stack([self.data_gradient(w, (x, y)) for x, y in samples])

    def curvature(self, w: Tensor, data: TensorPair) -> Callable[[Tensor], Tensor]:
        """Return the function that multiplies a vector by the Hessian ∇²f(w, data)."""
        point = w.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(self.loss(point, data), point, create_graph=True)

        def product(vector: Tensor) -> Tensor:
            (found,) = torch.autograd.grad(gradient, point, vector, retain_graph=True)
            return found

        return product
