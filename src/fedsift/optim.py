"""The paper's Adam for training loops that are written with ``torch.optim``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from fedsift.adam import AdamStep, clipped
from fedsift.vector import State


class Adam(Optimizer):
    """Equations (3)-(5): ε inside the square root, no bias correction.

    Unlike ``torch.optim.Adam``, it can start from given moments and returns them, as flat vectors
    in the order of the parameters. If the norm of the gradient of all parameters together exceeds
    ``clip``, the gradient is scaled down to it; 0 disables this.

    >>> w = torch.nn.Parameter(torch.zeros(1))
    >>> optimizer = Adam([w], lr=0.1)
    >>> w.sum().backward()
    >>> optimizer.step()
    >>> [round(float(x), 4) for x in (w, *optimizer.moments())]
    [-0.3161, 0.1, 0.001]
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-6,
        clip: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps})
        self.clip = clip

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step. A missing gradient counts as zero."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gradients = iter(self._gradients())
        for group in self.param_groups:
            take_step = AdamStep(*(group[key] for key in ("lr", "beta1", "beta2", "eps")))
            for p in group["params"]:
                m, v = self._moments_of(p)
                after = take_step(State(w=p, m=m, v=v), next(gradients))
                p.copy_(after.w)
                self.state[p].update(m=after.m, v=after.v)
        return loss

    def load_moments(self, m: Tensor, v: Tensor) -> None:
        """Start from these moments, flat vectors ``(d,)``."""
        sizes = [p.numel() for p in self._params()]
        rows = zip(self._params(), torch.split(m, sizes), torch.split(v, sizes), strict=True)
        for p, *flat in rows:
            first, second = (x.view_as(p).to(p, copy=True) for x in flat)
            self.state[p].update(m=first, v=second)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Return the moments as flat vectors ``(d,)``."""
        m, v = zip(*(self._moments_of(p) for p in self._params()), strict=True)
        return torch.cat([x.flatten() for x in m]), torch.cat([x.flatten() for x in v])

    def _gradients(self) -> list[Tensor]:
        """Return every parameter's gradient, scaled down if their joint norm is too large."""
        params = self._params()
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
        if not 0 < self.clip < math.inf:
            return gradients
        flat = clipped(torch.cat([g.flatten() for g in gradients]), self.clip)
        parts = torch.split(flat, [p.numel() for p in params])
        return [part.view_as(p) for part, p in zip(parts, params, strict=True)]

    def _params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _moments_of(self, p: Tensor) -> tuple[Tensor, Tensor]:
        state = self.state[p]
        if not state:
            state.update(m=torch.zeros_like(p), v=torch.zeros_like(p))
        return state["m"], state["v"]
