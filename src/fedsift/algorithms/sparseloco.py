"""SparseLoCo: the top-k of every chunk in two bits, decaying error feedback, and an outer step.

A. Sarfi, B. Thérien, J. Lidin and E. Belilovsky, "Communication Efficient LLM Pre-training with
SparseLoCo", 2025 (arXiv 2508.15706).

The residual decays by 0.95 per round, 64 of every 4096 coordinates are sent, and the outer learning
rate is 1. Two bits encode four levels, as in the authors' code: the means of the values in four
bins around the mean (:class:`fedsift.codec.Means`).

Four things differ from the paper. Chunks are consecutive coordinates of the whole vector, and
levels those of 1024 sent values; the authors cut each tensor into chunks of 64 × 64, and each has
its own levels. The inner optimizer is this project's Adam without weight decay,
so that the methods differ only in what they send. Clients have the same weights as in every other
method. The paper's replicas gather each other's messages; here the server broadcasts the mean,
exactly, at every coordinate that any client sent.
"""

from __future__ import annotations

import math

from fedsift.adam import AdamStep
from fedsift.algorithms.method import Algorithm, Context, LocalUpdate, Memory, Phase, Q, always
from fedsift.algorithms.registry import method
from fedsift.algorithms.settings import (
    Beta1,
    Beta2,
    Density,
    Epsilon,
    LearningRate,
    LocalSteps,
    ResidualDecay,
    ServerLearningRate,
)
from fedsift.codec.update import Parts, residual_after, sparse
from fedsift.codec.values import Means
from fedsift.selection.masks import num_kept_per_chunk, top_k_per_chunk
from fedsift.vector import State

CHUNK = 4096
"""Consecutive coordinates that share a top-k mask."""
BLOCK = 1024
"""Sent values that share four levels."""


@method("sparseloco", label="SparseLoCo", color="#16202a", dashed=True)
def sparseloco(
    density: Density = 1 / 64,
    decay: ResidualDecay = 0.95,
    outer_lr: ServerLearningRate = 1.0,
    local_steps: LocalSteps = 30,
    lr: LearningRate = 1e-3,
    beta1: Beta1 = 0.9,
    beta2: Beta2 = 0.999,
    eps: Epsilon = 1e-6,
) -> Algorithm:
    """Local Adam with the top-k of every chunk of ΔW sent in two bits, with error feedback.

    Uplink per client and round: k (2 + log₂ 4096) bits and the levels.

    >>> sparseloco().phase(1).paper_bits(8192)
    1920.0
    """

    def local_start(state: State, memory: Memory) -> State:
        return State(w=state.w, m=memory["m"], v=memory["v"])

    def send(context: Context, update: LocalUpdate, memory: Memory) -> tuple[Parts, Memory]:
        start, end = update.start, update.end
        target = decay * memory["residual"] + end.w - start.w
        mask = top_k_per_chunk(target, density, CHUNK)
        k = num_kept_per_chunk(density, context.d, CHUNK)
        coder = Means(BLOCK, float64_scales=target.dtype.itemsize > 4)
        (part,) = sparse({"w": target}, mask, {"w": coder}, k=k)
        return (part,), {"m": end.m, "v": end.v, "residual": residual_after(target, part, "w")}

    def apply(context: Context, state: State, received: State) -> State:
        return state.replace(w=state.w + outer_lr * received.w)

    def paper_bits(d: int) -> float:
        k = num_kept_per_chunk(density, d, CHUNK)
        return k * (2 + math.log2(CHUNK)) + math.ceil(k / BLOCK) * 4 * Q

    step = AdamStep(lr, beta1, beta2, eps)
    phase = Phase(local_steps, step, send, paper_bits, local_start=local_start, apply=apply)
    return Algorithm(always(phase), client_memory=("m", "v", "residual"), state=("w",))
