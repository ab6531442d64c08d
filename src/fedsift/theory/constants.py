"""Estimates of the theorems' constants ρ, G, σ_l, σ_g and μ for a model and a partition.

The theorems need suprema over all weights. Only the largest value at the measured points and
samples is available, so each :class:`Estimate` has a range. For a maximum, ``high`` is the 95 %
confidence limit of Robson and Whitlock (Biometrika 51, 1964) for the end of a distribution,
x₍ₙ₎ + 19 (x₍ₙ₎ − x₍ₙ₋₁₎).
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
from fedsift.task.samples import TensorPair, require_tensors
from fedsift.theory.objective import Objective

LAST_GAP_WEIGHT = 19.0
"""(1 − a)/a at a = 0.05: the weight of the last gap in a 95 % limit."""
TWO_SIDED_95 = NormalDist().inv_cdf(0.975)


@dataclass(frozen=True)
class Estimate:
    """A value from ``n`` observations and a confidence range for the constant."""

    value: float
    low: float
    high: float
    n: int

    @classmethod
    def supremum(cls, seen: Sequence[float], error: float = 0.0) -> Estimate:
        """Estimate a supremum; it is at least the largest value, up to the measurement error.

        >>> Estimate.supremum([1.0, 2.0, 2.5])
        Estimate(value=2.5, low=2.5, high=12.0, n=3)
        """
        *_, second, first = sorted([min(seen), *seen])
        high = first + error + LAST_GAP_WEIGHT * (first - second)
        return cls(first, max(first - error, 0.0), high, len(seen))

    @classmethod
    def infimum(cls, seen: Sequence[float]) -> Estimate:
        """Estimate an infimum; it is at most the smallest value, and at least zero.

        >>> Estimate.infimum([4.0, 2.0, 2.03125])
        Estimate(value=2.0, low=1.40625, high=2.0, n=3)
        """
        first, second, *_ = sorted([*seen, max(seen)])
        return cls(first, max(first - LAST_GAP_WEIGHT * (second - first), 0.0), first, len(seen))


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
    """Measure the constants at the given weights, on at most ``samples`` samples per client.

    ``minimum`` is F(w*), which μ needs. The default 0 is a lower bound for cross-entropy; a
    minimum that is too small makes the estimate of μ too small, never too large.

    >>> from fedsift.vector import Layout
    >>> model = nn.Linear(1, 1, bias=False)
    >>> data = [(torch.ones(4, 1), torch.zeros(4, 1))]
    >>> task = Task(model, nn.functional.mse_loss, data, None, None, 0, Layout.of(model))
    >>> found = estimate_constants(task, [torch.tensor([3.0])])  # f = w²
    >>> found.rho.value, found.grad_bound.value, found.sigma_l.value, found.mu.value
    (2.0, 6.0, 0.0, 2.0)
    """
    if not points:
        raise ValueError("points must have at least one vector of weights")
    objective = Objective(task)
    samples_of = [_subsample(data, samples, seed, n) for n, data in enumerate(task.clients)]
    curvatures = [
        top_curvature(objective.curvature(w, data), w, iterations, seed)
        for w in points for data in samples_of
    ]  # fmt: skip
    gradients = [
        _gradient_statistics(objective, w, global_gradient, n, data)
        for w, global_gradient in zip(points, map(objective.gradient, points), strict=True)
        for n, data in enumerate(samples_of)
    ]
    return Constants(
        rho=Estimate.supremum([value for value, _ in curvatures], max(curvatures)[1]),
        grad_bound=Estimate.supremum([x for found in gradients for x in found.largest]),
        sigma_l=_largest_deviation([(found.variance, found.error) for found in gradients]),
        sigma_g=Estimate.supremum([found.gap for found in gradients]),
        mu=Estimate.infimum([_pl_ratio(objective, w, minimum) for w in points]),
    )


@dataclass(frozen=True)
class _GradientStatistics:
    """The gradients of one client at one point.

    ``gap`` is ‖∇Fₙ − ∇F‖, ``largest`` the largest |coordinate| of each sample's gradient,
    ``variance`` the mean squared distance of these from ∇Fₙ, and ``error`` its standard error.
    """

    gap: float
    largest: list[float]
    variance: float
    error: float


def _gradient_statistics(
    objective: Objective, w: Tensor, global_gradient: Tensor, client: int, data: TensorPair
) -> _GradientStatistics:
    local = objective.gradient(w, client)
    per_sample = objective.sample_gradients(w, data)
    squares = (per_sample - local).square().sum(-1)
    return _GradientStatistics(
        gap=float((local - global_gradient).norm()),
        largest=per_sample.abs().amax(-1).tolist(),
        variance=float(squares.mean()),
        error=float(squares.std(correction=0)) / math.sqrt(len(squares)),
    )


def _pl_ratio(objective: Objective, w: Tensor, minimum: float) -> float:
    """‖∇F‖² / (2 (F − F*)); the PŁ condition requires at least μ."""
    excess = objective.value(w) - minimum
    if not excess > 0:
        raise ValueError(f"minimum must be below the loss at all points, got {minimum}")
    return float(objective.gradient(w).square().sum()) / (2 * excess)


def top_curvature(
    product: Callable[[Tensor], Tensor], like: Tensor, iterations: int = 30, seed: int = 0
) -> tuple[float, float]:
    """Return the largest |eigenvalue| by power iteration, and a bound on its error.

    A symmetric matrix has an eigenvalue within ‖Hv − λv‖ of the Rayleigh quotient λ, so the largest
    |eigenvalue| is at least |λ| minus that residual.

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


def _subsample(data: Data, samples: int, seed: int, client: int) -> TensorPair:
    x, y = require_tensors(data)
    if len(x) <= samples:
        return x, y
    rows = torch.from_numpy(stream(seed, "constants", client).choice(len(x), samples, False))
    return x[rows], y[rows]


def _largest_deviation(variances: Sequence[tuple[float, float]]) -> Estimate:
    """The standard deviation from the largest (variance, standard error), with its 95 % range."""
    variance, error = max(variances)
    low, high = variance - TWO_SIDED_95 * error, variance + TWO_SIDED_95 * error
    return Estimate(math.sqrt(variance), math.sqrt(max(low, 0.0)), math.sqrt(high), len(variances))
