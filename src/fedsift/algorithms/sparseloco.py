"""SparseLoCo: the top-k of every chunk in two bits, fading error feedback, and an outer step.

A. Sarfi, B. Thérien, J. Lidin and E. Belilovsky, "Communication Efficient LLM Pre-training with
SparseLoCo", 2025 (arXiv 2508.15706). The error decays by 0.95, 64 of every 4096 coordinates are
sent, and the outer learning rate is 1.

Here the inner optimizer is this project's Adam, without weight decay, so that the methods differ in
what they send alone. Clients are weighted as everywhere. Two bits hold -s, 0 and s, where s is the
mean magnitude of 256 values. The paper's replicas all gather each other's messages; here the server
sends the mean down, exactly, where any client sent something.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Annotated

import torch
from torch import Tensor

from fedsift.adam import adam_step
from fedsift.algorithms.fedadam import Q
from fedsift.algorithms.method import Algorithm, Context, Memory, Phase, always
from fedsift.algorithms.registry import method
from fedsift.algorithms.settings import (
    POSITIVE,
    Beta1,
    Beta2,
    Density,
    Epsilon,
    LearningRate,
    LocalSteps,
    ResidualDecay,
    Setting,
)
from fedsift.codec.update import Coded, Part, Parts, residual_after, sparse
from fedsift.codec.values import Linear
from fedsift.selection.masks import num_kept_per_chunk, top_k_per_chunk
from fedsift.vector import Moments

CHUNK = 4096
BLOCK = 256
"""Values that share a scale."""

OuterLearningRate = Annotated[float, Setting("Learning rate of the server", POSITIVE)]


@method("sparseloco", label="SparseLoCo", color="#16202a", dashed=True)
def sparseloco(
    density: Density = 1 / 64,
    decay: ResidualDecay = 0.95,
    outer_lr: OuterLearningRate = 1.0,
    local_steps: LocalSteps = 30,
    lr: LearningRate = 1e-3,
    beta1: Beta1 = 0.9,
    beta2: Beta2 = 0.999,
    eps: Epsilon = 1e-6,
) -> Algorithm:
    """SparseLoCo: k (2 + log₂ 4096) bits and the scales a client and round.

    >>> sparseloco().phase(1).paper_bits(8192)
    1824.0
    """

    def begin(state: Moments, memory: Memory) -> Moments:
        return Moments(state.w, memory["m"], memory["v"])

    def send(
        context: Context, start: Moments, end: Moments, memory: Memory
    ) -> tuple[Parts, Memory]:
        wanted = decay * memory["residual"] + end.w - start.w
        part = in_two_bits(wanted, top_k_per_chunk(wanted, density, CHUNK), k=kept_of(context.d))
        return (part,), {"m": end.m, "v": end.v, "residual": residual_after(wanted, part, "w")}

    def apply(state: Moments, received: Moments) -> Moments:
        return state._replace(w=state.w + outer_lr * received.w)

    def kept_of(d: int) -> int:
        return num_kept_per_chunk(density, d, CHUNK)

    def paper_bits(d: int) -> float:
        k = kept_of(d)
        return k * (2 + math.log2(CHUNK)) + math.ceil(k / BLOCK) * Q

    step = partial(adam_step, lr=lr, beta1=beta1, beta2=beta2, eps=eps)
    return Algorithm(
        always(Phase(local_steps, step, send, paper_bits, begin=begin, apply=apply)),
        client_memory=("m", "v", "residual"),
    )


def in_two_bits(x: Tensor, mask: Tensor, k: int) -> Part:
    """The masked coordinates of x as -s, 0 or s, whichever is nearest."""
    (part,) = sparse({"w": x}, mask, k=k)
    exact = part.values["w"].restore()
    scale = mean_magnitudes(exact)
    near = torch.where(2 * exact.abs() < scale, 0, exact.sign() * scale)
    coder = Linear(2, block=BLOCK, wide=x.dtype.itemsize > 4)
    return Part(part.indices, {"w": Coded.of(near, coder)})


def mean_magnitudes(x: Tensor) -> Tensor:
    """For every value ``(..., n)``, the mean magnitude of its block.

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
