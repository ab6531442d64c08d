"""Which shared mask is best: the true minimiser of Theorem 1's weighted error.

A mask that drops a set C of coordinates costs Γ√A + Λ√B + Θ√D, where (A, B, D) sums the squares of
ΔW, ΔM and ΔV over C. That is concave and increasing in y = (A, B, D), so its minimum over the
convex hull of all masks' points y lies at a corner, and a corner is what minimises some linear
function λ·y with λ ≥ 0: *the best mask is the top-k of λ₁ΔW² + λ₂ΔM² + λ₃ΔV² for some λ*. Three
numbers are to be found, not d bits. Every λ that is tried also cuts: no mask has λ·y below its
minimum. The cuts enclose the hull from outside, the least cost at a corner of what they leave is a
lower bound, and the search cuts there until both meet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsift.mask import top_k, top_k_union
from fedsift.theory.deviation import DeviationCoefficients
from fedsift.vector import Moments

Array = NDArray[np.float64]
MASKS: dict[str, Callable[[Moments, int], Tensor]] = {
    "W": lambda delta, k: top_k(delta.w, k),
    "M": lambda delta, k: top_k(delta.m, k),
    "V": lambda delta, k: top_k(delta.v, k),
    "union": top_k_union,
}
"""The shared masks of the paper's comparison: FedAdam-SSM, -SSM_M, -SSM_V and Fairness-Top."""


@dataclass(frozen=True)
class BestMask:
    """The best mask found and what it costs, in units of what it costs to send nothing.

    No mask costs less than ``lower``; ``weights`` are the λ whose top-k it is.
    """

    mask: Tensor
    cost: float
    lower: float
    weights: tuple[float, float, float]

    @property
    def gap(self) -> float:
        """How far the mask may be from the best, as a share of its cost."""
        return 0.0 if self.cost == 0 else 1 - self.lower / self.cost


@dataclass(frozen=True)
class Sparsification:
    """One client's (ΔW, ΔM, ΔV), each ``(d,)``, and the weights Γ, Λ, Θ of their errors."""

    delta: Moments
    weights: DeviationCoefficients

    def scaled(self) -> tuple[Array, Array]:
        """Squares ``(d, 3)``, each column summing to 1, and each column's share of the cost."""
        squares = torch.stack([x.double().square() for x in self.delta], dim=-1).numpy()
        totals = squares.sum(0)
        logs = np.array([self.weights.log_gamma, self.weights.log_lambda, self.weights.log_theta])
        with np.errstate(divide="ignore"):
            size = logs + 0.5 * np.log(totals)
        if not np.isfinite(size).any():
            raise ValueError("there is nothing to send: every update or every weight is zero")
        share = np.exp(size - size.max())
        return squares / np.where(totals > 0, totals, 1), share / share.sum()

    def cost(self, mask: Tensor) -> float:
        """Γ‖ΔW ⊙ (1 − mask)‖ + Λ‖…‖ + Θ‖…‖, in units of what it costs to send nothing.

        >>> x = Sparsification(Moments(*torch.eye(3)), DeviationCoefficients(0.0, 0.0, 0.0, 0.0))
        >>> round(x.cost(torch.tensor([True, False, False])), 4)
        0.6667
        """
        squares, share = self.scaled()
        return float(share @ np.sqrt(squares[~mask.numpy()].sum(0)))


def best_mask(
    problem: Sparsification, k: int, *, tolerance: float = 1e-4, cuts: int = 120
) -> BestMask:
    """The mask of k coordinates with the least weighted error, to a certified tolerance.

    >>> delta = Moments(torch.tensor([3.0, 2.9, 0.0]), torch.tensor([0.0, 1.0, 0.0]), torch.ones(3))
    >>> found = best_mask(Sparsification(delta, DeviationCoefficients(0.0, 1.0, -9.0, 0.0)), 1)
    >>> found.mask.tolist(), found.gap <= 1e-4
    ([False, True, False], True)
    """
    d = problem.delta.w.numel()
    if not 1 <= k <= d:
        raise ValueError(f"k must be between 1 and d = {d}, got {k}")
    squares, share = problem.scaled()
    hull = _Hull(squares, share, k)
    for normal in (*np.eye(3), share):
        hull.cut(normal)
    lower = 0.0
    for corner, between in hull.lowest(cuts):
        lower = float(share @ np.sqrt(corner))
        if lower >= (1 - tolerance) * hull.best_cost or not hull.cut(between, corner):
            break
    mask = torch.from_numpy(hull.kept(hull.best))
    first, second, third = hull.best.tolist()
    return BestMask(mask, hull.best_cost, min(lower, hull.best_cost), (first, second, third))


