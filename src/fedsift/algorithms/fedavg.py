"""FedAvg: local SGD, and the mean of the clients' models, weighted by their numbers of samples.

H. B. McMahan, E. Moore, D. Ramage, S. Hampson and B. Agüera y Arcas, "Communication-Efficient
Learning of Deep Networks from Decentralized Data", AISTATS 2017: Algorithm 1.

A local epoch is a fresh permutation of the client's samples, cut into mini-batches. Samples that do
not fill a mini-batch are left out of that epoch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch import Tensor

from fedsift.algorithms.fedsgd import SgdStep, local_sgd
from fedsift.algorithms.method import Algorithm, Memory, always
from fedsift.algorithms.registry import method
from fedsift.algorithms.settings import BELOW_ONE, COUNT, LearningRate, Setting
from fedsift.task import Epochs
from fedsift.vector import State

STEPS = 30
"""Local steps per round if neither they nor epochs are given."""

StepsOrEpochs = Annotated[
    int | None, Setting(f"L, the local mini-batch steps per round; {STEPS} without epochs", COUNT)
]
LocalEpochs = Annotated[
    int | None,
    Setting("Passes over the client's data per round, in place of local steps", COUNT),
]
LocalMomentum = Annotated[
    float, Setting("Momentum of the local steps, zero at the start of each round", BELOW_ONE)
]


@method("fedavg", label="FedAvg", color="#7a4b2a")
def fedavg(
    local_steps: StepsOrEpochs = None,
    lr: LearningRate = 0.05,
    momentum: LocalMomentum = 0.0,
    epochs: LocalEpochs = None,
) -> Algorithm:
    """Local SGD with ΔW sent in full, and clients weighted by their numbers of samples.

    Uplink per client and round: dq bits.

    With ``epochs`` in place of ``local_steps``, a client passes over its data this many times per
    round. Clients with more data then take more steps.

    >>> fedavg(epochs=5, lr=0.05).weights
    'examples'
    """
    if local_steps and epochs:
        raise ValueError("fedavg takes local_steps or epochs, not both")
    steps = Epochs(epochs) if epochs else local_steps or STEPS
    phase = local_sgd(steps, SgdStep(lr))
    if momentum:
        step = HeavyBallStep(lr, momentum)
        phase = replace(phase, step=step, local_start=with_zero_momentum)
    return Algorithm(always(phase), state=("w",), weights="examples")


@dataclass(frozen=True)
class HeavyBallStep:
    """One step of SGD with momentum: m ← μ m + g, then w ← w − η m."""

    lr: float
    momentum: float

    def __call__(self, x: State, gradient: Tensor, context: object = None) -> State:
        """Return W and the momentum after the step."""
        m = self.momentum * x.m + gradient
        return x.replace(w=x.w - self.lr * m, m=m)


def with_zero_momentum(state: State, memory: Memory) -> State:
    """Start local training from the global W, with momentum zero."""
    return State(w=state.w, m=torch.zeros_like(state.w))
