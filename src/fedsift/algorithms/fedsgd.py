"""FedSGD: L local steps of SGD, with ΔW sent in full.

The paper, section III-A, equation (2).

Others call this FedAvg (McMahan et al., AISTATS 2017), with one difference: here as in the paper,
a client's weight in the mean is its mini-batch size, min(batch size, n), where n is its number of
samples. FedAvg weights clients by n.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedsift.algorithms.method import (
    Algorithm,
    Context,
    LocalUpdate,
    Memory,
    Phase,
    Q,
    always,
    broadcast_all,
)
from fedsift.algorithms.registry import method
from fedsift.algorithms.settings import LearningRate, LocalSteps
from fedsift.codec.update import Parts, dense
from fedsift.errors import explain_renamed
from fedsift.vector import State


@method("fedsgd", label="FedSGD", color="#7d8894")
def fedsgd(local_steps: LocalSteps = 30, lr: LearningRate = 1e-3) -> Algorithm:
    """Local SGD with ΔW sent in full.

    Uplink per client and round: dq bits.

    >>> fedsgd().phase(1).paper_bits(100)
    3200
    """
    return Algorithm(
        always(
            Phase(
                local_steps,
                step=SgdStep(lr),
                send=send_delta_w,
                broadcast=broadcast_all(("w",)),
                paper_bits=lambda d: d * Q,
            )
        ),
        state=("w",),
    )


@dataclass(frozen=True)
class SgdStep:
    """Equation (2): w ← w − η g."""

    lr: float

    def __call__(self, x: State, gradient: Tensor, context: object = None) -> State:
        """Return the state with W after the step."""
        return x.replace(w=x.w - self.lr * gradient)


def send_delta_w(context: Context, update: LocalUpdate, memory: Memory) -> tuple[Parts, Memory]:
    """Send every coordinate of ΔW."""
    return dense({"w": update.delta_w}), memory


__getattr__ = explain_renamed(__name__)
