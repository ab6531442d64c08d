"""FedAvg: local SGD, and the mean by examples."""

from collections.abc import Sequence

import numpy.typing as npt

from oracle import Gradient, Vector, start
from oracles.common import Cohorts, local_sgd, mean_of


def fedavg(
    gradients: Sequence[Gradient],
    weights: Sequence[float],
    w0: npt.ArrayLike,
    cohorts: Cohorts,
    *,
    local_steps: Sequence[int],
    lr: float,
    momentum: float = 0.0,
) -> Vector:
    """FedAvg (McMahan et al., 2017), Algorithm 1: W <- sum_n (n_n / n) w_n.

    `weights` are the numbers of examples. A client has its own number of local steps: with
    epochs, it is epochs * ceil(examples / batch).
    """
    W, _, _ = start(w0)
    for cohort in cohorts:
        ws = [local_sgd(gradients[n], W, local_steps[n], lr, momentum) for n in cohort]
        W = mean_of(cohort, ws, weights)
    return W
