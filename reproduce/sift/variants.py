"""A general method with a switch for every ingredient of sift and for those it leaves out.

With its defaults it is sift, bit for bit (tests/reproduce/test_sift_variants.py). It keeps sift
itself simple, as ingredients that sift leaves out can be measured here. Every client must take part
in every round. Two costs could be avoided: a common mask is counted as if it were sent, and the
mean over the senders takes one bit per sent coordinate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from fedsift.adam import AdamStep
from fedsift.algorithms import Algorithm, Context, Memory, Phase, method
from fedsift.algorithms.fedadamw import BLOCK, block_mean_parts, block_means, constant_in_blocks
from fedsift.algorithms.method import LocalUpdate, Q, Step, nonzero_parts
from fedsift.algorithms.settings import (
    Beta1,
    Beta2,
    Density,
    Epsilon,
    LearningRate,
    LocalSteps,
    ResidualDecay,
)
from fedsift.algorithms.sift import (
    V_BITS,
    Average,
    Clip,
    DownDensity,
    Momentum,
    WarmupRounds,
    average_lag,
    gradient_bound,
)
from fedsift.codec.update import Parts, Role, by_role, residual_after, sparse
from fedsift.codec.values import Linear, Log, Sign, ValueCoder
from fedsift.seeding import stream
from fedsift.selection.masks import num_kept, top_k, top_k_per_layer
from fedsift.vector import State

WARM_UP_FACTOR = 5
"""Initial density of a warm-up, as a multiple of the final one."""

VARIANTS: dict[str, dict[str, Any]] = {
    "fedadam": {"algorithm": "fedadam"},
    "fedadam-ssm": {"algorithm": "fedadam-ssm"},
    "fedadamw": {"algorithm": "fedadamw"},
    "sparseloco": {"algorithm": "sparseloco"},
    "sift": {"algorithm": "sift"},
    "no residual": {"decay": 0.0},
    "residual never fades": {"decay": 1.0},
    "residual fades by 0.98": {"decay": 0.98},
    "residual fades by 0.9": {"decay": 0.9},
    "residual fades by 0.7": {"decay": 0.7},
    "against the last update": {"decay": 0.0, "against": 0.9},
    "signs": {"w_bits": 1},
    "2 bits": {"w_bits": 2},
    "3 bits": {"w_bits": 3},
    "5 bits": {"w_bits": 5},
    "6 bits": {"w_bits": 6},
    "8 bits": {"w_bits": 8},
    "M sent": {"m_bits": 4},
    "steps make up for M's start": {"whole_steps": 1},
    "no momentum": {"momentum": 0.0},
    "momentum 0.3": {"momentum": 0.3},
    "momentum 0.7": {"momentum": 0.7},
    "momentum not Nesterov's": {"nesterov": 0},
    "gradients not clipped": {"clip": 0.0},
    "gradients clipped to 1": {"clip": 1.0},
    "gradients clipped to 2": {"clip": 2.0},
    "gradients clipped to 8": {"clip": 8.0},
    "the bound does not rise": {"warmup_rounds": 1},
    "the bound rises over 20 rounds": {"warmup_rounds": 20},
    "no average": {"average": 0.0},
    "the bound does not rise, no average": {"warmup_rounds": 1, "average": 0.0},
    "average 0.02": {"average": 0.02},
    "average 0.1": {"average": 0.1},
    "average 0.2": {"average": 0.2},
    "no clipping, momentum not Nesterov's": {"clip": 0.0, "nesterov": 0},
    "V never": {"v_every": 0},
    "V every 5th round": {"v_every": 5},
    "V by blocks": {"v_means": 1},
    "V counted": {"counted": 1},
    "V every 5th round, counted": {"v_every": 5, "counted": 1},
    "density 0.5 %": {"density": 0.005},
    "density 2 %": {"density": 0.02},
    "density 5 %": {"density": 0.05},
    "per layer": {"per_layer": 1},
    "warm-up of 10 rounds": {"warm_rounds": 10},
    "mean of the senders": {"senders": 1},
    "common mask": {"common": 1},
    "down 1 %": {"down_density": 0.01},
    "down 2 %": {"down_density": 0.02},
    "down 5 %": {"down_density": 0.05},
    "down 20 %": {"down_density": 0.2},
    "down without residual": {"keep_down": 0},
    "down exact": {"down_density": 1.0},
    "2 bits, V every 5th round": {"w_bits": 2, "v_every": 5},
    "3 bits, V every 5th round": {"w_bits": 3, "v_every": 5},
    "3 bits, down 5 %": {"w_bits": 3, "down_density": 0.05},
    "0.5 %, residual fades by 0.98": {"density": 0.005, "decay": 0.98},
    "2 %, V every 5th round": {"density": 0.02, "v_every": 5},
}
"""The settings of sift that each variant changes; an ``algorithm`` stands for another method."""


@method("sift-variant")
def sift_variant(
    density: Density = 0.01,
    down_density: DownDensity = 0.1,
    decay: ResidualDecay = 0.95,
    against: float = 0.0,
    w_bits: int = 4,
    m_bits: int = 0,
    v_every: int = 1,
    v_means: int = 0,
    counted: int = 0,
    per_layer: int = 0,
    warm_rounds: int = 0,
    senders: int = 0,
    common: int = 0,
    keep_down: int = 1,
    whole_steps: int = 0,
    momentum: Momentum = 0.5,
    nesterov: int = 1,
    clip: Clip = 4.0,
    warmup_rounds: WarmupRounds = 40,
    average: Average = 0.05,
    local_steps: LocalSteps = 30,
    lr: LearningRate = 1e-3,
    beta1: Beta1 = 0.9,
    beta2: Beta2 = 0.999,
    eps: Epsilon = 1e-6,
) -> Algorithm:
    """Return sift with changed ingredients.

    ``decay`` is the factor of the residual: 0 for none, 1 for no decay. ``against`` is the share of
    the last global update that is subtracted before compression. ``w_bits``: 1 sends signs.
    ``m_bits``: 0 does not send M. ``v_every`` sends V in every n-th round, 0 never; ``v_means``
    sends V as means of blocks; ``counted`` corrects V's steps for the number of earlier steps.
    ``per_layer`` applies the density to each layer. ``warm_rounds`` decreases the density from a
    high value. ``senders`` averages over the clients that sent a coordinate. ``common`` uses one
    mask for all clients, half of it from the last global update. ``keep_down`` keeps a residual at
    the server; ``down_density`` 1 sends the exact mean. ``whole_steps`` increases lr to compensate
    for M's start at 0. ``momentum`` is that of the server, ``nesterov`` its Nesterov form. ``clip``
    bounds the norm of a gradient, 0 does not; the bound rises in the first ``warmup_rounds``.
    ``average`` is the share of all rounds that W's average, the model, covers.
    """
    given = dict(locals())
    whole = lr / mean_momentum_weight(beta1, local_steps) if whole_steps and not m_bits else lr
    settings = {key: given[key] for key in Rule.__dataclass_fields__ if key != "step"}

    @cache
    def rule_with(bound: float) -> Rule:
        step = AdamStep(whole, beta1, beta2, eps, clip=bound)
        return Rule(step, **settings)

    rule_with(clip)  # raises an error for incompatible settings
    return Algorithm(
        lambda round: rule_with(gradient_bound(round, clip or math.inf, warmup_rounds)).phase(
            round
        ),
        client_memory=("residual", "start") if against or common else ("residual",),
        server_memory=("velocity", "residual", "residual_v", "lag", "step"),
        model=lambda state, memory: state.w + memory["lag"][0],
    )


@dataclass(frozen=True)
class Rule:
    """The functions of a round, which depend on the switches."""

    step: Step
    density: float
    down_density: float
    decay: float
    against: float
    w_bits: int
    m_bits: int
    v_every: int
    v_means: int
    counted: int
    per_layer: int
    warm_rounds: int
    senders: int
    common: int
    keep_down: int
    momentum: float
    nesterov: int
    average: float
    local_steps: int
    beta2: float

    def __post_init__(self) -> None:
        if sum(map(bool, (self.m_bits, self.against, self.counted))) > 1:
            raise ValueError(
                "m-bits, against and counted exclude each other, as all use the global M"
            )
        if (self.m_bits and self.senders) or (self.v_means and self.v_every != 1):
            raise ValueError("m-bits excludes senders, and v-means excludes v-every")

    def phase(self, round: int) -> Phase:
        """The phase of a round; all phases share the local step."""
        bits = partial(self.paper_bits, round)
        return Phase(
            self.local_steps,
            self.step,
            self.send,
            bits,
            self.local_start,
            self.broadcast,
            self.apply,
        )

    def local_start(self, state: State, memory: Memory) -> State:
        """Start from the global W and V, and from the global M only if it is sent."""
        return state if self.m_bits else state.replace(m=torch.zeros_like(state.m))

    def send(self, context: Context, update: LocalUpdate, memory: Memory) -> tuple[Parts, Memory]:
        """Send the largest wanted coordinates in few bits, with V and M at the same coordinates."""
        start, delta = update.start, update.delta
        wanted = delta.w + self.decay * memory["residual"]
        new_memory: dict[str, Tensor] = {}
        last = torch.zeros_like(wanted)
        if "start" in memory:
            last = start.w - memory["start"] if context.round > 1 else last
            wanted = wanted - self.against * last
            new_memory["start"] = start.w.clone()
        mask, k = self.mask(context, wanted, last)
        m = torch.ones_like(wanted) if self.senders else delta.m  # to count the senders
        parts, left = self.coded(context.round, State(w=wanted, m=m, v=delta.v), mask, k)
        if self.v_means:
            parts += block_mean_parts(block_means(delta.v))
        return parts, {"residual": left["w"], **new_memory}

    def broadcast(self, context: Context, mean: State, memory: Memory) -> tuple[Parts, Memory]:
        """Compress the mean in the same way; the server keeps the residual."""
        mean = self.over_senders(mean)
        velocity = self.momentum * memory["velocity"] + mean.w
        step = self.momentum * velocity + mean.w if self.nesterov else velocity
        if self.down_density == 1:
            after = {**memory, "velocity": velocity, **self.lagging(context, memory, step)}
            return nonzero_parts(mean.replace(w=step[0])), after
        w, v = step + memory["residual"], mean.v[None]
        v = v if self.v_means else v + memory["residual_v"]
        k = num_kept(self.down_density, context.d)
        parts, left = self.coded(
            context.round, State(w=w, m=mean.m[None], v=v), top_k(w, k), k, True
        )
        if self.v_means:
            parts += block_mean_parts(v)
        of_v = memory["residual_v"] if self.v_means else left.get("v", v)
        after = {"residual": left["w"], "residual_v": of_v}
        if not self.keep_down:
            after = {name: torch.zeros_like(x) for name, x in after.items()}
        lagging = self.lagging(context, memory, w - left["w"])
        return parts, {**after, "velocity": velocity, **lagging}

    def lagging(self, context: Context, memory: Memory, sent: Tensor) -> Memory:
        """The step of W, and the lag of its average."""
        step = self.against * memory["step"] + sent
        return {"step": step, "lag": average_lag(context.round, self.average, memory["lag"], step)}

    def apply(self, context: Context, state: State, received: State) -> State:
        """Add the update; M may hold the last update, or the number of updates of each V."""
        if self.v_means:
            received = received.replace(v=constant_in_blocks(received.v))
        if self.against:
            update = self.against * state.m + received.w
            return State(w=state.w + update, m=update, v=state.v + received.v)
        if self.counted:
            seen = state.m + (received.v != 0)
            gain = 1 / (1 - self.beta2 ** (self.local_steps * seen.clamp_min(1)))
            return State(w=state.w + received.w, m=seen, v=state.v + gain * received.v)
        return state.plus(received)

    def over_senders(self, mean: State) -> State:
        """The mean over the clients that sent a coordinate; their share is in the place of M."""
        if not self.senders:
            return mean
        share = mean.m.masked_fill(mean.m == 0, 1)
        return State(w=mean.w / share, m=torch.zeros_like(share), v=mean.v / share)

    def mask(self, context: Context, wanted: Tensor, last: Tensor) -> tuple[Tensor, int]:
        """The coordinates that a client sends, and their number."""
        density = self.density_in(context.round)
        k = num_kept(density, context.d)
        if self.common:
            return common_mask(context, last, k), k
        if self.per_layer:
            sizes = context.layout.sizes
            return top_k_per_layer(wanted, density, context.layout), sum(
                num_kept(density, size) for size in sizes
            )
        return top_k(wanted, k), k

    def density_in(self, round: int) -> float:
        """The density of a round, which decreases linearly in a warm-up."""
        if not self.warm_rounds:
            return self.density
        warmth = max(0.0, 1 - (round - 1) / self.warm_rounds)
        return min(1.0, self.density * (1 + (WARM_UP_FACTOR - 1) * warmth))

    def sends_v(self, round: int) -> bool:
        """Whether V is sent by coordinate in this round."""
        due = self.v_every and (round - 1) % self.v_every == 0
        return bool(due) and not self.v_means

    def coded(
        self, round: int, x: State, mask: Tensor, k: int, down: bool = False
    ) -> tuple[Parts, Mapping[str, Tensor]]:
        """The masked coordinates in few bits, and the residuals of W and V."""
        coders = self.coders(round, x.w.dtype.itemsize > 4, down)
        values = {role: t for role, t in by_role(x).items() if role in coders}
        (part,) = sparse(values, mask, coders, k=k)
        return (part,), {role: residual_after(values[role], part, role) for role in part.values}

    def coders(self, round: int, wide: bool, down: bool) -> dict[Role, ValueCoder]:
        """The value coder of each role."""
        of_w = (
            Linear(self.w_bits, float64_scales=wide)
            if self.w_bits > 1
            else Sign(float64_scales=wide)
        )
        found: dict[Role, ValueCoder] = {"w": of_w}
        if self.m_bits:
            found["m"] = Linear(self.m_bits, float64_scales=wide)
        if self.senders and not down:
            found["m"] = Sign(float64_scales=wide)
        if self.sends_v(round):
            found["v"] = Log(V_BITS, float64_scales=wide)
        return found

    def paper_bits(self, round: int, d: int) -> float:
        """Bits per client and round."""
        each = self.w_bits + self.m_bits + self.senders + V_BITS * self.sends_v(round)
        means = math.ceil(d / BLOCK) * Q if self.v_means else 0
        return num_kept(self.density_in(round), d) * (each + math.log2(d)) + means


def mean_momentum_weight(beta1: float, steps: int) -> float:
    """The mean weight of M over a round's steps if it starts at 0; it approaches 1."""
    return sum(1 - beta1**step for step in range(1, steps + 1)) / steps


def common_mask(context: Context, last: Tensor, k: int) -> Tensor:
    """Half the coordinates where the last global update was largest, half at random."""
    scores = torch.from_numpy(stream(context.seed, "common mask", context.round).random(context.d))
    largest = top_k(last[:1], max(1, k // 2)) & (last[:1] != 0)
    chosen = top_k(scores.to(last).masked_fill(largest[0], 2.0)[None], k)
    return chosen.expand(last.shape).contiguous()
