"""1-bit Adam: FedAdam at first, then a frozen V and a momentum sent in one bit per coordinate.

H. Tang, S. Gan, A. A. Awan, S. Rajbhandari, C. Li, X. Lian, J. Liu, C. Zhang and Y. He, "1-bit
Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed", ICML 2021,
Algorithm 1.

As in the FedAdam-SSM paper, there is one local step per round, and the warm-up is FedAdam with
L = 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from fedsift.adam import direction, first_moment
from fedsift.algorithms.fedadam import fedadam
from fedsift.algorithms.method import Algorithm, Context, LocalUpdate, Memory, Phase, Q
from fedsift.algorithms.registry import method
from fedsift.algorithms.settings import COUNT, Beta1, Beta2, Epsilon, LearningRate, Setting
from fedsift.algorithms.step_context import StepContext
from fedsift.codec.update import Parts, dense, residual_after
from fedsift.codec.values import Sign
from fedsift.vector import State

WarmupRounds = Annotated[
    int, Setting("Rounds of FedAdam before the compression starts", COUNT, fixed=True)
]


@method("onebit-adam", label="1-bit Adam", color="#b07c00")
def onebit_adam(
    warmup_rounds: WarmupRounds = 1,
    lr: LearningRate = 1e-4,
    beta1: Beta1 = 0.9,
    beta2: Beta2 = 0.999,
    eps: Epsilon = 1e-6,
) -> Algorithm:
    """FedAdam at first, then a frozen V and one bit per coordinate of M, with error feedback.

    Uplink per client and round: 3dq bits in the warm-up, d + q bits afterwards.

    >>> [onebit_adam(warmup_rounds=2).phase(round).paper_bits(100) for round in (1, 2, 3)]
    [9600, 9600, 132]
    """
    warmup = fedadam(local_steps=1, lr=lr, beta1=beta1, beta2=beta2, eps=eps).phase(1)

    def send(context: Context, update: LocalUpdate, memory: Memory) -> tuple[Parts, Memory]:
        return compress(update.end.m, memory)

    def broadcast(context: Context, mean: State, memory: Memory) -> tuple[Parts, Memory]:
        return compress(mean.m[None], memory)

    def apply(context: Context, state: State, received: State) -> State:
        m = received.m
        return state.replace(w=state.w - lr * direction(m, state.v, eps), m=m)

    step = MomentumStep(beta1)
    compressed = Phase(1, step, send, lambda d: d + Q, broadcast=broadcast, apply=apply)
    return Algorithm(
        lambda round: warmup if round <= warmup_rounds else compressed,
        client_memory=("residual",),
        server_memory=("residual",),
    )


@dataclass(frozen=True)
class MomentumStep:
    """Equation (4) alone: the first moment follows the gradient, W and V stay as they are."""

    beta1: float

    def __call__(self, x: State, gradient: Tensor, context: StepContext) -> State:
        """Return the state with M after the step."""
        return x.replace(m=first_moment(x.m, gradient, self.beta1))


def compress(m: Tensor, memory: Memory) -> tuple[Parts, Memory]:
    """Return m plus the residual in one bit per coordinate, and the new residual."""
    target = m + memory["residual"]
    (part,) = dense({"m": target}, Sign(float64_scales=target.dtype.itemsize > 4))
    return (part,), {"residual": residual_after(target, part, "m")}
