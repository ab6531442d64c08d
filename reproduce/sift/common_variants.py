"""A general method with a switch for every ingredient of sift_common and for those it leaves out.

It shares the messages of sift_common, and ``reproduce/sift/search_common.py`` chooses among its
settings on validation data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from fedsift.adam import AdamStep
from fedsift.algorithms import Algorithm, Context, Memory, Phase, method
from fedsift.algorithms.compression import coder_of
from fedsift.algorithms.method import LocalUpdate
from fedsift.algorithms.sift import average_lag, gradient_bound
from fedsift.algorithms.sift_common import Grid as CommonGrid
from fedsift.algorithms.sift_common import in_one_unit, nesterov
from fedsift.codec.update import CodedValues, Part, Parts
from fedsift.codec.values import Integer
from fedsift.selection.masks import num_kept, positions, top_k
from fedsift.vector import Layout, State


@method("sift-common-variant")
def sift_common_variant(
    density: float = 0.03,
    late_density: float = 0.0,
    late_round: int = 50,
    shares: int = 20,
    clients: int = 20,
    named: float = 1.0,
    memory: float = 0.0,
    ahead: float = 0.7,
    ahead_off: float = 0.7,
    fresh: float = 1.0,
    decay: float = 0.95,
    bits: int = 3,
    largest: int = 0,
    level: float = 4.0,
    v_rounds: int = 5,
    down_bits: int = 3,
    momentum: float = 0.5,
    scale: float = 1.0,
    skip: int = 1,
    clip: float = 4.0,
    warmup_rounds: int = 40,
    average: float = 0.05,
    local_steps: int = 30,
    lr: float = 1e-3,
    fade: float = 0.0,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-6,
) -> Algorithm:
    """Return sift_common with changed ingredients.

    ``late_density`` replaces ``density`` after ``late_round``; values are then padded with zeros
    before it. ``shares``: clients n with the same n mod shares look at the same coordinates; 1 lets
    every client look at all. ``named``: what all clients name, in units of the mask's size.
    ``memory``: the weight of the server's velocity, next to the nominations, in the choice of the
    mask. ``ahead`` and ``ahead_off``: the share of the residual that a client adds to W on the
    mask, and elsewhere. ``fresh``: the share of this round's ΔW that is sent, next to all of the
    residual. ``largest``: the largest number that is sent, 0 for all that ``bits`` can hold.
    ``level``: the value, in units, of the coordinates that clients name. ``v_rounds``: V is sent
    for one of this many coordinates of the mask per round, 0 for never. ``down_bits``: bits of the
    downlink. ``scale``: a factor of the server's step. ``skip``: no values in round 1, when
    there is no mask. ``fade``: lr falls like 1/√(1 + t/fade).
    """

    def sizes(d: int, round: int) -> Sizes:
        is_late = late_density and round > late_round
        k = num_kept(late_density if is_late else density, d)
        name = max(1, min(math.ceil(named * k / clients), d // shares))
        return Sizes(d, k, name, math.ceil(k / v_rounds) if v_rounds else 0, shares)

    def local_start(state: State, memory: Memory) -> State:
        on, off = (x * decay * memory["residual"] for x in (ahead, ahead_off))
        w = state.w + torch.where(state.c > 0, on, off)
        return state.replace(w=w, m=torch.zeros_like(state.m))

    def padded(numbers: Tensor, d: int) -> Tensor:
        rest = sizes(d, late_round + 1).numbers - numbers.shape[-1]
        return torch.nn.functional.pad(numbers, (0, max(rest, 0)))

    def send(context: Context, update: LocalUpdate, memory: Memory) -> tuple[Parts, Memory]:
        size, after = (sizes(context.d, context.round + n) for n in (0, 1))
        grid = Grid.of(update.start.c, size, context.round)
        target = update.delta_w + decay * memory["residual"]
        if skip and context.round == 1:
            return (nominations(target * (1 + decay), context, after, level),), {"residual": target}
        rise = grid.log_v(update.end.v, eps) - grid.log_v(update.start.v, eps)
        wanted = fresh * update.delta_w + decay * memory["residual"]
        most = largest or Integer(bits).largest
        numbers = padded(grid.in_units(wanted, rise).clamp(-most, most), context.d)
        values = CodedValues.of(numbers, Integer(bits))
        residual = target - grid.dense_w(values.restore())
        names = nominations(fresh * update.delta_w + decay * residual, context, after, level)
        return (Part(None, {"p": values}), names), {"residual": residual}

    def broadcast(context: Context, mean: State, known: Memory) -> tuple[Parts, Memory]:
        size, after = (sizes(context.d, context.round + n) for n in (0, 1))
        state, grid = context.state, Grid.of(context.state.c[None], size, context.round)
        kept, kept_v = known["residual"], known["residual_v"]
        owed = grid.in_units(kept, kept_v.gather(-1, grid.of_v))
        total = mean.p[None] + padded(owed, context.d)
        values = CodedValues.of(total, coder_of("w", down_bits, total.dtype))
        sent = values.restore()
        unsent = mean.p[None] - sent
        velocity, step = nesterov(state.m[None], scale * grid.dense_w(sent), momentum)
        mask = next_grid(mean.c[None], velocity, after, clients, memory)
        return (Part(None, {"p": values}), mask), {
            "residual": kept + grid.dense_w(unsent),
            "residual_v": kept_v + grid.dense_v(unsent),
            "lag": average_lag(context.round, average, known["lag"], step),
        }

    def apply(context: Context, state: State, received: State) -> State:
        grid = Grid.of(state.c[None], sizes(context.d, context.round), context.round)
        values, v = received.p[None], state.v[None]
        velocity, step = nesterov(state.m, scale * grid.dense_w(values)[0], momentum)
        log_v = grid.log_v(v, eps) + grid.dense_v(values).gather(-1, grid.of_v)
        v = v.scatter(-1, grid.of_v, eps * torch.expm1(log_v.clamp_min(0)))
        return State(w=state.w + step, m=velocity, v=v[0], c=received.c)

    def model(state: State, memory: Memory) -> Tensor:
        return state.w + memory["lag"][0]

    @cache
    def phase_with(bound: float, is_summed: bool, rate: float) -> Phase:
        step = AdamStep(rate, beta1, beta2, eps, clip=bound)
        return Phase(
            local_steps, step, send, lambda d: 0.0, local_start, broadcast, apply,
            summed=("p",) if is_summed else (),
        )  # fmt: skip

    def phase(round: int) -> Phase:
        bound = gradient_bound(round, clip or math.inf, warmup_rounds)
        rate = lr / math.sqrt(1 + round / fade) if fade else lr
        return phase_with(bound, round > 1 or not skip, rate)

    def length(layout: Layout) -> int:
        return max(sizes(layout.d, n).numbers for n in (1, late_round + 1))

    return Algorithm(
        phase,
        client_memory=("residual",),
        server_memory=("residual", "residual_v", "lag"),
        model=model,
        state=("w", "m", "v", "c"),
        lengths={"p": length},
        weights="equal",
    )


@dataclass(frozen=True)
class Sizes:
    """How many coordinates there are, are in the mask, are named by a client, and have V sent."""

    d: int
    k: int
    named: int
    with_v: int
    shares: int

    @property
    def numbers(self) -> int:
        """The length of the message: W on the mask, then V on a part of it."""
        return self.k + self.with_v


class Grid(CommonGrid):
    """The mask of a round, as in sift_common, for messages that are padded with zeros."""

    def dense_v(self, numbers: Tensor) -> Tensor:
        """Return the change of log V that is meant by numbers."""
        return super().dense_v(numbers[..., : self.indices.shape[-1] + self.of_v.shape[-1]])


def nominations(wanted: Tensor, context: Context, size: Sizes, level: float) -> Part:
    """Return the largest coordinates that each client looks at, with the unit for them."""
    first = torch.tensor(context.clients, device=wanted.device)[:, None] + context.round
    every = torch.arange(size.d // size.shares, device=wanted.device) * size.shares
    share = (first % size.shares + every) % size.d
    largest = positions(top_k(wanted.gather(-1, share), size.named), size.named)
    indices = share.gather(-1, largest).sort(-1).values
    unit = wanted.gather(-1, indices).abs().mean(-1, keepdim=True) / level
    return Part(indices, {"c": in_one_unit(unit.expand(indices.shape))})


def next_grid(votes: Tensor, velocity: Tensor, size: Sizes, clients: int, memory: float) -> Part:
    """Return the next mask: the most votes, weighed against speed if there is a memory."""
    speed, unit = velocity.abs(), votes.sum(-1, keepdim=True) / size.named
    if memory:
        score = (clients * votes + memory * speed) / unit.clamp_min(1e-30)
    else:
        score = torch.where(votes > 0, speed.amax(-1, keepdim=True) + votes, speed)
    indices = positions(top_k(score, size.k), size.k)
    return Part(indices, {"c": in_one_unit(unit.expand(indices.shape))})
