"""DeComFL and FeedSign: forward passes along shared random directions; only scalars travel."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from oracle import Vector, start
from oracles.common import Array, Cohorts, Loss, mean_of

Directions: TypeAlias = Callable[[int, int, int], Vector]  # (round, step, perturbation) -> z


def sign(x: Array) -> Array:
    """One bit a value: sign(0) = +1."""
    value: Array = np.where(x >= 0, 1.0, -1.0)
    return value


def zeroth_order(loss: Loss, w: Vector, zs: Sequence[Vector], mu: float) -> Array:
    """The slope of the loss along each direction, by central differences."""
    return np.array([(loss(w + mu * z) - loss(w - mu * z)) / (2 * mu) for z in zs])


def move(w: Vector, scalars: Array, zs: Sequence[Vector], lr: float) -> Vector:
    """w - lr * mean_p(g_p z_p)."""
    total = np.zeros_like(w)
    for g, z in zip(scalars, zs, strict=True):
        total = total + g * z
    return w - lr * total / len(zs)


def decomfl(
    losses: Sequence[Loss],
    weights: Sequence[float],
    w0: npt.ArrayLike,
    cohorts: Cohorts,
    directions: Directions,
    *,
    local_steps: int,
    perturbations: int,
    lr: float,
    mu: float,
    bits: int = 32,
) -> tuple[Vector, list[Array], list[Vector]]:
    """DeComFL (Li et al., 2025). With bits=1 it is FeedSign (Cai et al., 2025).

    FeedSign sends signs and takes their majority; a tie is +1. It has one step and one perturbation
    per round; with more, clients step along their own signs, which is what they send. The papers'
    weights are equal.

    Returns W, the mean scalars of each round (steps x perturbations), and the clients' own models
    once they have caught up.
    """
    W, _, _ = start(w0)
    models = [W for _ in losses]
    seen = [0 for _ in losses]  # the last round that is in the client's model
    history: list[Array] = []

    def along(t: int, k: int) -> list[Vector]:
        return [directions(t, k, p) for p in range(perturbations)]

    def replay(w: Vector, t: int) -> Vector:
        for k in range(local_steps):
            w = move(w, history[t - 1][k], along(t, k), lr)
        return w

    def catch_up(n: int) -> None:
        for t in range(seen[n] + 1, len(history) + 1):
            models[n] = replay(models[n], t)
        seen[n] = len(history)

    for t, cohort in enumerate(cohorts, 1):
        sent = []
        for n in cohort:
            catch_up(n)
            w, own = models[n], []  # w is forgotten after the round: the client is reset
            for k in range(local_steps):
                g = zeroth_order(losses[n], w, along(t, k), mu)
                g = sign(g) if bits == 1 else g
                w = move(w, g, along(t, k), lr)
                own.append(g)
            sent.append(np.array(own))
        mean = mean_of(cohort, sent, weights)
        history.append(sign(mean) if bits == 1 else mean)
        W = replay(W, t)
    for n in range(len(losses)):
        catch_up(n)
    return W, history, models
