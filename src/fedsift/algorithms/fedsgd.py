"""FedSGD: L local steps of SGD, and all of ΔW sent.

The paper, section III-A, equation (2). Others call this FedAvg (McMahan et al., AISTATS 2017).
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from fedsift.algorithms.fedadam import Q
from fedsift.algorithms.method import Algorithm, Context, Memory, Phase, always, send_all
from fedsift.algorithms.registry import method
from fedsift.algorithms.settings import LearningRate, LocalSteps
from fedsift.codec.update import Parts, dense
from fedsift.vector import Moments


@method("fedsgd", label="FedSGD", color="#7d8894")
def fedsgd(local_steps: LocalSteps = 30, lr: LearningRate = 1e-3) -> Algorithm:
    """Federated averaging of local SGD: dq bits a client and round.

    >>> fedsgd().phase(1).paper_bits(100)
    3200
    """
    step = partial(sgd_step, lr=lr)
    phase = Phase(local_steps, step, send_weights, lambda d: d * Q, broadcast=send_all(("w",)))
    return Algorithm(always(phase))


def sgd_step(x: Moments, gradient: Tensor, *, lr: float) -> Moments:
    """Equation (2): w ← w − η g; the moments stay as they are."""
    return x._replace(w=x.w - lr * gradient)


def send_weights(
    context: Context, start: Moments, end: Moments, memory: Memory
) -> tuple[Parts, Memory]:
    """ΔW, every coordinate of it."""
    return dense({"w": end.w - start.w}), memory
