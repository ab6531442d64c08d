"""FedAdam-Top: ΔW, ΔM and ΔV each under its own top-k mask.

The paper, section IV. Its printed formulas use the mask of ΔM three times; each tensor has its own
here, as the text around them says.
"""

from __future__ import annotations

import math
from functools import partial

from fedsift.adam import adam_step
from fedsift.algorithms.fedadam import Q
from fedsift.algorithms.method import Algorithm, Context, Memory, Phase, always
from fedsift.algorithms.registry import method
from fedsift.algorithms.settings import Beta1, Beta2, Density, Epsilon, LearningRate, LocalSteps
from fedsift.codec.update import Parts, sparse
from fedsift.selection.masks import num_kept, top_k_separate
from fedsift.vector import Moments


@method("fedadam-top", label="FedAdam-Top", color="#00875f")
def fedadam_top(
    density: Density = 0.05,
    local_steps: LocalSteps = 30,
    lr: LearningRate = 1e-3,
    beta1: Beta1 = 0.9,
    beta2: Beta2 = 0.999,
    eps: Epsilon = 1e-6,
) -> Algorithm:
    """FedAdam with three separate masks: min(3(kq + d), 3k(q + log₂ d)) bits.

    >>> fedadam_top().name
    'fedadam-top'
    """

    def send(
        context: Context, start: Moments, end: Moments, memory: Memory
    ) -> tuple[Parts, Memory]:
        delta, k = end - start, num_kept(density, context.d)
        masks = top_k_separate(delta, k)
        parts = (
            *sparse({"w": delta.w}, masks.w, k=k),
            *sparse({"m": delta.m}, masks.m, k=k),
            *sparse({"v": delta.v}, masks.v, k=k),
        )
        return parts, memory

    step = partial(adam_step, lr=lr, beta1=beta1, beta2=beta2, eps=eps)
    return Algorithm(always(Phase(local_steps, step, send, partial(separate_mask_bits, density))))


def separate_mask_bits(density: float, d: int) -> float:
    """Bits a client and round: a mask and its values, three times.

    >>> separate_mask_bits(1.0, 64)
    6336.0
    """
    k = num_kept(density, d)
    return float(min(3 * (k * Q + d), 3 * k * (Q + math.log2(d))))