class _Hull:
    """The points y of all masks, enclosed by the cuts λ·y ≥ h that are known so far.

    Every λ sums to 1, so a cut is a point (λ₁, λ₂, h), and a corner v of what the cuts leave is a
    plane λ·v that touches these points from above: a facet of their upper convex hull.
    """

    def __init__(self, squares: Array, share: Array, k: int) -> None:
        self.squares, self.share, self.k = squares, share, k
        self.normals: list[Array] = []
        self.levels: list[float] = []
        self.best, self.best_cost = np.eye(3)[0], np.inf

    def kept(self, normal: Array) -> NDArray[np.bool_]:
        """The mask that minimises λ·y: the top-k of the squares weighted by λ."""
        chosen = np.zeros(len(self.squares), np.bool_)
        chosen[np.argpartition(-(self.squares @ normal), self.k - 1)[: self.k]] = True
        return chosen

    def cut(self, normal: Array, corner: Array | None = None) -> bool:
        """Ask for the minimum of λ·y; False if the corner given is not cut off by it."""
        point = self.squares[~self.kept(normal)].sum(0)
        cost = float(self.share @ np.sqrt(point))
        if cost < self.best_cost:
            self.best, self.best_cost = normal, cost
        self.normals.append(normal)
        self.levels.append(float(normal @ point))
        return corner is None or self.levels[-1] > float(normal @ corner) * (1 + 1e-12)

    def lowest(self, times: int) -> Iterator[tuple[Array, Array]]:
        """The corner of least cost and a λ between those that meet there, time and again."""
        for _ in range(times):
            yield min(self.corners(), key=lambda c: float(self.share @ np.sqrt(c[0])))

    def corners(self) -> Iterator[tuple[Array, Array]]:
        """Every corner of what the cuts leave."""
        from scipy.spatial import ConvexHull  # here, as the import takes a quarter of a second

        normals, levels = np.array(self.normals), np.array(self.levels)
        scale = max(float(levels.max()), np.finfo(float).tiny)
        below = [1 / 3, 1 / 3, -1.0]  # gives the hull a body where all cuts are in one plane
        points = np.vstack([np.column_stack([normals[:, :2], levels / scale]), below])
        hull = ConvexHull(points)
        for (a, b, up, offset), meeting in zip(hull.equations, hull.simplices, strict=True):
            if up > 1e-9:
                third = -offset / up
                corner = scale * np.array([third - a / up, third - b / up, third])
                yield np.maximum(corner, 0.0), normals[meeting].mean(0)


def mask_costs(problem: Sparsification, k: int) -> dict[str, float]:
    """The cost of each mask of :data:`MASKS` over the lower bound of all masks: 1 is optimal.

    >>> delta = Moments(torch.tensor([3.0, 2.9, 0.0]), torch.tensor([0.0, 1.0, 0.0]), torch.ones(3))
    >>> costs = mask_costs(Sparsification(delta, DeviationCoefficients(0.0, 1.0, -9.0, 0.0)), 1)
    >>> {name: round(cost, 2) for name, cost in costs.items()}
    {'W': 1.87, 'M': 1.0, 'V': 1.87, 'union': 1.87, 'best': 1.0}
    """
    best = best_mask(problem, k)
    rows = Moments(*(x[None] for x in problem.delta))
    if best.cost == 0:
        raise ValueError(f"a mask of k = {k} coordinates loses nothing: there is no best one")
    found = {name: problem.cost(mask(rows, k)[0]) for name, mask in MASKS.items()}
    return {name: cost / best.lower for name, cost in {**found, "best": best.cost}.items()}
