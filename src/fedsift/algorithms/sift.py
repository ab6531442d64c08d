"""sift: few coordinates in few bits, both ways, with decaying error feedback.

This project's own method.

sift keeps FedAdam-SSM's shared mask and makes everything around it cheaper:

- A client adds its residual (the unsent part of earlier updates, decayed every round) to ΔW and
  sends the largest coordinates of the sum in a few bits each.
- ΔV is sent under the same mask, in logarithmic codes. M is not sent at all: its half-life of a few
  steps is shorter than a round, so every round starts with M = 0.
- The server has Nesterov momentum instead, which costs no bits. It compresses its step as clients
  compress their updates, so the downlink is sparse, too.
- The norm of gradients is bounded, so that one learning rate suits all kinds of networks. The bound
  rises over the first rounds, in which large gradients do the most harm.
- The model is the average of W over the last rounds, which the server computes on its own. With
  non-IID data, W oscillates and its average does not. This costs no bits either.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Annotated

from torch import Tensor

from fedsift.adam import AdamStep
from fedsift.algorithms.compression import (
    V_BITS,
    DownDensity,
    compress,
    compress_with_residuals,
)
from fedsift.algorithms.method import Algorithm, Context, LocalUpdate, Memory, Phase
from fedsift.algorithms.registry import method
from fedsift.algorithms.settings import (
    BELOW_ONE,
    BITS,
    COUNT,
    FRACTION,
    Beta1,
    Beta2,
    Density,
    Epsilon,
    LearningRate,
    LocalSteps,
    Range,
    ResidualDecay,
    Setting,
)
from fedsift.codec.update import Parts, Role, residual_after
from fedsift.selection.masks import num_kept
from fedsift.vector import State

STAGES = 4
"""Equal steps in which the bound on gradients rises."""

Bits = Annotated[int, Setting("Bits per value of W", BITS)]
Momentum = Annotated[float, Setting("Nesterov momentum of the server", BELOW_ONE)]
Clip = Annotated[
    float,
    Setting(
        "Upper bound on the norm of a client's gradient",
        Range("0 (no clipping) or at least 1e-30", lambda x: x == 0 or 1e-30 <= x < math.inf),
    ),
]
WarmupRounds = Annotated[
    int,
    Setting(
        "Rounds in which the bound on gradients rises to clip, in four steps", COUNT, fixed=True
    ),
]
Average = Annotated[
    float,
    Setting("Share of all rounds over which W is averaged, or 0 for the last W", FRACTION),
]


@method("sift", color="#16202a")
def sift(
    density: Density = 0.01,
    down_density: DownDensity = 0.1,
    decay: ResidualDecay = 0.95,
    bits: Bits = 4,
    momentum: Momentum = 0.5,
    clip: Clip = 4.0,
    warmup_rounds: WarmupRounds = 40,
    average: Average = 0.05,
    local_steps: LocalSteps = 30,
    lr: LearningRate = 1e-3,
    beta1: Beta1 = 0.9,
    beta2: Beta2 = 0.999,
    eps: Epsilon = 1e-6,
) -> Algorithm:
    """FedAdam-SSM in few bits both ways, with server momentum, clipping and an averaged model.

    Uplink per client and round: k (bits + 4 + log₂ d) bits.

    Gradients with a norm above ``clip`` are scaled down to it; 0 disables this. In the first
    ``warmup_rounds`` the bound rises from a quarter of ``clip`` to all of it. The model is the
    average of W over about the last ``average`` of all rounds so far; with 0 it is W itself.

    >>> sift(density=0.01).phase(1).paper_bits(1024)
    180.0
    """

    def send(context: Context, update: LocalUpdate, memory: Memory) -> tuple[Parts, Memory]:
        target = update.delta_w + decay * memory["residual"]
        k = num_kept(density, context.d)
        part = compress(target, {"v": update.differences["v"]}, k, bits)
        return (part,), {"residual": residual_after(target, part, "w")}

    def broadcast(context: Context, mean: State, memory: Memory) -> tuple[Parts, Memory]:
        velocity = momentum * memory["velocity"] + mean.w
        lookahead = momentum * velocity + mean.w  # Nesterov: with the next round's momentum
        vectors: dict[Role, Tensor] = {"w": lookahead, "v": mean.v}
        k = num_kept(down_density, context.d)
        part, residuals = compress_with_residuals(vectors, memory, k, bits)
        step = lookahead + memory["residual"] - residuals["residual"]
        lag = average_lag(context.round, average, memory["lag"], step)
        return (part,), {**residuals, "velocity": velocity, "lag": lag}

    def model(state: State, memory: Memory) -> Tensor:
        return state.w + memory["lag"][0]

    def paper_bits(d: int) -> float:
        return num_kept(density, d) * (bits + V_BITS + math.log2(d))

    # M is never sent, so the global M, with which every round starts, stays 0.
    @cache
    def phase_with(bound: float) -> Phase:
        step = AdamStep(lr, beta1, beta2, eps, clip=bound)
        return Phase(local_steps, step, send, paper_bits, broadcast=broadcast)

    return Algorithm(
        lambda round: phase_with(gradient_bound(round, clip or math.inf, warmup_rounds)),
        client_memory=("residual",),
        server_memory=("velocity", "residual", "residual_v", "lag"),
        model=model,
    )


def gradient_bound(round: int, clip: float, warmup_rounds: int) -> float:
    """Return the bound on the norm of gradients in a round.

    >>> [gradient_bound(round, clip=4.0, warmup_rounds=40) for round in (1, 10, 11, 31, 100)]
    [1.0, 1.0, 2.0, 4.0, 4.0]
    """
    stage = min(STAGES, math.ceil(STAGES * round / warmup_rounds))
    return clip * stage / STAGES


def average_lag(round: int, average: float, lag: Tensor, step: Tensor) -> Tensor:
    """Return the average of W minus W, after a round that moved W by ``step``.

    The new W has the weight 1 / (1 + average (round - 1)) in the average, which therefore spans the
    same share of all rounds at any time. A round without updates leaves the lag as it is.

    >>> from torch import tensor
    >>> average_lag(round=2, average=0.5, lag=tensor(0.0), step=tensor(3.0))
    tensor(-1.)
    """
    weight = 1 / (1 + average * (round - 1))
    return (1 - weight) * (lag - step)
