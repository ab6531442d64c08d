"""What the oracles share: types, the mean over a cohort, and local SGD."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from oracle import Gradient, Vector, weighted_mean

Cohorts: TypeAlias = Sequence[Sequence[int]]
Loss: TypeAlias = Callable[[Vector], float]
Array: TypeAlias = npt.NDArray[np.float64]


def mean_of(cohort: Sequence[int], vectors: Sequence[Any], weights: Sequence[float]) -> Any:
    """The cohort's mean: sum_n weight_n x_n / sum_n weight_n over the clients that took part."""
    return weighted_mean(vectors, [weights[n] for n in cohort])


def local_sgd(
    gradient: Gradient, W: Vector, steps: int, lr: float, momentum: float = 0.0
) -> Vector:
    """Steps of SGD from W; the momentum starts at zero."""
    w, u = W, np.zeros_like(W)
    for _ in range(steps):
        u = momentum * u + gradient(w.copy())
        w = w - lr * u
    return w
