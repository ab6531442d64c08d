"""SCAFFOLD: control variates on clients and server."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from oracle import Gradient, Vector, start
from oracles.common import Cohorts, mean_of


def scaffold(
    gradients: Sequence[Gradient],
    weights: Sequence[float],
    w0: npt.ArrayLike,
    cohorts: Cohorts,
    *,
    local_steps: Sequence[int],
    lr: float,
    server_lr: float = 1.0,
) -> tuple[Vector, Vector, list[Vector]]:
    """SCAFFOLD (Karimireddy et al., 2020), Algorithm 1 with option II.

    The paper's weights are equal. Returns W, the server's control variate c and the clients' c_n.
    """
    W, c, _ = start(w0)
    cs = [np.zeros_like(W) for _ in gradients]  # c_n
    for cohort in cohorts:
        dWs, dcs = [], []
        for n in cohort:
            w = W
            for _ in range(local_steps[n]):
                w = w - lr * (gradients[n](w.copy()) - cs[n] + c)
            new = cs[n] - c + (W - w) / (local_steps[n] * lr)  # option II
            dWs.append(w - W)
            dcs.append(new - cs[n])
            cs[n] = new
        W = W + server_lr * mean_of(cohort, dWs, weights)
        c = c + len(cohort) / len(gradients) * mean_of(cohort, dcs, weights)
    return W, c, cs
