"""FedProx: FedAvg with a proximal term that keeps local models near the global one.

T. Li, A. K. Sahu, M. Zaheer, M. Sanjabi, A. Talwalkar and V. Smith, "Federated Optimization in
Heterogeneous Networks", MLSys 2020: Algorithm 2, with SGD as the local solver.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from fedsift.algorithms.fedsgd import local_sgd
from fedsift.algorithms.method import Algorithm, always
from fedsift.algorithms.registry import method
from fedsift.algorithms.settings import NONNEGATIVE, LearningRate, LocalSteps, Setting
from fedsift.algorithms.step_context import StepContext
from fedsift.vector import State

ProximalWeight = Annotated[float, Setting("μ, the weight of the proximal term", NONNEGATIVE)]


@method("fedprox", label="FedProx", color="#7a4b2a", dashed=True)
def fedprox(
    mu: ProximalWeight = 0.01, local_steps: LocalSteps = 30, lr: LearningRate = 0.05
) -> Algorithm:
    """FedAvg whose clients minimize f(w) + μ/2 ‖w − W‖², where W is the global model.

    Uplink per client and round: dq bits.

    With ``mu=0`` it is FedAvg, bit for bit.

    >>> fedprox(mu=0.1).phase(1).paper_bits(100)
    3200
    """
    phase = local_sgd(local_steps, ProximalStep(lr, mu))
    return Algorithm(always(phase), state=("w",), weights="examples")


@dataclass(frozen=True)
class ProximalStep:
    """One step of SGD on f(w) + μ/2 ‖w − W‖²: w ← w − η (g + μ (w − W))."""

    lr: float
    mu: float

    def __call__(self, x: State, gradient: Tensor, context: StepContext) -> State:
        """Return W after the step."""
        return x.replace(w=x.w - self.lr * (gradient + self.mu * (x.w - context.start.w)))
