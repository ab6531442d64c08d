"""The oracle: the paper's methods in plain NumPy float64, to check the real implementation against.

A transcription of FedAdam-SSM and of its baselines, independent of `fedsift` (it imports only
NumPy) and written to be obviously right rather than fast. Numbers in comments are the equations
of `fedadam-ssm.tex`, sections III and IV; the rest follows docs/explanation/paper.md.

`gradients` has one function w -> full-batch gradient per client, `weights` the clients' mini-batch
sizes. Every method returns the global (W, M, V) after its last round, from M^0 = V^0 = 0.
"""

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Vector: TypeAlias = npt.NDArray[np.float64]
Mask: TypeAlias = npt.NDArray[np.bool_]
Gradient: TypeAlias = Callable[[Vector], Vector]
State: TypeAlias = tuple[Vector, Vector, Vector]  # W, M, V
# (dW, dM, dV, k) -> the masks of dW, dM, dV
Masks: TypeAlias = Callable[[Vector, Vector, Vector, int], tuple[Mask, Mask, Mask]]


def count(density: float, d: int) -> int:
    """k, from the sparsification ratio alpha = k / d."""
    return max(1, round(density * d))


def top_k(x: Vector, k: int) -> Mask:
    """The sparse mask of Top_k (7): exactly k ones; ties go to the lower index."""
    order = np.argsort(-np.abs(x), kind="stable")
    mask = np.zeros(x.size, dtype=np.bool_)
    mask[order[:k]] = True
    return mask


def weighted_mean(vectors: Sequence[Vector], weights: Sequence[float]) -> Vector:
    """FedAvg: sum_n |D~_n| x_n / sum_n |D~_n|."""
    total = np.zeros_like(vectors[0])
    for x, weight in zip(vectors, weights, strict=True):
        total = total + weight * x
    return total / sum(weights)


def start(w0: npt.ArrayLike) -> State:
    """W^0, M^0 = 0, V^0 = 0."""
    w = np.array(w0, dtype=np.float64)
    return w, np.zeros_like(w), np.zeros_like(w)


# Local training


def adam(
    gradient: Gradient,
    state: State,
    steps: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    clip: float = math.inf,
) -> State:
    """Steps of Adam: no bias correction, epsilon inside the square root."""
    w, m, v = state
    for _ in range(steps):
        g = gradient(w.copy())
        g = g * min(1.0, clip / np.linalg.norm(g))
        m = beta1 * m + (1 - beta1) * g  # (4)
        v = beta2 * v + (1 - beta2) * g**2  # (5)
        w = w - lr * m / np.sqrt(v + eps)  # (3)
    return w, m, v


def sgd(gradient: Gradient, w: Vector, steps: int, lr: float) -> Vector:
    """Steps of SGD (2)."""
    for _ in range(steps):
        w = w - lr * gradient(w.copy())
    return w


def centralized_adam(
    gradient: Gradient,
    w0: npt.ArrayLike,
    steps: int,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
) -> State:
    """Adam on one machine: (3)-(5)."""
    return adam(gradient, start(w0), steps, lr, beta1, beta2, eps)


# The FedAdam family


def federated_adam(
    gradients: Sequence[Gradient],
    weights: Sequence[float],
    w0: npt.ArrayLike,
    rounds: int,
    masks: Masks,
    density: float,
    local_steps: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
) -> State:
    """Algorithm 1; the methods of the family differ only in their masks."""
    W, M, V = start(w0)
    k = count(density, W.size)
    for _ in range(rounds):
        dW_hats, dM_hats, dV_hats = [], [], []
        for gradient in gradients:
            w, m, v = adam(gradient, (W, M, V), local_steps, lr, beta1, beta2, eps)
            dW, dM, dV = w - W, m - M, v - V
            mask_W, mask_M, mask_V = masks(dW, dM, dV, k)
            dM_hats.append(dM * mask_M)  # (8)
            dV_hats.append(dV * mask_V)  # (9)
            dW_hats.append(dW * mask_W)  # (10)
        W = W + weighted_mean(dW_hats, weights)
        M = M + weighted_mean(dM_hats, weights)
        V = V + weighted_mean(dV_hats, weights)
    return W, M, V


