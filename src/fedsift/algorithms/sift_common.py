"""sift_common: sift with one mask for all clients, which they nominate; only sums are needed.

This project's own method.

All clients send whole numbers at the same coordinates, so a secure sum of them is exact:

- The coordinates are dealt out to groups of clients, differently in every round. With its values,
  each client names the largest of its group that it has not sent. What all clients name is
  everyone's mask in the next round: no extra trip is needed, and no indices travel with values. In
  round 1, clients only name coordinates.
- The grid G holds the mask and the unit of its values: G_i is the unit in which coordinate i is
  sent, and 0 outside of the mask. It is part of the global state (C), so everyone knows it.
- Clients start from W plus a share of their residual, a larger one on the mask. A coordinate is
  sent one round after it was named, and would otherwise be learned twice.
- V is sent for a fifth of the mask per round, as the logarithm of 1 + V/ε.
- Everyone computes the server's velocity from the broadcast. The state has it in the place of M,
  which is 0 at the start of a client's round.

Error feedback, clipping and the averaged model are those of :func:`~fedsift.algorithms.sift.sift`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated

import torch
from torch import Tensor

from fedsift.adam import AdamStep
from fedsift.algorithms.compression import coder_of
from fedsift.algorithms.method import Algorithm, Context, LocalUpdate, Memory, Phase
from fedsift.algorithms.registry import method
from fedsift.algorithms.settings import (
    COUNT,
    FRACTION,
    SHARE,
    Beta1,
    Beta2,
    Epsilon,
    LearningRate,
    LocalSteps,
    Range,
    ResidualDecay,
    Setting,
)
from fedsift.algorithms.sift import (
    Average,
    Clip,
    Momentum,
    WarmupRounds,
    average_lag,
    gradient_bound,
)
from fedsift.codec.update import CodedValues, Part, Parts
from fedsift.codec.values import Integer, Linear
from fedsift.seeding import stream
from fedsift.selection.masks import num_kept, positions, top_k
from fedsift.vector import Layout, State

V_ROUNDS = 5
"""Rounds in which V is sent once for every coordinate of a mask that stays the same."""
V_UNIT = 0.5
"""The unit in which changes of ln(1 + V/ε) are sent."""
OVERLAP = 5
"""Clients that look at the same coordinates."""
LEVEL = 3
"""The value, in units, of a coordinate as large as those that clients named on average."""
DOWN_BITS = 6
"""Bits per value of the downlink."""
STEPS = 30
"""Local steps assumed for the unit of values without nominations, if their number varies."""

MaskDensity = Annotated[
    float, Setting("α = k/d, the share of coordinates in the mask", SHARE, fixed=True)
]
Shares = Annotated[
    int,
    Setting(
        "Shares of the mask, of which each client names one; best as many as clients per round",
        COUNT,
        fixed=True,
    ),
]
Largest = Annotated[
    int,
    Setting(
        "Largest whole number that a client sends",
        Range("a whole number from 1 to 127", lambda x: isinstance(x, int) and 1 <= x <= 127),
    ),
]
Nominate = Annotated[
    bool,
    Setting(
        "Whether clients name the mask's coordinates. If false, the mask follows from earlier sums "
        "alone, as differential privacy needs, and V is not sent",
        fixed=True,
    ),
]
Ahead = Annotated[
    float,
    Setting("Share of its residual on the mask that a client adds to W before training", FRACTION),
]
AheadElsewhere = Annotated[
    float,
    Setting("Share of its residual outside of the mask that a client adds to W", FRACTION),
]


@method("sift-common", label="sift, common mask", color="#4f6d7a", dashed=True)
def sift_common(
    density: MaskDensity = 0.02,
    shares: Shares = 20,
    ahead: Ahead = 0.7,
    ahead_elsewhere: AheadElsewhere = 0.3,
    decay: ResidualDecay = 0.9,
    largest: Largest = 6,
    nominate: Nominate = True,
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
    """Sift with one mask for all clients, which they nominate, and sums of whole numbers.

    Uplink per client and round: (k + k/5) log₂(2 largest + 1) bits for values, and k/shares log₂ d
    for nominations.

    >>> round(sift_common(density=0.5, shares=16, largest=3).phase(2).paper_bits(1024))
    2047
    """
    coder = Integer(max(2, largest.bit_length() + 1))
    fixed_unit = lr * (local_steps if isinstance(local_steps, int) else STEPS) / LEVEL

    def sizes(d: int) -> Sizes:
        return Sizes.of(d, density, shares, nominate)

    def local_start(state: State, memory: Memory) -> State:
        on, off = (share * decay * memory["residual"] for share in (ahead, ahead_elsewhere))
        w = state.w + torch.where(state.c > 0, on, off)
        return state.replace(w=w, m=torch.zeros_like(state.m))

    def send(context: Context, update: LocalUpdate, memory: Memory) -> tuple[Parts, Memory]:
        size = sizes(context.d)
        grid = Grid.of(update.start.c, size, context.round)
        target = update.delta_w + decay * memory["residual"]
        if nominate and context.round == 1:
            named = nominations((1 + decay) * target, context, size)
            return (named,), {"residual": target}
        rise = grid.log_v(update.end.v, eps) - grid.log_v(update.start.v, eps)
        numbers = grid.in_units(target, rise).clamp(-largest, largest)
        values = CodedValues.of(numbers, coder)
        residual = target - grid.dense_w(values.restore())
        if not nominate:
            return (Part(None, {"p": values}),), {"residual": residual}
        named = nominations(update.delta_w + decay * residual, context, size)
        return (Part(None, {"p": values}), named), {"residual": residual}

    def broadcast(context: Context, mean: State, memory: Memory) -> tuple[Parts, Memory]:
        size, state = sizes(context.d), context.state
        grid = Grid.of(state.c[None], size, context.round)
        kept, kept_v = memory["residual"], memory["residual_v"]
        total = mean.p[None] + grid.in_units(kept, kept_v.gather(-1, grid.of_v))
        values = CodedValues.of(total, coder_of("w", DOWN_BITS, total.dtype))
        sent = values.restore()
        unsent = mean.p[None] - sent
        velocity, step = nesterov(state.m[None], grid.dense_w(sent), momentum)
        if nominate:
            mask = next_grid(mean.c[None], velocity, size)
        else:
            mask = public_grid(velocity, context, size, fixed_unit)
        return (Part(None, {"p": values}), mask), {
            "residual": kept + grid.dense_w(unsent),
            "residual_v": kept_v + grid.dense_v(unsent),
            "lag": average_lag(context.round, average, memory["lag"], step),
        }

    def apply(context: Context, state: State, received: State) -> State:
        grid = Grid.of(state.c[None], sizes(context.d), context.round)
        values, v = received.p[None], state.v[None]
        velocity, step = nesterov(state.m, grid.dense_w(values)[0], momentum)
        log_v = grid.log_v(v, eps) + grid.dense_v(values).gather(-1, grid.of_v)
        v = v.scatter(-1, grid.of_v, eps * torch.expm1(log_v.clamp_min(0)))
        return State(w=state.w + step, m=velocity, v=v[0], c=received.c)

    def model(state: State, memory: Memory) -> Tensor:
        return state.w + memory["lag"][0]

    def named_bits(d: int) -> float:
        return sizes(d).named * math.log2(d)

    def paper_bits(d: int) -> float:
        size = sizes(d)
        return size.numbers * math.log2(2 * largest + 1) + size.named * math.log2(d)

    @cache
    def phase_with(bound: float, is_first: bool) -> Phase:
        step = AdamStep(lr, beta1, beta2, eps, clip=bound)
        later = Phase(
            local_steps, step, send, paper_bits, local_start=local_start, broadcast=broadcast,
            apply=apply, summed=("p",), largest=largest,
        )  # fmt: skip
        return replace(later, paper_bits=named_bits, summed=(), largest=0) if is_first else later

    def phase(round: int) -> Phase:
        bound = gradient_bound(round, clip or math.inf, warmup_rounds)
        return phase_with(bound, nominate and round == 1)

    return Algorithm(
        phase,
        client_memory=("residual",),
        server_memory=("residual", "residual_v", "lag"),
        model=model,
        state=("w", "m", "v", "c"),
        lengths={"p": MessageLength(density, shares, nominate)},
        weights="equal",
    )


@dataclass(frozen=True)
class Sizes:
    """How many coordinates there are, are in the mask, are named by a client, and have V sent.

    The coordinates are dealt out to this many ``groups`` of clients.
    """

    d: int
    k: int
    named: int
    with_v: int
    groups: int

    @classmethod
    def of(cls, d: int, density: float, shares: int, nominate: bool = True) -> Sizes:
        """Return the sizes for a model with d parameters; without nominations, V is not sent.

        >>> Sizes.of(d=21_840, density=0.02, shares=20)
        Sizes(d=21840, k=437, named=22, with_v=88, groups=4)
        """
        k, groups = num_kept(density, d), min(max(shares // OVERLAP, 1), d)
        if not nominate:
            return cls(d, k, 0, 0, groups)
        return cls(d, k, min(-(-k // shares), d // groups), -(-k // V_ROUNDS), groups)

    @property
    def numbers(self) -> int:
        """The length of the message: W on the mask, then V on a part of it."""
        return self.k + self.with_v


@dataclass(frozen=True)
class MessageLength:
    """The length of the message for a model's layout. Equal settings make equal lengths."""

    density: float
    shares: int
    nominate: bool

    def __call__(self, layout: Layout) -> int:
        """Return the length."""
        return Sizes.of(layout.d, self.density, self.shares, self.nominate).numbers


