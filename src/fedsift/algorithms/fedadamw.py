"""FedAdamW: local AdamW that follows the last global update, with V sent as the means of blocks.

J. Liu, F. Shang, K. Zhu, H. Liu, Y. Liu and J. Liu, "FedAdamW: A Communication-Efficient Optimizer
with Convergence and Generalization Guarantees for Federated Large Models", 2025 (arXiv 2510.27486):
its Algorithm 1. That α = 0.5 and the decoupled weight decay λ = 0.01 is this project's choice.

The paper adds α times the last global step to each of the L local steps; here a client takes all
of it at once and then its local steps, which has the same sum. Its blocks follow a Transformer's
structure; here a block is 256 coordinates in a row. ε and the bias correction are as everywhere in
this project: the one inside the root, the other absent.
"""

from __future__ import annotations

import math
from typing import Annotated

import torch
from torch import Tensor

from fedsift.adam import adam_step
from fedsift.algorithms.fedadam import Q
from fedsift.algorithms.method import Algorithm, Context, Memory, Phase, always
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
from fedsift.codec.update import Parts, dense, sparse
from fedsift.vector import Moments

BLOCK = 256

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
    """FedAdamW: q (d + d / 256) bits a client and round.

    >>> fedadamw().phase(1).paper_bits(512)
    16448
    """

    def begin(state: Moments, memory: Memory) -> Moments:
        ahead = state.w + correction * state.m  # the global M is the last global update
        return Moments(ahead, torch.zeros_like(state.m), state.v)

    def step(x: Moments, gradient: Tensor) -> Moments:
        decayed = x._replace(w=x.w - lr * weight_decay * x.w)
        return adam_step(decayed, gradient, lr=lr, beta1=beta1, beta2=beta2, eps=eps)

    def send(
        context: Context, start: Moments, end: Moments, memory: Memory
    ) -> tuple[Parts, Memory]:
        return weights_and_means(end.w - start.w, block_means(end.v)), memory

    def broadcast(context: Context, mean: Moments, memory: Memory) -> tuple[Parts, Memory]:
        return weights_and_means(mean.w[None], mean.v[None]), memory

    def apply(state: Moments, received: Moments) -> Moments:
        update = correction * state.m + received.w
        return Moments(state.w + update, update, spread(received.v))

    def paper_bits(d: int) -> float:
        return (d + math.ceil(d / BLOCK)) * Q

    return Algorithm(
        always(Phase(local_steps, step, send, paper_bits, begin, broadcast, apply)),
    )


def weights_and_means(w: Tensor, v: Tensor) -> Parts:
    """Every coordinate of w, and the means of v's blocks."""
    return (*dense({"w": w}), *means_of(v))


def means_of(v: Tensor) -> Parts:
    """The first coordinate of each block: of :func:`block_means`, all that there is to send."""
    first = (torch.arange(v.shape[-1], device=v.device) % BLOCK == 0).expand_as(v)
    return sparse({"v": v}, first, k=math.ceil(v.shape[-1] / BLOCK))


def block_means(v: Tensor) -> Tensor:
    """The mean of each block ``(..., d)``, at all of the block's coordinates.

    >>> block_means(torch.tensor([[1.0, 3.0]]))
    tensor([[2., 2.]])
    """
    whole = v.shape[-1] // BLOCK * BLOCK
    blocks = v[..., :whole].reshape(*v.shape[:-1], -1, BLOCK)
    parts = [part for part in (blocks, v[..., None, whole:]) if part.numel()]
    means = [x.mean(-1, keepdim=True).expand_as(x).flatten(-2) for x in parts]
    return torch.cat(means, dim=-1)


def spread(means: Tensor) -> Tensor:
    """The first coordinate of each block, at all of its coordinates.

    >>> spread(torch.tensor([2.0, 0.0]))
    tensor([2., 2.])
    """
    return means[..., ::BLOCK].repeat_interleave(BLOCK, dim=-1)[..., : means.shape[-1]]