def fedadam_ssm(
    gradients: Sequence[Gradient],
    weights: Sequence[float],
    w0: npt.ArrayLike,
    rounds: int,
    *,
    density: float,
    local_steps: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
) -> State:
    """FedAdam-SSM: the shared mask is the top-k of dW."""

    def masks(dW: Vector, dM: Vector, dV: Vector, k: int) -> tuple[Mask, Mask, Mask]:
        shared = top_k(dW, k)
        return shared, shared, shared

    return federated_adam(
        gradients, weights, w0, rounds, masks, density, local_steps, lr, beta1, beta2, eps
    )


def fedadam_ssm_m(
    gradients: Sequence[Gradient],
    weights: Sequence[float],
    w0: npt.ArrayLike,
    rounds: int,
    *,
    density: float,
    local_steps: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
) -> State:
    """FedAdam-SSM_M: the shared mask is the top-k of dM."""

    def masks(dW: Vector, dM: Vector, dV: Vector, k: int) -> tuple[Mask, Mask, Mask]:
        shared = top_k(dM, k)
        return shared, shared, shared

    return federated_adam(
        gradients, weights, w0, rounds, masks, density, local_steps, lr, beta1, beta2, eps
    )


def fedadam_ssm_v(
    gradients: Sequence[Gradient],
    weights: Sequence[float],
    w0: npt.ArrayLike,
    rounds: int,
    *,
    density: float,
    local_steps: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
) -> State:
    """FedAdam-SSM_V: the shared mask is the top-k of dV."""

    def masks(dW: Vector, dM: Vector, dV: Vector, k: int) -> tuple[Mask, Mask, Mask]:
        shared = top_k(dV, k)
        return shared, shared, shared

    return federated_adam(
        gradients, weights, w0, rounds, masks, density, local_steps, lr, beta1, beta2, eps
    )


def fairness_top(
    gradients: Sequence[Gradient],
    weights: Sequence[float],
    w0: npt.ArrayLike,
    rounds: int,
    *,
    density: float,
    local_steps: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
) -> State:
    """Fairness-Top: the shared mask is the top-k of max(|dW|, |dM|, |dV|)."""

    def masks(dW: Vector, dM: Vector, dV: Vector, k: int) -> tuple[Mask, Mask, Mask]:
        union = np.maximum(np.maximum(np.abs(dW), np.abs(dM)), np.abs(dV))
        shared = top_k(union, k)
        return shared, shared, shared

    return federated_adam(
        gradients, weights, w0, rounds, masks, density, local_steps, lr, beta1, beta2, eps
    )


def fedadam_top(
    gradients: Sequence[Gradient],
    weights: Sequence[float],
    w0: npt.ArrayLike,
    rounds: int,
    *,
    density: float,
    local_steps: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
) -> State:
    """FedAdam-Top: each tensor has its own mask (the paper prints that of dM three times)."""

    def masks(dW: Vector, dM: Vector, dV: Vector, k: int) -> tuple[Mask, Mask, Mask]:
        return top_k(dW, k), top_k(dM, k), top_k(dV, k)

    return federated_adam(
        gradients, weights, w0, rounds, masks, density, local_steps, lr, beta1, beta2, eps
    )


def fedadam(
    gradients: Sequence[Gradient],
    weights: Sequence[float],
    w0: npt.ArrayLike,
    rounds: int,
    *,
    local_steps: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
) -> State:
    """FedAdam: nothing is masked."""

    def masks(dW: Vector, dM: Vector, dV: Vector, k: int) -> tuple[Mask, Mask, Mask]:
        everything = np.ones(dW.size, dtype=np.bool_)
        return everything, everything, everything

    return federated_adam(
        gradients, weights, w0, rounds, masks, 1.0, local_steps, lr, beta1, beta2, eps
    )


# FedSGD


def fedsgd(
    gradients: Sequence[Gradient],
    weights: Sequence[float],
    w0: npt.ArrayLike,
    rounds: int,
    *,
    local_steps: int,
    lr: float,
) -> State:
    """FedSGD: local SGD (2), then the weighted mean."""
    W, M, V = start(w0)
    for _ in range(rounds):
        dWs = [sgd(gradient, W, local_steps, lr) - W for gradient in gradients]
        W = W + weighted_mean(dWs, weights)
    return W, M, V


