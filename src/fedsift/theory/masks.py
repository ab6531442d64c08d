"""The best shared mask: the minimizer of Theorem 1's weighted error.

A mask that drops a set C of coordinates costs Γ√A + Λ√B + Θ√D, where A, B and D are the sums of
the squares of ΔW, ΔM and ΔV over C. The cost is concave and increasing in y = (A, B, D), so its
minimum over the convex hull of the points y of all masks is at a corner. A corner minimizes some
linear function λ·y with λ ≥ 0. Therefore *the best mask is the top-k of λ₁ΔW² + λ₂ΔM² + λ₃ΔV² for
some λ*, and the search has three unknowns instead of d bits.

The search is a cutting-plane method. Every λ tried gives a cut, as no mask has λ·y below the
minimum. The cuts enclose the hull, and the least cost at a corner of the enclosure is a lower
bound. The next cut is placed at that corner, until the lower bound meets the best cost found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsift.selection.masks import top_k, top_k_union
from fedsift.theory.deviation import DeviationCoefficients
from fedsift.vector import State

Array = NDArray[np.float64]
MASKS: dict[str, Callable[[State, int], Tensor]] = {
    "W": lambda delta, k: top_k(delta.w, k),
    "M": lambda delta, k: top_k(delta.m, k),
    "V": lambda delta, k: top_k(delta.v, k),
    "union": top_k_union,
}
"""The shared masks that the paper compares: FedAdam-SSM, -SSM_M, -SSM_V and Fairness-Top."""


@dataclass(frozen=True)
class BestMask:
    """The best mask found, and its cost relative to the cost of sending nothing.

    No mask costs less than ``lower``. ``weights`` are the λ for which the mask is the top-k.
    """

    mask: Tensor
    cost: float
    lower: float
    weights: tuple[float, float, float]

    @property
    def gap(self) -> float:
        """The largest possible distance from the optimum, as a share of the cost."""
        return 0.0 if self.cost == 0 else 1 - self.lower / self.cost


@dataclass(frozen=True)
class Sparsification:
    """One client's (ΔW, ΔM, ΔV), each ``(d,)``, and the weights Γ, Λ, Θ of their errors."""

    delta: State
    weights: DeviationCoefficients

    @cached_property
    def scaled(self) -> tuple[Tensor, Array]:
        """Squares ``(3, d)`` with rows that sum to 1, and the share of each row in the cost."""
        squares = torch.stack([x.double().square() for x in self.delta])
        totals = squares.sum(-1, keepdim=True)
        logs = np.array([self.weights.log_gamma, self.weights.log_lambda, self.weights.log_theta])
        with np.errstate(divide="ignore"):
            size = logs + 0.5 * np.log(totals[:, 0].cpu().numpy())
        if not np.isfinite(size).any():
            raise ValueError("there is nothing to send: every update or every weight is zero")
        share = np.exp(size - size.max())
        return squares / torch.where(totals > 0, totals, 1), share / share.sum()

    def dropped_shares(self, mask: Tensor) -> Array:
        """Return the point y of a mask: the share of each sum of squares that it drops."""
        squares, _ = self.scaled
        found: Array = (squares * ~mask).sum(-1).cpu().numpy()
        return found

    def cost(self, mask: Tensor) -> float:
        """Return Γ‖ΔW ⊙ (1 − mask)‖ + Λ‖…‖ + Θ‖…‖, relative to the cost of sending nothing.

        >>> delta = State(w=torch.eye(3)[0], m=torch.eye(3)[1], v=torch.eye(3)[2])
        >>> x = Sparsification(delta, DeviationCoefficients(0.0, 0.0, 0.0, 0.0))
        >>> round(x.cost(torch.tensor([True, False, False])), 4)
        0.6667
        """
        _, share = self.scaled
        return float(share @ np.sqrt(self.dropped_shares(mask)))

    def linear_minimizer(self, normal: Array, k: int) -> Tensor:
        """Return the mask that minimizes λ·y: the top-k of the squares weighted by λ."""
        squares, _ = self.scaled
        return top_k(torch.from_numpy(normal).to(squares) @ squares, k)


def best_mask(
    problem: Sparsification, k: int, *, tolerance: float = 1e-4, cuts: int = 120
) -> BestMask:
    """Return the mask of k coordinates with the least weighted error, to a certified tolerance.

    >>> delta = State(w=torch.tensor([3.0, 2.9, 0.0]), m=torch.eye(3)[1], v=torch.ones(3))
    >>> found = best_mask(Sparsification(delta, DeviationCoefficients(0.0, 1.0, -9.0, 0.0)), 1)
    >>> found.mask.tolist(), found.gap <= 1e-4
    ([False, True, False], True)
    """
    d = problem.delta.w.numel()
    if not 1 <= k <= d:
        raise ValueError(f"k must be between 1 and d = {d}, got {k}")
    enclosure = _Enclosure(problem, k)
    _, share = problem.scaled
    enclosure.cut(share)
    lower = 0.0
    for _ in range(cuts):
        corner, normal = enclosure.cheapest_corner(share)
        lower = float(share @ np.sqrt(corner))
        if lower >= (1 - tolerance) * enclosure.best_cost or not enclosure.cut(normal, corner):
            break
    first, second, third = enclosure.best.tolist()
    mask = problem.linear_minimizer(enclosure.best, k)
    cost = enclosure.best_cost
    return BestMask(mask, cost, min(lower, cost), (first, second, third))


