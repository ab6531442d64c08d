"""E-3SFC: an update travels as one synthetic sample whose gradient resembles it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from oracle import Gradient, Vector, start
from oracles.common import Array, Cohorts, local_sgd, mean_of


@dataclass(frozen=True)
class Sample:
    """The gradient in w of the loss of one sample (x, y), and its pullback to (x, y).

    `pullback(w, x, y, u)` is the gradient in x and y of the inner product of `gradient` and u.
    """

    gradient: Callable[[Vector, Array, Array], Vector]
    pullback: Callable[[Vector, Array, Array, Vector], tuple[Array, Array]]


def squares() -> Sample:
    """(x w - y)^2, for a linear model with one output."""

    def gradient(w: Vector, x: Array, y: Array) -> Vector:
        value: Vector = 2 * (x @ w - y[0]) * x
        return value

    def pullback(w: Vector, x: Array, y: Array, u: Vector) -> tuple[Array, Array]:
        return 2 * (x @ u) * w + 2 * (x @ w - y[0]) * u, np.array([-2 * (x @ u)])

    return Sample(gradient, pullback)


def cross_entropy(classes: int) -> Sample:
    """-sum_c y_c log softmax(A x)_c, with w the rows of A; y is any vector."""

    def softmax(w: Vector, x: Array) -> Array:
        powers = np.exp(w.reshape(classes, -1) @ x)
        probabilities: Array = powers / np.sum(powers)
        return probabilities

    def gradient(w: Vector, x: Array, y: Array) -> Vector:
        return np.ravel(np.outer(np.sum(y) * softmax(w, x) - y, x))

    def pullback(w: Vector, x: Array, y: Array, u: Vector) -> tuple[Array, Array]:
        A, U, p = w.reshape(classes, -1), u.reshape(classes, -1), softmax(w, x)
        centered = U @ x - p @ U @ x
        dx = U.T @ (np.sum(y) * p - y) + A.T @ (np.sum(y) * p * centered)
        return dx, -centered

    return Sample(gradient, pullback)


def cosine(a: Vector, b: Vector) -> float:
    lengths = np.linalg.norm(a) * np.linalg.norm(b)
    return float(a @ b / lengths) if lengths > 0 else 0.0


def synthesize(
    sample: Sample, w: Vector, r: Vector, x: Array, y: Array, steps: int, lr: float
) -> tuple[Array, Array, float]:
    """Descend on 1 - |cos(gradient(w; x, y), r)| from (x, y); then s = cos ||r|| / ||gradient||."""
    for _ in range(steps):
        g = sample.gradient(w, x, y)
        lengths = np.linalg.norm(g) * np.linalg.norm(r)
        if lengths == 0:
            break
        cos = cosine(g, r)
        slope = -np.sign(cos) * (r / lengths - cos * g / (g @ g))  # d(1 - |cos|) / dg
        dx, dy = sample.pullback(w, x, y, slope)
        x, y = x - lr * dx, y - lr * dy
    g = sample.gradient(w, x, y)
    length = np.linalg.norm(g)
    s = cosine(g, r) * np.linalg.norm(r) / length if length > 0 else 0.0
    return x, y, float(s)


def e3sfc(
    gradients: Sequence[Gradient],
    weights: Sequence[float],
    w0: npt.ArrayLike,
    cohorts: Cohorts,
    sample: Sample,
    client_start: Callable[[int, int], tuple[Array, Array]],  # (round, client) -> x, y
    server_start: Callable[[int], tuple[Array, Array]],  # round -> x, y
    *,
    local_steps: Sequence[int],
    lr: float,
    sample_steps: int,
    sample_lr: float,
) -> tuple[Vector, list[Vector], Vector]:
    """E-3SFC (Zhou et al., 2025): one synthetic sample up and one down, both with error feedback.

    Returns W, the clients' residuals r_n and the server's residual.
    """
    W, residual, _ = start(w0)
    residuals = [np.zeros_like(W) for _ in gradients]  # r_n

    def compress(r: Vector, x: Array, y: Array) -> Vector:
        x, y, s = synthesize(sample, W, r, x, y, sample_steps, sample_lr)
        return s * sample.gradient(W, x, y)  # what the receiver makes of x, y and s

    for t, cohort in enumerate(cohorts, 1):
        received = []
        for n in cohort:
            residuals[n] = residuals[n] + local_sgd(gradients[n], W, local_steps[n], lr) - W
            up = compress(residuals[n], *client_start(t, n))
            residuals[n] = residuals[n] - up
            received.append(up)
        residual = residual + mean_of(cohort, received, weights)
        down = compress(residual, *server_start(t))
        residual = residual - down
        W = W + down
    return W, residuals, residual
