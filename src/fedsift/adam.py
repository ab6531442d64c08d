"""The local update of the paper, equations (3)-(5), on tensors ``(..., d)``.

ε stands *inside* the square root and there is no bias correction, so ``torch.optim.Adam`` is not
equivalent.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedsift.vector import Moments

Gradient = Callable[[Tensor], Tensor]


def first_moment(m: Tensor, gradient: Tensor, beta1: float) -> Tensor:
    """Equation (4): m ← β₁ m + (1 − β₁) g.

    >>> first_moment(torch.tensor([1.0]), torch.tensor([0.0]), beta1=0.5)
    tensor([0.5000])
    """
    return torch.add(beta1 * m, gradient, alpha=1 - beta1)


def second_moment(v: Tensor, gradient: Tensor, beta2: float) -> Tensor:
    """Equation (5): v ← β₂ v + (1 − β₂) g².

    >>> second_moment(torch.tensor([0.0]), torch.tensor([2.0]), beta2=0.5)
    tensor([2.])
    """
    return torch.addcmul(beta2 * v, gradient, gradient, value=1 - beta2)


def direction(m: Tensor, v: Tensor, eps: float) -> Tensor:
    """The step of equation (3) before the learning rate: m / √(v + ε).

    >>> direction(torch.tensor([3.0]), torch.tensor([5.0]), eps=4.0)
    tensor([1.])
    """
    return m / (v + eps).sqrt()


def adam_step(
    x: Moments, gradient: Tensor, *, lr: float, beta1: float, beta2: float, eps: float
) -> Moments:
    """One local step: equations (4), (5), then (3).

    >>> x = adam_step(Moments.start(torch.zeros(1)), torch.ones(1),
    ...               lr=0.1, beta1=0.9, beta2=0.999, eps=1e-6)
    >>> [round(float(t), 4) for t in x]
    [-0.3161, 0.1, 0.001]
    """
    m = first_moment(x.m, gradient, beta1)
    v = second_moment(x.v, gradient, beta2)
    return Moments(torch.sub(x.w, direction(m, v, eps), alpha=lr), m, v)


def clipped(gradient: Tensor, most: float) -> Tensor:
    """The gradient, each row of it shortened to a norm of ``most`` if it is longer.

    >>> clipped(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), most=1.0)
    tensor([[0.6000, 0.8000],
            [0.3000, 0.4000]])
    """
    norm: Tensor = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True)
    return gradient * (most / norm).clamp_max(1.0)


def clipped_adam_step(
    x: Moments,
    gradient: Tensor,
    *,
    clip: float,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
) -> Moments:
    """A local step with a gradient of norm ``clip`` at most.

    >>> x = clipped_adam_step(Moments.start(torch.zeros(1, 1)), torch.full((1, 1), 7.0),
    ...                       clip=1.0, lr=0.1, beta1=0.9, beta2=0.999, eps=1e-6)
    >>> [round(float(t), 4) for t in x]
    [-0.3161, 0.1, 0.001]
    """
    return adam_step(x, clipped(gradient, clip), lr=lr, beta1=beta1, beta2=beta2, eps=eps)


def centralized_adam(
    w: Tensor,
    gradient: Gradient,
    *,
    steps: int,
    lr: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-6,
) -> Moments:
    """Adam on one machine that sees all the data: what FedAdam is measured against.

    >>> x = centralized_adam(torch.tensor([1.0]), lambda w: 2 * w, steps=200, lr=0.01)
    >>> bool(x.w.abs() < 0.1)
    True
    """
    x = Moments.start(w)
    for _ in range(steps):
        x = adam_step(x, gradient(x.w), lr=lr, beta1=beta1, beta2=beta2, eps=eps)
    return x