class _Enclosure:
    """A polytope that encloses the points y of all masks: the box [h, 1]³ and the cuts λ·y ≥ h.

    ``touches`` says which corner lies on which of these planes. Two corners with two planes in
    common share an edge.
    """

    def __init__(self, problem: Sparsification, k: int) -> None:
        self.problem, self.k = problem, k
        self.best, self.best_cost = np.eye(3)[0], np.inf
        self.normals = np.vstack([np.eye(3), -np.eye(3)])
        least = [float(normal @ self.minimum_point(normal)) for normal in np.eye(3)]
        at_top = np.array(list(product((False, True), repeat=3)))
        self.corners = np.where(at_top, 1.0, least)
        self.touches = np.hstack([~at_top, at_top])

    def minimum_point(self, normal: Array) -> Array:
        """Return the point y of the mask that minimizes λ·y, and remember the cheapest mask."""
        point = self.problem.dropped_shares(self.problem.linear_minimizer(normal, self.k))
        cost = float(self.problem.scaled[1] @ np.sqrt(point))
        if cost < self.best_cost:
            self.best, self.best_cost = normal, cost
        return point

    def cut(self, normal: Array, corner: Array | None = None) -> bool:
        """Cut off all points with λ·y below its minimum; return False if the corner remains."""
        level = float(normal @ self.minimum_point(normal))
        over = self.corners @ normal - level
        on = np.abs(over) <= 1e-13 * level
        out, inside = (over < 0) & ~on, (over > 0) & ~on
        common = self.touches[out][:, None] & self.touches[inside]
        a, b = np.nonzero(common.sum(-1) >= 2)
        below, above = over[out][a, None], over[inside][b, None]
        new = (above * self.corners[out][a] - below * self.corners[inside][b]) / (above - below)
        known = np.column_stack([self.touches[~out], on[~out]])
        fresh = np.column_stack([common[a, b], np.ones(len(new), np.bool_)])
        self.normals = np.vstack([self.normals, normal])
        self._set_corners(np.vstack([self.corners[~out], new]), np.vstack([known, fresh]))
        return corner is None or level > float(normal @ corner) * (1 + 1e-12)

    def _set_corners(self, corners: Array, touches: NDArray[np.bool_]) -> None:
        """Merge corners that differ only by rounding; otherwise every cut doubles them."""
        cells, group = np.unique(np.round(corners, 12), axis=0, return_inverse=True)
        self.corners = np.ones_like(cells)
        self.touches = np.zeros((len(cells), touches.shape[1]), np.bool_)
        np.minimum.at(self.corners, group.ravel(), corners)
        np.logical_or.at(self.touches, group.ravel(), touches)

    def cheapest_corner(self, share: Array) -> tuple[Array, Array]:
        """Return the corner of least cost, and the mean λ of the cuts that meet there.

        A coordinate of λ is halved where the corner is at the upper end of the box: that keeps λ
        between the cuts and nonnegative.
        """
        found = int(np.argmin(np.sqrt(self.corners) @ share))
        touched = self.touches[found].copy()
        at_top, touched[3:6] = touched[3:6].copy(), False
        normal = self.normals[touched].mean(0) * np.where(at_top, 0.5, 1.0)
        return self.corners[found], normal / normal.sum()


def mask_costs(problem: Sparsification, k: int) -> dict[str, float]:
    """Return the cost of each mask of :data:`MASKS` over the lower bound; 1 is optimal.

    >>> delta = State(w=torch.tensor([3.0, 2.9, 0.0]), m=torch.eye(3)[1], v=torch.ones(3))
    >>> costs = mask_costs(Sparsification(delta, DeviationCoefficients(0.0, 1.0, -9.0, 0.0)), 1)
    >>> {name: round(cost, 2) for name, cost in costs.items()}
    {'W': 1.87, 'M': 1.0, 'V': 1.87, 'union': 1.87, 'best': 1.0}
    """
    best = best_mask(problem, k)
    rows = problem.delta.map(lambda x: x[None])
    if best.cost == 0:
        raise ValueError(f"a mask of k = {k} coordinates loses nothing, so no mask is better")
    found = {name: problem.cost(mask(rows, k)[0]) for name, mask in MASKS.items()}
    return {name: cost / best.lower for name, cost in {**found, "best": best.cost}.items()}
