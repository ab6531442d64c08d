"""FedProx: a proximal term in the local objective."""

from collections.abc import Sequence

import numpy.typing as npt

from oracle import Gradient, Vector, start
from oracles.common import Cohorts, mean_of


def fedprox(
    gradients: Sequence[Gradient],
    weights: Sequence[float],
    w0: npt.ArrayLike,
    cohorts: Cohorts,
    *,
    mu: float,
    local_steps: Sequence[int],
    lr: float,
) -> Vector:
    """FedProx (Li et al., 2020): clients minimize f_n(w) + mu/2 ||w - W||^2, by SGD."""
    W, _, _ = start(w0)
    for cohort in cohorts:
        ws = []
        for n in cohort:
            w = W
            for _ in range(local_steps[n]):
                w = w - lr * (gradients[n](w.copy()) + mu * (w - W))
            ws.append(w)
        W = mean_of(cohort, ws, weights)
    return W
