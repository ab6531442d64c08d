"""SparseLoCo with the four levels of its authors' code."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from oracle import Gradient, Mask, Vector, adam, count, start, top_k
from oracles.common import Cohorts, mean_of


def four_levels(x: Vector) -> Vector:
    """Two bits a value: bins of 1.5 standard deviations around the mean, each read as its own mean.

    The bins end at mean - 2.25, - 0.75 and + 0.75 standard deviations. They are not symmetric.
    """
    mean = np.mean(x)
    deviation = np.linalg.norm(x - mean) / math.sqrt(x.size - 1) if x.size > 1 else 0.0
    width = 6 * deviation / 4 if deviation > 0 else 1.0
    code = np.clip(np.rint((x - mean) / width + 2), 0, 3)
    value = np.zeros_like(x)
    for level in range(4):
        if np.any(code == level):
            value[code == level] = np.mean(x[code == level])
    return value


def sparseloco(
    gradients: Sequence[Gradient],
    weights: Sequence[float],
    w0: npt.ArrayLike,
    cohorts: Cohorts,
    *,
    density: float,
    decay: float,
    outer_lr: float,
    local_steps: Sequence[int],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    chunk: int = 4096,
    block: int = 1024,
) -> Vector:
    """SparseLoCo (Sarfi et al., 2025): levels are of a block of values that are sent."""
    W, _, _ = start(w0)
    ms, vs, errors = ([np.zeros_like(W) for _ in gradients] for _ in range(3))

    def chunked_top_k(x: Vector) -> Mask:
        pieces = [x[first : first + chunk] for first in range(0, x.size, chunk)]
        return np.concatenate([top_k(piece, count(density, piece.size)) for piece in pieces])

    def compress(x: Vector) -> Vector:
        value, mask = np.zeros_like(x), chunked_top_k(x)
        kept = x[mask]
        pieces = [four_levels(kept[first : first + block]) for first in range(0, kept.size, block)]
        value[mask] = np.concatenate(pieces)
        return value

    for cohort in cohorts:
        sent = []
        for n in cohort:
            w, ms[n], vs[n] = adam(
                gradients[n], (W, ms[n], vs[n]), local_steps[n], lr, beta1, beta2, eps
            )
            errors[n] = decay * errors[n] + W - w
            hat = compress(errors[n])
            errors[n] = errors[n] - hat
            sent.append(hat)
        W = W - outer_lr * mean_of(cohort, sent, weights)
    return W