@dataclass(frozen=True)
class Grid:
    """The mask of a round as indices ``(clients, k)``, and the units of its coordinates.

    ``of_v`` are the coordinates of which V is sent: a window that moves through the mask.
    """

    d: int
    indices: Tensor
    units: Tensor
    of_v: Tensor

    @classmethod
    def of(cls, grid: Tensor, size: Sizes, round: int) -> Grid:
        """Read the grid G ``(clients, d)``. As long as there is no mask, all units are 0."""
        indices = positions(top_k(grid, size.k), size.k)
        of_v = indices.roll(-round * size.with_v, -1)[..., : size.with_v]
        return cls(size.d, indices, grid.gather(-1, indices), of_v)

    def in_units(self, w: Tensor, log_v: Tensor) -> Tensor:
        """Return W ``(clients, d)`` on the mask and changes of log V as numbers to send.

        They are 0 as long as there is no mask.
        """
        is_set = self.units > 0
        of_w = w.gather(-1, self.indices) * is_set / self.units.masked_fill(~is_set, 1)
        of_v = log_v * is_set[..., : log_v.shape[-1]] / V_UNIT
        return torch.cat([of_w, of_v], -1)

    def dense_w(self, numbers: Tensor) -> Tensor:
        """Return the change of W ``(clients, d)`` that is meant by numbers."""
        k = self.indices.shape[-1]
        zeros = numbers.new_zeros(len(numbers), self.d)
        return zeros.scatter(-1, self.indices, numbers[..., :k] * self.units)

    def dense_v(self, numbers: Tensor) -> Tensor:
        """Return the change of log V ``(clients, d)`` that is meant by numbers."""
        k = self.indices.shape[-1]
        zeros = numbers.new_zeros(len(numbers), self.d)
        return zeros.scatter(-1, self.of_v, numbers[..., k:] * V_UNIT)

    def log_v(self, v: Tensor, eps: float) -> Tensor:
        """Return ln(1 + V/ε) of the coordinates of which V is sent."""
        return torch.log1p(v.gather(-1, self.of_v) / eps)


