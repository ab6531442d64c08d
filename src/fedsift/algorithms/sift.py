"""sift: few coordinates in few bits both ways; what is left behind is not forgotten at once.

This project's own method. It keeps FedAdam-SSM's shared mask and changes what it costs:

- A client adds to ΔW what it did not send before, faded (error feedback with a decay), and sends
  the largest coordinates of the sum in a few bits each.
- ΔV travels under the same mask, in logarithmic codes. M does not travel at all: its half-life of
  a few steps is shorter than a round, and so every round starts with M = 0.
- The server has momentum instead, Nesterov's, which costs no bits. It does with its step what the
  clients do with their updates, so that the downlink is sparse, too.
- Gradients have a bounded norm, so that one learning rate suits networks of all kinds. The bound
  rises in the first rounds, in which gradients lead astray most easily.
- The model is the average of the last rounds' W, which the server takes for itself. W moves to and
  fro where clients' data differ; its average does not, and costs no bits either.
"""

from __future__ import annotations

import math
from functools import cache, partial
from typing import Annotated

from torch import Tensor

from fedsift.adam import clipped_adam_step
from fedsift.algorithms.method import Algorithm, Context, Memory, Phase
from fedsift.algorithms.registry import method
from fedsift.algorithms.settings import (
    BELOW_ONE,
    BITS,
    COUNT,
    FRACTION,
    SHARE,
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
from fedsift.codec.update import Parts, Role, residual_after, sparse
from fedsift.codec.values import Linear, Log, ValueCoder
from fedsift.selection.masks import num_kept, top_k
from fedsift.vector import Moments

V_BITS = 4
"""Bits of a value of V, whose magnitudes span many octaves."""
STAGES = 4
"""Equal steps in which the bound on gradients rises."""

DownDensity = Annotated[float, Setting("Share of coordinates the server sends", SHARE)]
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
    int, Setting("Rounds in which the bound on gradients rises, in quarters of clip", COUNT)
]
Average = Annotated[
    float,
    Setting("Share of all rounds over which W is averaged, 0 for W itself", FRACTION),
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
    """Sift: k (bits + 4 + log₂ d) bits a client and round.

    Gradients longer than ``clip`` are shortened to it; 0 leaves them as they are. In the first
    ``warmup_rounds`` the bound rises from a quarter of ``clip`` to the whole. The model is the
    average of W, older by about ``average`` of all rounds so far; with 0 it is W itself.

    >>> sift(density=0.01).phase(1).paper_bits(1024)
    180.0
    """

    def send(
        context: Context, start: Moments, end: Moments, memory: Memory
    ) -> tuple[Parts, Memory]:
        wanted = end.w - start.w + decay * memory["residual"]
        parts, (residual, _) = sifted(wanted, end.v - start.v, num_kept(density, context.d), bits)
        return parts, {"residual": residual}

    def broadcast(context: Context, mean: Moments, memory: Memory) -> tuple[Parts, Memory]:
        velocity = momentum * memory["velocity"] + mean.w
        ahead = momentum * velocity + mean.w  # where the next round's velocity would lead
        w, v = ahead + memory["residual"], mean.v + memory["residual_v"]
        parts, (of_w, of_v) = sifted(w, v, num_kept(down_density, context.d), bits)
        lag = lag_after(context.round, average, memory["lag"], step=w - of_w)
        return parts, {"velocity": velocity, "residual": of_w, "residual_v": of_v, "lag": lag}

    def model(state: Moments, memory: Memory) -> Tensor:
        return state.w + memory["lag"][0]

    def paper_bits(d: int) -> float:
        return num_kept(density, d) * (bits + V_BITS + math.log2(d))

    # M is never sent: the global M, with which every round starts, stays 0.
    @cache
    def phase_with(bound: float) -> Phase:
        step = partial(clipped_adam_step, clip=bound, lr=lr, beta1=beta1, beta2=beta2, eps=eps)
        return Phase(local_steps, step, send, paper_bits, broadcast=broadcast)

    return Algorithm(
        lambda round: phase_with(bound_in(round, clip or math.inf, warmup_rounds)),
        client_memory=("residual",),
        server_memory=("velocity", "residual", "residual_v", "lag"),
        model=model,
    )


def bound_in(round: int, clip: float, warmup_rounds: int) -> float:
    """The bound on gradients in a round.

    >>> [bound_in(round, clip=4.0, warmup_rounds=40) for round in (1, 10, 11, 31, 100)]
    [1.0, 1.0, 2.0, 4.0, 4.0]
    """
    stage = min(STAGES, math.ceil(STAGES * round / warmup_rounds))
    return clip * stage / STAGES


def lag_after(round: int, average: float, lag: Tensor, step: Tensor) -> Tensor:
    """How far the average of W is from W, after a round that moved W by a step.

    The average takes W in with the weight 1 / (1 + average (round - 1)): it reaches back over the
    same share of all rounds at any time. A round in which nobody was heard of leaves it as it is.

    >>> from torch import tensor
    >>> lag_after(round=2, average=0.5, lag=tensor(0.0), step=tensor(3.0))
    tensor(-1.)
    """
    weight = 1 / (1 + average * (round - 1))
    return (1 - weight) * (lag - step)


def sifted(w: Tensor, v: Tensor, k: int, bits: int) -> tuple[Parts, tuple[Tensor, Tensor]]:
    """The k largest coordinates of w, and v's there, in few bits; and what is left of both."""
    wide = w.dtype.itemsize > 4
    coders: dict[Role, ValueCoder] = {"w": Linear(bits, wide=wide), "v": Log(V_BITS, wide=wide)}
    (part,) = sparse({"w": w, "v": v}, top_k(w, k), coders, k=k)
    return (part,), (residual_after(w, part, "w"), residual_after(v, part, "v"))
