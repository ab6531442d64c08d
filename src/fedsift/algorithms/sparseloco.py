"""SparseLoCo: the top-k of every chunk in two bits, decaying error feedback, and an outer step.

A. Sarfi, B. Thérien, J. Lidin and E. Belilovsky, "Communication Efficient LLM Pre-training with
SparseLoCo", 2025 (arXiv 2508.15706).

The residual decays by 0.95 per round, 64 of every 4096 coordinates are sent, and the outer learning
rate is 1. Two bits encode -s, 0 and s, where s is the mean magnitude of 256 values.

Three things differ from the paper. The inner optimizer is this project's Adam without weight decay,
so that the methods differ only in what they send. Clients have the same weights as in every other
method. The paper's replicas gather each other's messages; here the server broadcasts the mean,
exactly, at every coordinate that any client sent.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

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
from fedsift.codec.update import CodedValues, Part, Parts, residual_after, sparse
from fedsift.codec.values import Linear
from fedsift.selection.masks import num_kept_per_chunk, top_k_per_chunk
from fedsift.vector import State

CHUNK = 4096
"""Consecutive coordinates that share a top-k mask."""
BLOCK = 256
"""Values that share a scale."""


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

    Uplink per client and round: k (2 + log₂ 4096) bits and the scales.

    >>> sparseloco().phase(1).paper_bits(8192)
    1824.0
    """

    def local_start(state: State, memory: Memory) -> State:
        return state.replace(m=memory["m"], v=memory["v"])

    def send(context: Context, update: LocalUpdate, memory: Memory) -> tuple[Parts, Memory]:
        start, end = update.start, update.end
        target = decay * memory["residual"] + end.w - start.w
        mask = top_k_per_chunk(target, density, CHUNK)
        part = two_bit_part(target, mask, num_kept_per_chunk(density, context.d, CHUNK))
        return (part,), {"m": end.m, "v": end.v, "residual": residual_after(target, part, "w")}

    def apply(context: Context, state: State, received: State) -> State:
        return state.replace(w=state.w + outer_lr * received.w)

    def paper_bits(d: int) -> float:
        k = num_kept_per_chunk(density, d, CHUNK)
        return k * (2 + math.log2(CHUNK)) + math.ceil(k / BLOCK) * Q

    step = AdamStep(lr, beta1, beta2, eps)
    phase = Phase(local_steps, step, send, paper_bits, local_start, apply=apply)
    return Algorithm(always(phase), client_memory=("m", "v", "residual"))


def two_bit_part(x: Tensor, mask: Tensor, k: int) -> Part:
    """Return the masked coordinates of x, each rounded to the nearest of -s, 0 and s."""
    (part,) = sparse({"w": x}, mask, k=k)
    exact = part.values["w"].restore()
    scale = mean_magnitudes(exact)
    rounded = torch.where(2 * exact.abs() < scale, 0, exact.sign() * scale)
    coder = Linear(2, block=BLOCK, float64_scales=x.dtype.itemsize > 4)
    return Part(part.indices, {"w": CodedValues.of(rounded, coder)})


def mean_magnitudes(x: Tensor) -> Tensor:
    """Return the mean magnitude of each value's block, for values ``(..., n)``.

    >>> mean_magnitudes(torch.tensor([[1.0, -3.0]]))
    tensor([[2., 2.]])
    """
    n = x.shape[-1]
    padded = torch.nn.functional.pad(x.abs(), (0, -n % BLOCK))
    blocks = padded.view(*x.shape[:-1], -1, BLOCK)
    sizes = torch.full_like(blocks[..., :1], BLOCK)
    sizes[..., -1, :] = n - (blocks.shape[-2] - 1) * BLOCK
    means: Tensor = blocks.sum(-1, keepdim=True) / sizes
    return means.expand_as(blocks).flatten(-2)[..., :n]