def sparse_fedsgd(
    gradients: Sequence[Gradient],
    weights: Sequence[float],
    w0: npt.ArrayLike,
    rounds: int,
    *,
    density: float,
    local_steps: int,
    lr: float,
) -> State:
    """Sparse FedSGD: FedSGD that sends Top_k(dW) (6)."""
    W, M, V = start(w0)
    k = count(density, W.size)
    for _ in range(rounds):
        dW_hats = []
        for gradient in gradients:
            dW = sgd(gradient, W, local_steps, lr) - W
            dW_hats.append(dW * top_k(dW, k))  # (6)
        W = W + weighted_mean(dW_hats, weights)
    return W, M, V


# The quantized baselines: one local step a round, error feedback on both sides


def one_bit(x: Vector) -> Vector:
    """C(x) = (||x||_2 / sqrt(d)) sign(x), with sign(0) = +1: one bit a coordinate."""
    scale = np.sqrt(np.sum(x**2)) / np.sqrt(x.size)
    value: Vector = np.where(x >= 0, scale, -scale)
    return value


def quantize(x: Vector, bits: int) -> Vector:
    """Q(x): uniform on [-max|x|, max|x|], s = 2^(bits-1) - 1 levels a side; half to even."""
    assert bits >= 2
    s = 2 ** (bits - 1) - 1
    scale = np.max(np.abs(x))
    if scale == 0:
        return np.zeros_like(x)
    code = np.rint(x / scale * s)
    value: Vector = code * (scale / s)
    return value


def onebit_adam(
    gradients: Sequence[Gradient],
    weights: Sequence[float],
    w0: npt.ArrayLike,
    rounds: int,
    *,
    warmup_rounds: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
) -> State:
    """1-bit Adam (Tang et al., ICML 2021). `rounds` counts the warm-up rounds too."""
    warmup = min(warmup_rounds, rounds)
    W, M, V = fedadam(
        gradients, weights, w0, warmup, local_steps=1, lr=lr, beta1=beta1, beta2=beta2, eps=eps
    )
    residuals = [np.zeros_like(W) for _ in gradients]  # e_n
    residual = np.zeros_like(W)  # e, the server's
    for _ in range(rounds - warmup):  # V is frozen
        sent = []
        for n, gradient in enumerate(gradients):
            m = beta1 * M + (1 - beta1) * gradient(W.copy())  # (4)
            c = one_bit(m + residuals[n])
            residuals[n] = m + residuals[n] - c
            sent.append(c)
        mean = weighted_mean(sent, weights)
        M = one_bit(mean + residual)
        residual = mean + residual - M
        W = W - lr * M / np.sqrt(V + eps)  # (3)
    return W, M, V


def efficient_adam(
    gradients: Sequence[Gradient],
    weights: Sequence[float],
    w0: npt.ArrayLike,
    rounds: int,
    *,
    bits: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
) -> State:
    """Efficient Adam (Chen et al., 2022). Moments stay with the clients; global M = V = 0."""
    W, M, V = start(w0)
    ms = [np.zeros_like(W) for _ in gradients]  # m_n
    vs = [np.zeros_like(W) for _ in gradients]  # v_n
    residuals = [np.zeros_like(W) for _ in gradients]  # e_n
    residual = np.zeros_like(W)  # e, the server's
    for _ in range(rounds):
        sent = []
        for n, gradient in enumerate(gradients):
            g = gradient(W.copy())
            ms[n] = beta1 * ms[n] + (1 - beta1) * g  # (4)
            vs[n] = beta2 * vs[n] + (1 - beta2) * g**2  # (5)
            u = -lr * ms[n] / np.sqrt(vs[n] + eps)  # (3)
            c = quantize(u + residuals[n], bits)
            residuals[n] = u + residuals[n] - c
            sent.append(c)
        mean = weighted_mean(sent, weights)
        broadcast = quantize(mean + residual, bits)
        residual = mean + residual - broadcast
        W = W + broadcast
    return W, M, V


