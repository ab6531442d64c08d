"""FedAdam-SSM: ΔW, ΔM and ΔV under one shared sparse mask, the top-k of ΔW.

X. Deng, J. Li, K. Wei, L. Shi, Z. Xiong, M. Ding, W. Chen, S. Jin and H. V. Poor, "Towards
Communication-efficient Federated Learning via Sparse and Aligned Adaptive Optimization":
Algorithm 1, with the mask of section V-B.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from torch import Tensor

from fedsift.adam import adam_step
from fedsift.algorithms.fedadam import Q
from fedsift.algorithms.method import Algorithm, Context, Memory, Phase, always
from fedsift.algorithms.registry import method
from fedsift.algorithms.settings import Beta1, Beta2, Density, Epsilon, LearningRate, LocalSteps
from fedsift.codec.update import Parts, moments, sparse
from fedsift.selection.masks import num_kept, top_k
from fedsift.vector import Moments

SharedMask = Callable[[Moments, Moments, int], Tensor]
"""Chooses k coordinates a client from where its training started and ended."""


@method("fedadam-ssm", label="FedAdam-SSM", color="#0072b2")
def fedadam_ssm(
    density: Density = 0.05,
    local_steps: LocalSteps = 30,
    lr: LearningRate = 1e-3,
    beta1: Beta1 = 0.9,
    beta2: Beta2 = 0.999,
    eps: Epsilon = 1e-6,
) -> Algorithm:
    """FedAdam-SSM: the shared mask is 1_Topk(ΔW), min(3kq + d, k(3q + log₂ d)) bits.

    >>> fedadam_ssm(density=0.01).phase(1).paper_bits(1_000_000)
    1159315.6856932417
    """
    return shared_mask_fedadam(
        lambda start, end, k: top_k(end.w - start.w, k),
        density, local_steps, lr, beta1, beta2, eps,
    )  # fmt: skip


def shared_mask_fedadam(
    mask: SharedMask,
    density: float,
    local_steps: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
) -> Algorithm:
    """Algorithm 1 with any shared mask."""

    def send(
        context: Context, start: Moments, end: Moments, memory: Memory
    ) -> tuple[Parts, Memory]:
        k = num_kept(density, context.d)
        chosen = mask(start, end, k)
        return sparse(moments(end), chosen, since=moments(start), k=k), memory

    step = partial(adam_step, lr=lr, beta1=beta1, beta2=beta2, eps=eps)
    return Algorithm(always(Phase(local_steps, step, send, partial(shared_mask_bits, density))))


def shared_mask_bits(density: float, d: int) -> float:
    """Bits a client and round: one mask, as a bitmap or as indices, and three values each.

    >>> round(shared_mask_bits(0.05, 21_840) / 2**20, 4)
    0.115
    """
    k = num_kept(density, d)
    return min(3 * k * Q + d, k * (3 * Q + math.log2(d)))
