"""The local update of the paper, equations (3)-(5), on tensors ``(..., d)``.

ε is *inside* the square root and there is no bias correction, so ``torch.optim.Adam`` is not
equivalent.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsift.errors import explain_renamed
from fedsift.vector import State

Gradient = Callable[[Tensor], Tensor]
Number = float | Tensor
"""A hyperparameter: a number, or on a GPU a tensor that holds it."""


def first_moment(m: Tensor, gradient: Tensor, beta1: Number) -> Tensor:
    """Equation (4): m ← β₁ m + (1 − β₁) g.

    >>> first_moment(torch.tensor([1.0]), torch.tensor([0.0]), beta1=0.5)
    tensor([0.5000])
    """
    return plus_scaled(beta1 * m, gradient, 1 - beta1)


def second_moment(v: Tensor, gradient: Tensor, beta2: Number) -> Tensor:
    """Equation (5): v ← β₂ v + (1 − β₂) g².

    >>> second_moment(torch.tensor([0.0]), torch.tensor([2.0]), beta2=0.5)
    tensor([2.])
    """
    if isinstance(beta2, Tensor):
        return beta2 * v + (1 - beta2) * gradient * gradient
    return torch.addcmul(beta2 * v, gradient, gradient, value=1 - beta2)


def plus_scaled(x: Tensor, y: Tensor, scale: Number) -> Tensor:
    """Return x + scale · y, in one pass over memory if the scale is a plain number.

    >>> plus_scaled(torch.tensor([1.0]), torch.tensor([2.0]), 0.5)
    tensor([2.])
    """
    return x + scale * y if isinstance(scale, Tensor) else torch.add(x, y, alpha=scale)


def direction(m: Tensor, v: Tensor, eps: Number) -> Tensor:
    """The step of equation (3) before the learning rate: m / √(v + ε).

    >>> direction(torch.tensor([3.0]), torch.tensor([5.0]), eps=4.0)
    tensor([1.])
    """
    return m / (v + eps).sqrt()


def clipped(gradient: Tensor, bound: Number) -> Tensor:
    """Return the gradient with each row of norm above ``bound`` scaled down to it.

    >>> clipped(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), bound=1.0)
    tensor([[0.6000, 0.8000],
            [0.3000, 0.4000]])
    """
    norm: Tensor = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True)
    return gradient * (norm.reciprocal() * bound).clamp_max(1.0)


@dataclass(frozen=True)
class AdamStep:
    """One local step: equations (4), (5), then (3), on a gradient of norm at most ``clip``.

    >>> step = AdamStep(lr=0.1, beta1=0.9, beta2=0.999, eps=1e-6, clip=1.0)
    >>> x = step(State.start(torch.zeros(1)), torch.tensor([7.0]))
    >>> [round(float(t), 4) for t in x]
    [-0.3161, 0.1, 0.001]
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    clip: float = math.inf

    def __call__(self, x: State, gradient: Tensor, context: object = None) -> State:
        """Return W, M and V after the step."""
        gradient = clipped(gradient, self.clip) if self.is_clipped else gradient
        m = first_moment(x.m, gradient, self.beta1)
        v = second_moment(x.v, gradient, self.beta2)
        return x.replace(w=plus_scaled(x.w, direction(m, v, self.eps), -self.lr), m=m, v=v)

    @property
    def is_clipped(self) -> bool:
        """Whether gradients have a bounded norm."""
        return isinstance(self.clip, Tensor) or self.clip < math.inf


def centralized_adam(
    w: Tensor,
    gradient: Gradient,
    *,
    steps: int,
    lr: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-6,
) -> State:
    """Adam on one machine that sees all the data: the reference for FedAdam.

    >>> x = centralized_adam(torch.tensor([1.0]), lambda w: 2 * w, steps=200, lr=0.01)
    >>> bool(x.w.abs() < 0.1)
    True
    """
    x, step = State.start(w), AdamStep(lr, beta1, beta2, eps)
    for _ in range(steps):
        x = step(x, gradient(x.w))
    return x


__getattr__ = explain_renamed(__name__)
