"""FedAdam: local Adam, and all of ΔW, ΔM and ΔV sent.

The paper, section III-A: every client takes L Adam steps from the global (W, M, V) and uploads
three dense tensors; the server adds their weighted means.
"""

from __future__ import annotations

from functools import partial

from fedsift.adam import adam_step
from fedsift.algorithms.method import Algorithm, Context, Memory, Phase, always, send_all
from fedsift.algorithms.registry import method
from fedsift.algorithms.settings import Beta1, Beta2, Epsilon, LearningRate, LocalSteps
from fedsift.codec.update import Parts, dense, moments
from fedsift.vector import Moments

Q = 32
"""The paper's q: bits of one floating-point value."""


@method("fedadam", label="FedAdam", color="#d55e00")
def fedadam(
    local_steps: LocalSteps = 30,
    lr: LearningRate = 1e-3,
    beta1: Beta1 = 0.9,
    beta2: Beta2 = 0.999,
    eps: Epsilon = 1e-6,
) -> Algorithm:
    """FedAdam without compression: 3dq bits a client and round.

    >>> fedadam(lr=0.01)
    fedadam(local_steps=30, lr=0.01, beta1=0.9, beta2=0.999, eps=1e-06)
    """
    return Algorithm(
        always(
            Phase(
                local_steps,
                step=partial(adam_step, lr=lr, beta1=beta1, beta2=beta2, eps=eps),
                send=send_everything,
                broadcast=send_all(("w", "m", "v")),
                paper_bits=lambda d: 3 * d * Q,
            )
        )
    )


def send_everything(
    context: Context, start: Moments, end: Moments, memory: Memory
) -> tuple[Parts, Memory]:
    """ΔW, ΔM and ΔV, every coordinate of them."""
    return dense(moments(end - start)), memory
