"""SCAFFOLD: control variates on the clients and the server correct the drift of local SGD.

S. P. Karimireddy, S. Kale, M. Mohri, S. J. Reddi, S. U. Stich and A. T. Suresh, "SCAFFOLD:
Stochastic Controlled Averaging for Federated Learning", ICML 2020: Algorithm 1 with option II.

The clients' variates c_n are their memory, and the server's variate c is part of the global state.
Both differences, ΔW and Δc, travel in full in both directions and are counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedsift.algorithms.fedsgd import SgdStep
from fedsift.algorithms.method import Algorithm, Context, LocalUpdate, Memory, Phase, Q, always
from fedsift.algorithms.registry import method
from fedsift.algorithms.settings import LearningRate, LocalSteps, ServerLearningRate
from fedsift.algorithms.step_context import StepContext
from fedsift.codec.update import Parts, dense
from fedsift.vector import State


@method("scaffold", label="SCAFFOLD", color="#6a3d9a")
def scaffold(
    local_steps: LocalSteps = 30, lr: LearningRate = 0.05, server_lr: ServerLearningRate = 1.0
) -> Algorithm:
    """Local SGD corrected by control variates, with ΔW and Δc sent in full.

    Uplink per client and round: 2dq bits.

    All clients have the same weight. Each keeps its variate between rounds.

    >>> scaffold().phase(1).paper_bits(100)
    6400
    """

    def send(context: Context, update: LocalUpdate, memory: Memory) -> tuple[Parts, Memory]:
        mean_step = -update.delta_w / (local_steps * lr)  # the mean of g − c_n + c
        delta_c = mean_step - update.start.c
        return dense({"w": update.delta_w, "c": delta_c}), {"c": memory["c"] + delta_c}

    def broadcast(context: Context, mean: State, memory: Memory) -> tuple[Parts, Memory]:
        delta_c = context.merged_share * mean.c  # |S| / N: all other clients keep their variates
        return dense({"w": server_lr * mean.w[None], "c": delta_c[None]}), memory

    phase = Phase(local_steps, ControlledStep(lr), send, lambda d: 2 * d * Q, broadcast=broadcast)
    return Algorithm(always(phase), client_memory=("c",), state=("w", "c"), weights="equal")


@dataclass(frozen=True)
class ControlledStep:
    """One step of SGD with control variates: w ← w − η (g − c_n + c)."""

    lr: float

    def __call__(self, x: State, gradient: Tensor, context: StepContext) -> State:
        """Return W after the step."""
        return SgdStep(self.lr)(x, gradient - context.memory["c"] + x.c)
