"""DeComFL: forward passes along shared random directions; only scalars travel, up and down.

Z. Li, B. Ying, Z. Liu, C. Dong and H. Yang, "Achieving Dimension-Free Communication in Federated
Learning via Zeroth-Order Optimization", ICLR 2025 (arXiv 2405.15861). With one bit it is FeedSign:
Z. Cai, J. Chen and G. Zhu, "FeedSign: Robust Full-parameter Federated Fine-tuning of Large Models
with Extremely Low Communication Overhead of One Bit", 2025 (arXiv 2501.17610).

A client measures how its loss changes along directions that everyone can rebuild from the seed
(:mod:`fedsift.algorithms.directions`), moves along them, and sends the slopes. The server
broadcasts the mean slopes, or with one bit the majority of the signs, and everyone takes the same
steps from the global weights. A client that was away takes the steps of the rounds that it missed.

The papers' one-sided differences are central differences here, which cost the same. FeedSign takes
one step along one direction per round; here a client may take several, along its own signs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from fedsift.algorithms.directions import directions
from fedsift.algorithms.method import Algorithm, Context, LocalUpdate, Memory, Phase, always
from fedsift.algorithms.registry import method
from fedsift.algorithms.settings import COUNT, POSITIVE, LearningRate, Range, Setting
from fedsift.algorithms.step_context import StepContext
from fedsift.codec.update import Parts, dense
from fedsift.codec.values import Bit
from fedsift.vector import State

Perturbations = Annotated[
    int, Setting("P, the random directions per local step", COUNT, fixed=True)
]
Distance = Annotated[float, Setting("μ, the distance at which the loss is compared", POSITIVE)]
Steps = Annotated[int, Setting("K, the local mini-batch steps per round", COUNT, fixed=True)]
Bits = Annotated[
    int,
    Setting(
        "Bits per slope, of which 1 sends only the sign",
        Range("1 or 32", lambda x: x in (1, 32)),
        fixed=True,
    ),
]


@method("decomfl", label="DeComFL", color="#8c564b")
def decomfl(
    perturbations: Perturbations = 10,
    mu: Distance = 1e-3,
    local_steps: Steps = 1,
    lr: LearningRate = 1e-2,
    bits: Bits = 32,
) -> Algorithm:
    """Zeroth-order steps along shared random directions, of which only the slopes are sent.

    Uplink per client and round: 32KP bits, or KP with one bit, whatever d is.

    >>> decomfl(perturbations=10, local_steps=2).phase(1).paper_bits(10**9)
    640
    """
    number = local_steps * perturbations

    def send(context: Context, update: LocalUpdate, memory: Memory) -> tuple[Parts, Memory]:
        return encoded(memory["slopes"]), memory

    def broadcast(context: Context, mean: State, memory: Memory) -> tuple[Parts, Memory]:
        return encoded(mean.p[None]), memory

    def encoded(slopes: Tensor) -> Parts:
        return dense({"p": slopes}, Bit() if bits == 1 else None)

    def apply(context: Context, state: State, received: State) -> State:
        w, slopes = state.w, received.p.view(local_steps, perturbations)
        for step, along in enumerate(slopes, 1):
            zs = directions(w, context.seed, context.round, step, perturbations)
            w = after_slopes(w, along, zs, lr)
        return state.replace(w=w)

    phase = Phase(
        local_steps,
        SlopeStep(lr, mu, perturbations, bits),
        send,
        paper_bits=lambda d: number * bits,
        broadcast=broadcast,
        apply=apply,
        points=Points(mu, perturbations),
    )
    lengths = {"slopes": number, "p": number}
    return Algorithm(
        always(phase), client_memory=("slopes",), state=("w",), lengths=lengths, weights="equal"
    )


@dataclass(frozen=True)
class Points:
    """Where a step needs the losses: w + μ z₁, w - μ z₁, w + μ z₂ and so on."""

    mu: float
    perturbations: int

    def __call__(self, x: State, context: StepContext) -> Iterator[Tensor]:
        """Yield the weights ``(clients, d)``."""
        for z in directions_of_step(x.w, context, self.perturbations):
            yield x.w + self.mu * z
            yield x.w - self.mu * z


@dataclass(frozen=True)
class SlopeStep:
    """g_p = (f(w + μ z_p) - f(w - μ z_p)) / 2μ, or its sign; w ← w - η mean_p(g_p z_p)."""

    lr: float
    mu: float
    perturbations: int
    bits: int

    def __call__(self, x: State, losses: Tensor, context: StepContext) -> tuple[State, Memory]:
        """Return the state after the step, and the slopes of the last K steps."""
        slopes = (losses[:, 0::2] - losses[:, 1::2]) / (2 * self.mu)
        if self.bits == 1:
            slopes = torch.where(slopes < 0, -1.0, 1.0) + 0 * slopes  # NaN if one is not finite
        zs = directions_of_step(x.w, context, self.perturbations)
        earlier = context.memory["slopes"][:, self.perturbations :]
        memory = {"slopes": torch.cat([earlier, slopes], -1)}
        return x.replace(w=after_slopes(x.w, slopes, zs, self.lr)), memory


def directions_of_step(w: Tensor, context: StepContext, number: int) -> Iterator[Tensor]:
    """Yield the directions of a client's current step."""
    return directions(w, context.seed, context.round, context.step, number)


def after_slopes(w: Tensor, slopes: Tensor, zs: Iterable[Tensor], lr: float) -> Tensor:
    """Return w - η mean_p(g_p z_p), for slopes ``(..., P)``."""
    total = torch.zeros_like(w)
    for p, z in enumerate(zs):
        total = total + slopes[..., p, None] * z
    return w - lr * total / slopes.shape[-1]
