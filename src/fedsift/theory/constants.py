"""The theorems' constants ρ, G, σ_l, σ_g and μ, estimated on a model and a partition.

A theorem asks for a supremum over all weights; what can be had is the largest value at the points
and samples that were looked at. So each :class:`Estimate` has a range: for a maximum, ``high`` is
the 95 % confidence limit of Robson and Whitlock (Biometrika 51, 1964) for the end of a
distribution, x₍ₙ₎ + 19 (x₍ₙ₎ − x₍ₙ₋₁₎).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from fedsift.seeding import stream, torch_seed
from fedsift.task import Data, Task
from fedsift.theory.objective import Objective

ENDPOINT = 19.0
"""(1 − a)/a at a = 0.05: the weight of the last gap in a 95 % limit."""
TWO_SIDED = NormalDist().inv_cdf(0.975)


@dataclass(frozen=True)
class Estimate:
    """A value from ``n`` observations, and the range in which the constant is believed to lie."""

    value: float
    low: float
    high: float
    n: int

    @classmethod
    def supremum(cls, seen: Sequence[float], error: float = 0.0) -> Estimate:
        """The largest of what was seen; the truth is no smaller, but for an error of measurement.

        >>> Estimate.supremum([1.0, 2.0, 2.5])
        Estimate(value=2.5, low=2.5, high=12.0, n=3)
        """
        *_, second, first = sorted([min(seen), *seen])
        high = first + error + ENDPOINT * (first - second)
        return cls(first, max(first - error, 0.0), high, len(seen))

    @classmethod
    def infimum(cls, seen: Sequence[float]) -> Estimate:
        """The smallest of what was seen; the truth is no larger, and not below zero.

        >>> Estimate.infimum([4.0, 2.0, 2.03125])
        Estimate(value=2.0, low=1.40625, high=2.0, n=3)
        """
        first, second, *_ = sorted([*seen, max(seen)])
        return cls(first, max(first - ENDPOINT * (second - first), 0.0), first, len(seen))


@dataclass(frozen=True)
class Constants:
    """ρ (Lipschitz gradients), G (bounded gradients), σ_l, σ_g (variances) and μ (PŁ)."""

    rho: Estimate
    grad_bound: Estimate
    sigma_l: Estimate
    sigma_g: Estimate
    mu: Estimate


def estimate_constants(
    task: Task,
    points: Sequence[Tensor],
    *,
    samples: int = 256,
    iterations: int = 30,
    minimum: float = 0.0,
    seed: int = 0,
) -> Constants:
    """Measure the constants at the given weights, on at most ``samples`` samples a client.

    ``minimum`` is F(w*), for μ; cross-entropy is never below 0, and with too small a minimum the
    estimate is too small, never too large.

    >>> from fedsift.vector import Layout
    >>> model = nn.Linear(1, 1, bias=False)
    >>> data = [(torch.ones(4, 1), torch.zeros(4, 1))]
    >>> task = Task(model, nn.functional.mse_loss, data, None, None, 0, Layout.of(model))
    >>> found = estimate_constants(task, [torch.tensor([3.0])])  # f = w²
    >>> found.rho.value, found.grad_bound.value, found.sigma_l.value, found.mu.value
    (2.0, 6.0, 0.0, 2.0)
    """
    if not points:
        raise ValueError("constants are measured at weights: give at least one point")
    objective = Objective(task)
    sets = [_some(data, samples, seed, n) for n, data in enumerate(task.clients)]
    tops = [
        top_curvature(objective.curvature(w, data), w, iterations, seed)
        for w in points for data in sets
    ]  # fmt: skip
    looks = [
        _look(objective, w, whole, n, data)
        for w, whole in zip(points, map(objective.gradient, points), strict=True)
        for n, data in enumerate(sets)
    ]
    return Constants(
        rho=Estimate.supremum([top for top, _ in tops], max(tops)[1]),
        grad_bound=Estimate.supremum([x for look in looks for x in look.largest]),
        sigma_l=_root_of_mean([(look.variance, look.error) for look in looks]),
        sigma_g=Estimate.supremum([look.gap for look in looks]),
        mu=Estimate.infimum([_steepness(objective, w, minimum) for w in points]),
    )


@dataclass(frozen=True)
class _Look:
    """What one client's data say at one point."""

    gap: float
    largest: list[float]
    variance: float
    error: float


def _look(objective: Objective, w: Tensor, whole: Tensor, client: int, data: Data) -> _Look:
    local = objective.gradient(w, client)
    each = objective.sample_gradients(w, data)
    squares = (each - local).square().sum(-1)
    return _Look(
        gap=float((local - whole).norm()),
        largest=each.abs().amax(-1).tolist(),
        variance=float(squares.mean()),
        error=float(squares.std(correction=0)) / math.sqrt(len(squares)),
    )


def _steepness(objective: Objective, w: Tensor, minimum: float) -> float:
    """‖∇F‖² / (2 (F − F*)), which the PŁ condition wants to be at least μ."""
    excess = objective.value(w) - minimum
    if not excess > 0:
        raise ValueError(f"minimum must be below the loss at every point, got {minimum}")
    return float(objective.gradient(w).square().sum()) / (2 * excess)


def top_curvature(
    product: Callable[[Tensor], Tensor], like: Tensor, iterations: int = 30, seed: int = 0
) -> tuple[float, float]:
    """The largest |eigenvalue| by power iteration, and a bound on its error.

    A symmetric matrix has an eigenvalue within ‖Hv − λv‖ of the Rayleigh quotient λ, so the largest
    is at least |λ| less that residual.

    >>> value, error = top_curvature(lambda v: torch.tensor([3.0, -5.0]) * v, torch.zeros(2))
    >>> round(value, 4), error < 1e-2
    (5.0, True)
    """
    draw = torch.Generator().manual_seed(torch_seed(seed, "power iteration"))
    v = torch.randn(like.shape, generator=draw, dtype=like.dtype).to(like.device)
    value, residual = 0.0, math.inf
    for _ in range(iterations):
        v = v / v.norm()
        image = product(v)
        value = float(image @ v)
        residual = float((image - value * v).norm())
        if not float(image.norm()) > 0 or residual <= 1e-3 * abs(value):
            break
        v = image
    return abs(value), residual


def _some(data: Data, samples: int, seed: int, client: int) -> Data:
    x, y = data
    if len(x) <= samples:
        return x, y
    rows = torch.from_numpy(stream(seed, "constants", client).choice(len(x), samples, False))
    return x[rows], y[rows]


def _root_of_mean(cells: Sequence[tuple[float, float]]) -> Estimate:
    """σ from the cell with the largest mean square, with the range of that mean."""
    mean, error = max(cells)
    low, high = mean - TWO_SIDED * error, mean + TWO_SIDED * error
    return Estimate(math.sqrt(mean), math.sqrt(max(low, 0.0)), math.sqrt(high), len(cells))
