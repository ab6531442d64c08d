"""FedOpt: local SGD on the clients, and Adam, Yogi or Adagrad on the server.

S. J. Reddi, Z. Charles, M. Zaheer, Z. Garrett, K. Rush, J. Konečný, S. Kumar and H. B. McMahan,
"Adaptive Federated Optimization", ICLR 2021: Algorithm 2.

Its FedAdam is ``fedopt(server="adam")`` here, because :func:`fedsift.algorithms.fedadam` is another
method of that name, whose *clients* run Adam. As in the paper, v starts at τ² and no bias is
corrected. Flower's FedAdam, FedYogi and FedAdagrad start v at 0, and its FedAdam multiplies the
step of round t by √(1 − β₂ᵗ⁺¹) / (1 − β₁ᵗ⁺¹).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Literal

from torch import Tensor

from fedsift.adam import first_moment, second_moment
from fedsift.algorithms.fedsgd import SgdStep, local_sgd
from fedsift.algorithms.method import Algorithm, Context, Memory, always
from fedsift.algorithms.registry import method
from fedsift.algorithms.settings import (
    BELOW_ONE,
    POSITIVE,
    LearningRate,
    LocalSteps,
    ServerLearningRate,
    Setting,
)
from fedsift.codec.update import Parts, dense
from fedsift.vector import State

Server = Annotated[Literal["adam", "yogi", "adagrad"], Setting("Optimizer of the server")]
ServerBeta1 = Annotated[float, Setting("β₁, the decay of the server's first moment", BELOW_ONE)]
ServerBeta2 = Annotated[
    float, Setting("β₂, the decay of the server's second moment (not for adagrad)", BELOW_ONE)
]
Tau = Annotated[
    float,
    Setting("τ, added to the root of the second moment, which starts at τ²", POSITIVE, fixed=True),
]


@method("fedopt", label="FedOpt", color="#a3123f")
def fedopt(
    server: Server = "adam",
    server_lr: ServerLearningRate = 0.03,
    beta1: ServerBeta1 = 0.9,
    beta2: ServerBeta2 = 0.99,
    tau: Tau = 1e-3,
    local_steps: LocalSteps = 30,
    lr: LearningRate = 0.05,
) -> Algorithm:
    """Local SGD with ΔW sent in full, and an adaptive optimizer on the server.

    Uplink per client and round: dq bits.

    This is the method that Flower calls FedAdam, FedYogi and FedAdagrad. ``fedadam`` is a different
    one: its clients run Adam.

    >>> fedopt("yogi", server_lr=0.01).settings["server"]
    'yogi'
    """

    def broadcast(context: Context, mean: State, memory: Memory) -> tuple[Parts, Memory]:
        m = first_moment(memory["m"], mean.w, beta1)
        v = SECOND_MOMENTS[server](memory["v"], mean.w, beta2)
        step = server_lr * m / (v.sqrt() + tau)
        return dense({"w": step}), {"m": m, "v": v}

    phase = replace(local_sgd(local_steps, SgdStep(lr)), broadcast=broadcast)
    return Algorithm(
        always(phase),
        server_memory=("m", "v"),
        server_start={"v": tau**2},
        state=("w",),
        weights="examples",
    )


def yogi(v: Tensor, delta: Tensor, beta2: float) -> Tensor:
    """Yogi's second moment: v ← v − (1 − β₂) Δ² sign(v − Δ²).

    >>> from torch import tensor
    >>> yogi(tensor([4.0, 1.0]), tensor([1.0, 2.0]), beta2=0.5)
    tensor([3.5000, 3.0000])
    """
    squared = delta * delta
    return v - (1 - beta2) * squared * (v - squared).sign()


def adagrad(v: Tensor, delta: Tensor, beta2: float) -> Tensor:
    """Adagrad's second moment: v ← v + Δ²."""
    return v + delta * delta


SECOND_MOMENTS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "adam": second_moment,
    "yogi": yogi,
    "adagrad": adagrad,
}
"""The next second moment, given the last one, the mean ΔW and β₂, for each optimizer."""
