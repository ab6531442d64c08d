"""FedAdam-Top: ΔW, ΔM and ΔV, each under its own top-k mask.

The paper, section IV.

Its printed formulas use the mask of ΔM three times. Here each tensor has its own mask, as the text
around the formulas says.
"""

from __future__ import annotations

import math
from functools import partial

from fedsift.adam import AdamStep
from fedsift.algorithms.method import Algorithm, Context, LocalUpdate, Memory, Phase, Q, always
from fedsift.algorithms.registry import method
from fedsift.algorithms.settings import Beta1, Beta2, Density, Epsilon, LearningRate, LocalSteps
from fedsift.codec.update import Parts, sparse
from fedsift.selection.masks import num_kept, top_k_separate


@method("fedadam-top", label="FedAdam-Top", color="#00875f")
def fedadam_top(
    density: Density = 0.05,
    local_steps: LocalSteps = 30,
    lr: LearningRate = 1e-3,
    beta1: Beta1 = 0.9,
    beta2: Beta2 = 0.999,
    eps: Epsilon = 1e-6,
) -> Algorithm:
    """FedAdam with ΔW, ΔM and ΔV sent under three separate masks.

    Uplink per client and round: min(3(kq + d), 3k(q + log₂ d)) bits.

    >>> fedadam_top().name
    'fedadam-top'
    """

    def send(context: Context, update: LocalUpdate, memory: Memory) -> tuple[Parts, Memory]:
        k = num_kept(density, context.d)
        masks = top_k_separate(update.delta, k)
        parts = (
            *sparse({"w": update.delta_w}, masks.w, k=k),
            *sparse({"m": update.delta_m}, masks.m, k=k),
            *sparse({"v": update.delta_v}, masks.v, k=k),
        )
        return parts, memory

    step = AdamStep(lr, beta1, beta2, eps)
    return Algorithm(always(Phase(local_steps, step, send, partial(separate_mask_bits, density))))


def separate_mask_bits(density: float, d: int) -> float:
    """Return the bits per client and round: a mask and its values, three times.

    >>> separate_mask_bits(1.0, 64)
    6336.0
    """
    k = num_kept(density, d)
    return float(min(3 * (k * Q + d), 3 * k * (Q + math.log2(d))))
