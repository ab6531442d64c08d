"""FedAdamW: local AdamW that follows the last global update, with V sent as block means.

J. Liu, F. Shang, K. Zhu, H. Liu, Y. Liu and J. Liu, "FedAdamW: A Communication-Efficient Optimizer
with Convergence and Generalization Guarantees for Federated Large Models", 2025 (arXiv 2510.27486),
Algorithm 1.

The defaults α = 0.5 and λ = 0.01 (decoupled weight decay) are this project's choice. Three things
differ from the paper. The paper adds a share of α times the last global update to each of the L
local steps; here a client adds all of it before its first step, which has the same sum. The paper's
blocks follow a Transformer's structure; here a block is 256 consecutive coordinates. As everywhere
in this project, ε is inside the square root and there is no bias correction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from fedsift.adam import AdamStep
from fedsift.algorithms.method import Algorithm, Context, LocalUpdate, Memory, Phase, Q, always
from fedsift.algorithms.registry import method
from fedsift.algorithms.settings import (
    BELOW_ONE,
    NONNEGATIVE,
    Beta1,
    Beta2,
    Epsilon,
    LearningRate,
    LocalSteps,
    Setting,
)
from fedsift.algorithms.step_context import StepContext
from fedsift.codec.update import Parts, dense, sparse
from fedsift.vector import State

BLOCK = 256
"""Consecutive coordinates of V that are sent as their mean."""
Correction = Annotated[
    float, Setting("α, the share of the last global update that clients repeat", BELOW_ONE)
]
WeightDecay = Annotated[float, Setting("λ, the decoupled weight decay", NONNEGATIVE)]


@method("fedadamw", label="FedAdamW", color="#d55e00", dashed=True)
def fedadamw(
    correction: Correction = 0.5,
    weight_decay: WeightDecay = 0.01,
    local_steps: LocalSteps = 30,
    lr: LearningRate = 1e-3,
    beta1: Beta1 = 0.9,
    beta2: Beta2 = 0.999,
    eps: Epsilon = 1e-6,
) -> Algorithm:
    """Local AdamW with ΔW sent in full and V as block means.

    Uplink per client and round: q (d + d / 256) bits.

    >>> fedadamw().phase(1).paper_bits(512)
    16448
    """
    step = AdamWStep(lr, beta1, beta2, eps, weight_decay)

    def local_start(state: State, memory: Memory) -> State:
        ahead = state.w + correction * state.m  # the global M holds the last global update
        return state.replace(w=ahead, m=torch.zeros_like(state.m))

    def send(context: Context, update: LocalUpdate, memory: Memory) -> tuple[Parts, Memory]:
        means = block_means(update.end.v)
        return (*dense({"w": update.delta_w}), *block_mean_parts(means)), memory

    def broadcast(context: Context, mean: State, memory: Memory) -> tuple[Parts, Memory]:
        return (*dense({"w": mean.w[None]}), *block_mean_parts(mean.v[None])), memory

    def apply(context: Context, state: State, received: State) -> State:
        update = correction * state.m + received.w
        return State(w=state.w + update, m=update, v=constant_in_blocks(received.v))

    def paper_bits(d: int) -> float:
        return (d + math.ceil(d / BLOCK)) * Q

    phase = Phase(
        local_steps,
        step,
        send,
        paper_bits,
        local_start=local_start,
        broadcast=broadcast,
        apply=apply,
    )
    return Algorithm(always(phase))


@dataclass(frozen=True)
class AdamWStep:
    """One local step of Adam, after w ← (1 − η λ) w."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float

    def __call__(self, x: State, gradient: Tensor, context: StepContext) -> State:
        """Return W, M and V after the step."""
        adam = AdamStep(self.lr, self.beta1, self.beta2, self.eps)
        return adam(x.replace(w=x.w - self.lr * self.weight_decay * x.w), gradient)


def block_mean_parts(means: Tensor) -> Parts:
    """Return the first coordinate of each block of V, where :func:`block_means` put its mean."""
    is_first = (torch.arange(means.shape[-1], device=means.device) % BLOCK == 0).expand_as(means)
    return sparse({"v": means}, is_first, k=math.ceil(means.shape[-1] / BLOCK))


def block_means(v: Tensor) -> Tensor:
    """Replace each coordinate of ``(..., d)`` by the mean of its block.

    >>> block_means(torch.tensor([[1.0, 3.0]]))
    tensor([[2., 2.]])
    """
    whole = v.shape[-1] // BLOCK * BLOCK
    blocks = v[..., :whole].reshape(*v.shape[:-1], -1, BLOCK)
    parts = [part for part in (blocks, v[..., None, whole:]) if part.numel()]
    means = [x.mean(-1, keepdim=True).expand_as(x).flatten(-2) for x in parts]
    return torch.cat(means, dim=-1)


def constant_in_blocks(means: Tensor) -> Tensor:
    """Replace each coordinate by the first one of its block.

    >>> constant_in_blocks(torch.tensor([2.0, 0.0]))
    tensor([2., 2.])
    """
    return means[..., ::BLOCK].repeat_interleave(BLOCK, dim=-1)[..., : means.shape[-1]]