# Competitors of sift


def fedadamw(
    gradients: Sequence[Gradient],
    weights: Sequence[float],
    w0: npt.ArrayLike,
    rounds: int,
    *,
    correction: float,
    weight_decay: float,
    local_steps: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    block: int = 256,
) -> State:
    """FedAdamW (Liu et al., 2025). The global M is the last global update."""
    W, last, V = start(w0)
    for _ in range(rounds):
        ws, means = [], []
        for gradient in gradients:
            w, m, v = W + correction * last, np.zeros_like(W), V
            for _ in range(local_steps):
                g = gradient(w.copy())
                m = beta1 * m + (1 - beta1) * g
                v = beta2 * v + (1 - beta2) * g**2
                w = w - lr * (weight_decay * w + m / np.sqrt(v + eps))
            ws.append(w)
            means.append(np.array([np.mean(v[i : i + block]) for i in range(0, v.size, block)]))
        last = weighted_mean(ws, weights) - W
        W = W + last
        V = np.repeat(weighted_mean(means, weights), block)[: W.size]
    return W, last, V


# sift


def log_quantize(x: Vector, bits: int) -> Vector:
    """The nearest of 0 and +-scale 2^(-R (L - l) / (L - 1)), l = 1..L, R = 2 (bits - 1)."""
    top, octaves = 2 ** (bits - 1) - 1, 2 * (bits - 1)
    scale = np.max(np.abs(x))
    if scale == 0:
        return np.zeros_like(x)
    above = [np.float32(2 ** (-octaves * i / (top - 1))) for i in reversed(range(top))]
    levels = np.array([0.0, *above])
    nearest = np.argmin(np.abs(np.abs(x / scale)[:, None] - levels), axis=1)
    value: Vector = np.sign(x) * levels[nearest] * scale
    return value


def sift(
    gradients: Sequence[Gradient],
    weights: Sequence[float],
    w0: npt.ArrayLike,
    rounds: int,
    *,
    density: float,
    down_density: float,
    decay: float,
    bits: int,
    momentum: float,
    clip: float,
    warmup_rounds: int,
    average: float,
    local_steps: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
) -> tuple[Vector, Vector, Vector, Vector]:
    """Error feedback on dW that fades; dV under the same mask; M = 0; momentum on the server.

    The fourth result is the model: W's average.
    """
    W, M, V = start(w0)
    A = W
    up, down = count(density, W.size), count(down_density, W.size)
    residuals = [np.zeros_like(W) for _ in gradients]  # e_n
    velocity, residual_w, residual_v = (np.zeros_like(W) for _ in range(3))  # the server's

    def sifted(w: Vector, v: Vector, k: int) -> tuple[Vector, Vector]:
        mask = top_k(w, k)
        sent_w, sent_v = np.zeros_like(w), np.zeros_like(v)
        sent_w[mask] = quantize(w[mask], bits)
        sent_v[mask] = log_quantize(v[mask], 4)
        return sent_w, sent_v

    for t in range(1, rounds + 1):
        dW_hats, dV_hats = [], []
        bound = clip * min(1, math.ceil(4 * t / warmup_rounds) / 4)
        for n, gradient in enumerate(gradients):
            w, _, v = adam(gradient, (W, M, V), local_steps, lr, beta1, beta2, eps, bound)
            u = w - W + decay * residuals[n]
            sent_w, sent_v = sifted(u, v - V, up)
            residuals[n] = u - sent_w
            dW_hats.append(sent_w)
            dV_hats.append(sent_v)
        velocity = momentum * velocity + weighted_mean(dW_hats, weights)
        step_w = momentum * velocity + weighted_mean(dW_hats, weights) + residual_w
        step_v = weighted_mean(dV_hats, weights) + residual_v
        sent_w, sent_v = sifted(step_w, step_v, down)
        residual_w, residual_v = step_w - sent_w, step_v - sent_v
        W, V = W + sent_w, np.maximum(V + sent_v, 0)
        A = A + (W - A) / (1 + average * (t - 1))
    return W, M, V, A
