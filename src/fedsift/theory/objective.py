"""A task's losses F_n and F as functions of one flat vector: gradients and curvature."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.func import functional_call

from fedsift.task import Data, Task


@dataclass(frozen=True)
class Objective:
    """Fₙ(w) = f(w, 𝒟ₙ) for every client, and F, their mean weighted by |𝒟ₙ|.

    >>> from fedsift.vector import Layout
    >>> model = nn.Linear(1, 1, bias=False)
    >>> data = [(torch.ones(2, 1), torch.zeros(2, 1))]
    >>> task = Task(model, nn.functional.mse_loss, data, None, None, 0, Layout.of(model))
    >>> Objective(task).gradient(torch.tensor([3.0]))  # f = w²
    tensor([6.])
    """

    task: Task

    @cached_property
    def everything(self) -> Data:
        """∪𝒟ₙ: every client's data as one set."""
        xs, ys = zip(*self.task.clients, strict=True)
        return torch.cat(xs), torch.cat(ys)

    def loss(self, w: Tensor, data: Data) -> Tensor:
        """f(w, data)."""
        x, y = data
        parameters = self.task.layout.unflatten(w)
        return self.task.loss(functional_call(self.task.model, parameters, (x,)), y)

    def value(self, w: Tensor) -> float:
        """F(w)."""
        with torch.no_grad():
            return float(self.loss(w, self.everything))

    def gradient(self, w: Tensor, client: int | None = None) -> Tensor:
        """∇Fₙ(w), or ∇F(w) without a client."""
        return self.slope(w, self.everything if client is None else self.task.clients[client])

    def slope(self, w: Tensor, data: Data) -> Tensor:
        """∇f(w, data)."""
        point = w.detach().requires_grad_()
        (found,) = torch.autograd.grad(self.loss(point, data), point)
        return found

    def sample_gradients(self, w: Tensor, data: Data) -> Tensor:
        """∇f(w, ξ) for every sample ξ: a tensor ``(samples, d)``."""
        samples = zip(*(torch.split(x, 1) for x in data), strict=True)
        return torch.stack([self.slope(w, (x, y)) for x, y in samples])

    def curvature(self, w: Tensor, data: Data) -> Callable[[Tensor], Tensor]:
        """The product with the Hessian ∇²f(w, data), as a function of the direction."""
        point = w.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.loss(point, data), point, create_graph=True)

        def product(direction: Tensor) -> Tensor:
            (found,) = torch.autograd.grad(slope, point, direction, retain_graph=True)
            return found

        return product
