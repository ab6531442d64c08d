"""Methods for the comparison that are made of pieces of fedsift, as a user would make them."""

from __future__ import annotations

from fedsift.adam import AdamStep
from fedsift.algorithms import (
    Algorithm,
    LearningRate,
    LocalSteps,
    Phase,
    always,
    compressed,
    method,
)
from fedsift.algorithms.fedsgd import send_delta_w
from fedsift.algorithms.method import Q, broadcast_all
from fedsift.algorithms.settings import Beta1, Beta2, Epsilon


@method("fedavg-adam", label="FedAvg, local Adam")
def fedavg_adam(
    local_steps: LocalSteps = 10,
    lr: LearningRate = 1e-3,
    beta1: Beta1 = 0.9,
    beta2: Beta2 = 0.999,
    eps: Epsilon = 1e-6,
) -> Algorithm:
    """FedAvg as it is used with LoRA: local Adam from zero moments, and ΔW sent in full."""
    broadcast = broadcast_all(("w",))
    step = AdamStep(lr, beta1, beta2, eps)
    return Algorithm(
        always(Phase(local_steps, step, send_delta_w, lambda d: d * Q, broadcast=broadcast))
    )


def flasc(density: float = 0.25, **settings: float) -> Algorithm:
    """FLASC-like sparse LoRA: dense local training, top-k of ΔW up and down, exact values.

    K. Kuo, A. Raje, K. Rajesh and V. Smith, "Federated LoRA with Sparse Communication", 2024 (arXiv
    2406.05233). There the server sends the largest weights, and runs Adam; here it sends the
    largest coordinates of the mean update, and what it did not send is sent later.
    """
    dense = fedavg_adam(**settings)  # type: ignore[arg-type]
    return compressed(dense, density=density, down_density=density, bits=32, decay=0.0)
