"""Sparse FedSGD: L local steps of SGD, and the top-k of ΔW sent.

The paper, section VI-A, "Baselines".
"""

from __future__ import annotations

import math
from functools import partial

from fedsift.algorithms.fedadam import Q
from fedsift.algorithms.fedsgd import sgd_step
from fedsift.algorithms.method import Algorithm, Context, Memory, Phase, always
from fedsift.algorithms.registry import method
from fedsift.algorithms.settings import Density, LearningRate, LocalSteps
from fedsift.codec.update import Parts, sparse
from fedsift.selection.masks import num_kept, top_k
from fedsift.vector import Moments


@method("sparse-fedsgd", label="Sparse FedSGD", color="#7d8894", dashed=True)
def sparse_fedsgd(
    density: Density = 0.05, local_steps: LocalSteps = 30, lr: LearningRate = 1e-3
) -> Algorithm:
    """FedSGD with a top-k mask: min(kq + d, k(q + log₂ d)) bits a client and round.

    >>> sparse_fedsgd().name
    'sparse-fedsgd'
    """

    def send(
        context: Context, start: Moments, end: Moments, memory: Memory
    ) -> tuple[Parts, Memory]:
        delta, k = end.w - start.w, num_kept(density, context.d)
        return sparse({"w": delta}, top_k(delta, k), k=k), memory

    def bits(d: int) -> float:
        k = num_kept(density, d)
        return min(k * Q + d, k * (Q + math.log2(d)))

    return Algorithm(always(Phase(local_steps, partial(sgd_step, lr=lr), send, bits)))
