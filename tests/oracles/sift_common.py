"""sift_common: one mask for all clients, by nomination, and sums of whole numbers."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from oracle import Gradient, Vector, adam, count, quantize, start, top_k
from oracles.common import Cohorts, mean_of


def sift_common(
    gradients: Sequence[Gradient],
    weights: Sequence[float],
    w0: npt.ArrayLike,
    cohorts: Cohorts,
    *,
    density: float,
    shares: int,
    ahead: float,
    ahead_elsewhere: float,
    decay: float,
    largest: int,
    momentum: float,
    clip: float,
    warmup_rounds: int,
    average: float,
    local_steps: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
) -> tuple[Vector, Vector, Vector, Vector, Vector]:
    """Return W, the velocity, V, the grid and the model, which is W's average."""
    W, _, V = start(w0)
    A, d = W, W.size
    k = count(density, d)
    groups = min(max(shares // 5, 1), d)
    named = min(math.ceil(k / shares), d // groups)
    with_v = math.ceil(k / 5)
    e = [np.zeros(d) for _ in gradients]
    velocity, left_w, left_v, grid = np.zeros(d), np.zeros(d), np.zeros(d), np.zeros(d)
    mask: list[int] = []
    unit = 0.0

    for t, cohort in enumerate(cohorts, 1):
        bound = clip * min(1, math.ceil(4 * t / warmup_rounds) / 4) if clip else math.inf
        window = [mask[(t * with_v + j) % k] for j in range(with_v)] if mask else []
        sent_w, sent_v, votes, units = [], [], [], []
        for n in cohort:
            begin = W + decay * np.where(grid > 0, ahead, ahead_elsewhere) * e[n]
            w, _, v = adam(
                gradients[n], (begin, np.zeros(d), V), local_steps, lr, beta1, beta2, eps, bound
            )
            u = w - begin + decay * e[n]
            sent = np.zeros(d)
            for i in mask:
                sent[i] = np.clip(np.round(u[i] / unit), -largest, largest)
            rise = np.zeros(d)
            for i in window:
                change = np.log(1 + v[i] / eps) - np.log(1 + V[i] / eps)
                rise[i] = np.clip(np.round(change / 0.5), -largest, largest)
            e[n] = u - unit * sent
            wanted = w - begin + decay * e[n]
            share = [(n + t + j * groups) % d for j in range(d // groups)]
            top = sorted(share, key=lambda i, x=wanted: -abs(x[i]))[:named]
            own = np.mean(np.abs(wanted[top])) / 3
            vote = np.zeros(d)
            vote[top] = own
            sent_w.append(sent)
            sent_v.append(rise)
            votes.append(vote)
            units.append(own)

        step = np.zeros(d)
        if mask:
            mean_w = mean_of(cohort, sent_w, weights)[mask] + left_w[mask] / unit
            mean_v = mean_of(cohort, sent_v, weights)[window] + left_v[window]
            values = np.concatenate([mean_w, mean_v])
            restored = quantize(values, 6)
            step[mask] = unit * restored[:k]
            left_w[mask] = unit * (values - restored)[:k]
            left_v[window] = (values - restored)[k:]
            rise = np.log(1 + V[window] / eps) + 0.5 * restored[k:]
            V = V.copy()
            V[window] = eps * (np.exp(np.maximum(rise, 0)) - 1)
        velocity = momentum * velocity + step
        W = W + momentum * velocity + step
        A = A + (W - A) / (1 + average * (t - 1))

        vote = mean_of(cohort, votes, weights)
        speed = np.abs(velocity)
        score = np.where(vote > 0, speed.max() + vote, speed)
        mask = [int(i) for i in np.flatnonzero(top_k(score, k))]
        unit = float(mean_of(cohort, units, weights))
        grid = np.zeros(d)
        grid[mask] = unit
    return W, velocity, V, grid, A