def nominations(wanted: Tensor, context: Context, size: Sizes) -> Part:
    """Return the largest coordinates in each client's group, with the unit that it proposes.

    Client n names coordinates (n + t + j · groups) mod d in round t, j = 0, 1, ...
    """
    first = torch.tensor(context.clients, device=wanted.device)[:, None] + context.round
    every = torch.arange(size.d // size.groups, device=wanted.device) * size.groups
    share = (first + every) % size.d
    largest = positions(top_k(wanted.gather(-1, share), size.named), size.named)
    indices = share.gather(-1, largest).sort(-1).values
    unit = wanted.gather(-1, indices).abs().mean(-1, keepdim=True) / LEVEL
    return Part(indices, {"c": in_one_unit(unit.expand(indices.shape))})


def next_grid(votes: Tensor, velocity: Tensor, size: Sizes) -> Part:
    """Return the next mask, with its unit at every coordinate.

    ``votes`` is the clients' mean of their units at the coordinates that they named. If the clients
    named more than k coordinates, those with the most votes are in the mask; if fewer, then also
    those that move fastest.
    """
    speed = velocity.abs()
    mask = top_k(torch.where(votes > 0, speed.amax(-1, keepdim=True) + votes, speed), size.k)
    indices = positions(mask, size.k)
    unit = votes.sum(-1, keepdim=True) / size.named
    return Part(indices, {"c": in_one_unit(unit.expand(indices.shape))})


def public_grid(velocity: Tensor, context: Context, size: Sizes, unit: float) -> Part:
    """Return a mask that depends on earlier sums only: half of it moves fastest, half is in turn.

    The turn goes through a random order of all coordinates, in as many rounds as it takes.
    """
    half = size.k // 2
    order = torch.from_numpy(stream(context.seed, "order of coordinates").permutation(size.d))
    at = torch.arange(size.k - half) + (context.round - 1) * (size.k - half)
    in_turn = order[at % size.d].to(velocity.device)[None]
    speed = velocity.abs().scatter(-1, in_turn, torch.inf)
    indices = positions(top_k(speed, size.k), size.k)
    return Part(indices, {"c": in_one_unit(velocity.new_full(indices.shape, unit))})


def in_one_unit(x: Tensor) -> CodedValues:
    """Return equal values as one scale: their codes are all 1, and take no bytes."""
    return CodedValues.of(x, Linear(2, block=None, float64_scales=x.dtype.itemsize > 4))


def nesterov(velocity: Tensor, step: Tensor, momentum: float) -> tuple[Tensor, Tensor]:
    """Return the velocity after a step, and the step with the next round's momentum.

    >>> nesterov(torch.tensor(2.0), torch.tensor(1.0), momentum=0.5)
    (tensor(2.), tensor(2.))
    """
    velocity = momentum * velocity + step
    return velocity, momentum * velocity + step
