"""FedAdam: local Adam, with ΔW, ΔM and ΔV sent in full.

The paper, section III-A.

Every client takes L Adam steps from the global (W, M, V) and uploads three dense tensors. The
server adds their weighted means. This is not the FedAdam of Reddi et al. ("Adaptive Federated
Optimization", ICLR 2021), which Flower has under the same name: there, clients run SGD and the
*server* runs Adam. That method is :func:`fedsift.algorithms.fedopt`.
"""

from __future__ import annotations

from fedsift.adam import AdamStep
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
from fedsift.algorithms.settings import Beta1, Beta2, Epsilon, LearningRate, LocalSteps
from fedsift.codec.update import Parts, by_role, dense


@method("fedadam", label="FedAdam", color="#d55e00")
def fedadam(
    local_steps: LocalSteps = 30,
    lr: LearningRate = 1e-3,
    beta1: Beta1 = 0.9,
    beta2: Beta2 = 0.999,
    eps: Epsilon = 1e-6,
) -> Algorithm:
    """Local Adam with ΔW, ΔM and ΔV sent in full.

    Uplink per client and round: 3dq bits.

    What Flower calls FedAdam is ``fedopt(server="adam")``: its *server* runs Adam.

    >>> fedadam(lr=0.01)
    fedadam(local_steps=30, lr=0.01, beta1=0.9, beta2=0.999, eps=1e-06)
    """
    return Algorithm(
        always(
            Phase(
                local_steps,
                step=AdamStep(lr, beta1, beta2, eps),
                send=send_all_deltas,
                broadcast=broadcast_all(("w", "m", "v")),
                paper_bits=lambda d: 3 * d * Q,
            )
        )
    )


def send_all_deltas(context: Context, update: LocalUpdate, memory: Memory) -> tuple[Parts, Memory]:
    """Send every coordinate of ΔW, ΔM and ΔV."""
    return dense(by_role(update.delta)), memory
