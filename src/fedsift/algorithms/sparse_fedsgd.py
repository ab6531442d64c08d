"""Sparse FedSGD: L local steps of SGD, with the top-k of ΔW sent.

The paper, section VI-A, "Baselines".
"""

from __future__ import annotations

import math

from fedsift.algorithms.fedsgd import SgdStep
from fedsift.algorithms.method import Algorithm, Context, LocalUpdate, Memory, Phase, Q, always
from fedsift.algorithms.registry import method
from fedsift.algorithms.settings import Density, LearningRate, LocalSteps
from fedsift.codec.update import Parts, sparse
from fedsift.selection.masks import num_kept, top_k


@method("sparse-fedsgd", label="Sparse FedSGD", color="#7d8894", dashed=True)
def sparse_fedsgd(
    density: Density = 0.05, local_steps: LocalSteps = 30, lr: LearningRate = 1e-3
) -> Algorithm:
    """Local SGD with the top-k of ΔW sent.

    Uplink per client and round: min(kq + d, k(q + log₂ d)) bits.

    >>> sparse_fedsgd().name
    'sparse-fedsgd'
    """

    def send(context: Context, update: LocalUpdate, memory: Memory) -> tuple[Parts, Memory]:
        k = num_kept(density, context.d)
        return sparse({"w": update.delta_w}, top_k(update.delta_w, k), k=k), memory

    def paper_bits(d: int) -> float:
        k = num_kept(density, d)
        return min(k * Q + d, k * (Q + math.log2(d)))

    phase = Phase(local_steps, SgdStep(lr), send, paper_bits)
    return Algorithm(always(phase), state=("w",))
