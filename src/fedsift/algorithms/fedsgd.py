"""FedSGD: L local steps of SGD, with ΔW sent in full.

The paper, section III-A, equation (2).

FedAvg (:func:`fedsift.algorithms.fedavg`) differs in the clients' weights in the mean. Here they
are the mini-batch sizes, min(batch size, n), as in the paper, where n is the client's number of
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
    Step,
    always,
    broadcast_all,
)
from fedsift.algorithms.registry import method
from fedsift.algorithms.settings import LearningRate, LocalSteps
from fedsift.codec.update import Parts, dense
from fedsift.errors import explain_renamed
from fedsift.task import NumSteps
from fedsift.vector import State


@method("fedsgd", label="FedSGD", color="#7d8894")
def fedsgd(local_steps: LocalSteps = 30, lr: LearningRate = 1e-3) -> Algorithm:
    """Local SGD with ΔW sent in full.

    Uplink per client and round: dq bits.

    >>> fedsgd().phase(1).paper_bits(100)
    3200
    """
    return Algorithm(always(local_sgd(local_steps, SgdStep(lr))), state=("w",))


def local_sgd(local_steps: NumSteps, step: Step) -> Phase:
    """Local steps from the global W, with ΔW sent in full and its mean added to W."""
    return Phase(
        local_steps,
        step,
        send=send_delta_w,
        broadcast=broadcast_all(("w",)),
        paper_bits=lambda d: d * Q,
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
