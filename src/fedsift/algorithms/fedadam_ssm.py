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

from fedsift.adam import AdamStep
from fedsift.algorithms.method import (
    Algorithm,
    Context,
    LocalUpdate,
    Memory,
    Phase,
    Q,
    Step,
    always,
)
from fedsift.algorithms.registry import method
from fedsift.algorithms.settings import Beta1, Beta2, Density, Epsilon, LearningRate, LocalSteps
from fedsift.codec.update import Parts, sparse
from fedsift.selection.masks import num_kept, top_k

SharedMask = Callable[[LocalUpdate, int], Tensor]
"""Selects k coordinates per client of a local update."""


@method("fedadam-ssm", label="FedAdam-SSM", color="#0072b2")
def fedadam_ssm(
    density: Density = 0.05,
    local_steps: LocalSteps = 30,
    lr: LearningRate = 1e-3,
    beta1: Beta1 = 0.9,
    beta2: Beta2 = 0.999,
    eps: Epsilon = 1e-6,
) -> Algorithm:
    """FedAdam with ΔW, ΔM and ΔV sent under one shared mask, 1_Topk(ΔW).

    Uplink per client and round: min(3kq + d, k(3q + log₂ d)) bits.

    >>> fedadam_ssm(density=0.01).phase(1).paper_bits(1_000_000)
    1159315.6856932417
    """
    step = AdamStep(lr, beta1, beta2, eps)
    return shared_mask_fedadam(
        lambda update, k: top_k(update.delta_w, k), density, local_steps, step
    )


def shared_mask_fedadam(
    mask: SharedMask, density: float, local_steps: int, step: Step
) -> Algorithm:
    """Algorithm 1 with any shared mask."""

    def send(context: Context, update: LocalUpdate, memory: Memory) -> tuple[Parts, Memory]:
        k = num_kept(density, context.d)
        return sparse(update.differences, mask(update, k), k=k), memory

    return Algorithm(always(Phase(local_steps, step, send, partial(shared_mask_bits, density))))


def shared_mask_bits(density: float, d: int) -> float:
    """Return the bits per client and round: three values per coordinate, and a bitmap or indices.

    >>> round(shared_mask_bits(0.05, 21_840) / 2**20, 4)
    0.115
    """
    k = num_kept(density, d)
    return min(3 * k * Q + d, k * (3 * Q + math.log2(d)))
