"""FedAdam-SSM beside the auxiliary centralized Adam of Theorem 1: what the deviation really is.

The federation is the real one: its local step is only watched. Beside every round, Adam with full
gradients ∇F starts from the non-sparse state W̆, M̆, V̆.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedsift.algorithms.method import Algorithm, Context, Memory, Phase, Step
from fedsift.codec.update import Parts
from fedsift.engine.gpu.stacked import Stacked
from fedsift.engine.reference import Reference
from fedsift.federation.round import Federation
from fedsift.task import Task
from fedsift.theory.objective import Objective
from fedsift.vector import Moments


@dataclass(frozen=True)
class Watched:
    """One round: every client's way, that of centralized Adam, and what the last round lost.

    ``local`` is ``(clients, L + 1, d)`` and ``central`` ``(L + 1, d)``: the weights before the
    first step and after each. ``gradients`` ``(clients, L, d)`` and ``central_gradients``
    ``(L, d)`` are those that were used. ``start`` is (W, M, V), ``dense`` (W̆, M̆, V̆), and
    ``delta`` ``(clients, d)`` what the clients would send without a mask.
    """

    round: int
    settings: Mapping[str, float | int]
    start: Moments
    dense: Moments
    delta: Moments
    weights: Tensor
    local: Tensor
    gradients: Tensor
    central: Tensor
    central_gradients: Tensor

    @property
    def deviation(self) -> Tensor:
        """‖w_n^l − w̌^l‖, ``(clients, L + 1)``."""
        found: Tensor = torch.linalg.vector_norm(self.local - self.central, dim=-1)
        return found

    @property
    def errors(self) -> tuple[float, float, float]:
        """‖W − W̆‖, ‖M − M̆‖ and ‖V − V̆‖: the sparsification errors of the last round."""
        w, m, v = (float(x.norm()) for x in self.start - self.dense)
        return w, m, v

    @property
    def grad_bound(self) -> float:
        """The largest |coordinate| of any gradient that was used: G on the visited region."""
        return float(max(self.gradients.abs().max(), self.central_gradients.abs().max()))


Trail = list[tuple[Moments, Tensor]]
Sent = tuple[Parts, Memory]


def watch(task: Task, algorithm: Algorithm, rounds: int) -> Iterator[Watched]:
    """Play rounds of a method that shares W, M and V, with centralized Adam beside each.

    Every client takes part in every round.

    >>> from fedsift.algorithms import fedadam_ssm
    >>> from fedsift.vector import Layout
    >>> model = nn.Linear(2, 1, bias=False)
    >>> data = [(torch.eye(2), torch.ones(2, 1)), (torch.eye(2), torch.zeros(2, 1))]
    >>> task = Task(model, nn.functional.mse_loss, data, None, None, 0, Layout.of(model))
    >>> [tuple(seen.deviation.shape) for seen in watch(task, fedadam_ssm(local_steps=3), 2)]
    [(2, 4), (2, 4)]
    """
    trail: Trail = []
    watched = replace(algorithm, phase=lambda round: _watched(algorithm.phase(round), trail))
    federation = Federation(task, watched, Reference(task))
    snapshot = federation.initial_snapshot()
    dense = snapshot.state
    objective = Objective(task)
    weights = torch.tensor([task.weight(n) for n in range(len(task.clients))]).to(dense.w)
    for _ in range(rounds):
        trail.clear()
        start, (snapshot, _) = snapshot.state, federation.run_round(snapshot)
        phase = algorithm.phase(snapshot.round)
        seen = _look(snapshot.round, start, dense, phase, trail, objective, weights)
        yield replace(seen, settings=algorithm.settings)
        dense = start.plus(_mean(seen.delta, weights))


def updates(task: Task, algorithm: Algorithm, rounds: int) -> Iterator[Moments]:
    """Every client's whole (ΔW, ΔM, ΔV) by round, ``(clients, d)``, before its mask.

    >>> from fedsift.algorithms import fedadam_ssm
    >>> from fedsift.vector import Layout
    >>> model = nn.Linear(2, 1, bias=False)
    >>> data = [(torch.eye(2), torch.ones(2, 1)), (torch.eye(2), torch.zeros(2, 1))]
    >>> task = Task(model, nn.functional.mse_loss, data, None, None, 0, Layout.of(model))
    >>> [tuple(delta.v.shape) for delta in updates(task, fedadam_ssm(local_steps=3), 2)]
    [(2, 2), (2, 2)]
    """
    sent: dict[tuple[int, ...], Moments] = {}

    def heard(phase: Phase) -> Phase:
        def send(context: Context, start: Moments, end: Moments, memory: Memory) -> Sent:
            sent[context.clients] = end - start
            return phase.send(context, start, end, memory)

        return replace(phase, send=send)

    listening = replace(algorithm, phase=lambda round: heard(algorithm.phase(round)))
    federation = Federation(task, listening, Stacked(task, listening))
    snapshot = federation.initial_snapshot()
    for _ in range(rounds):
        sent.clear()
        snapshot, _ = federation.run_round(snapshot)
        who = [n for clients in sent for n in clients]  # in stacks of equal batches
        order = sorted(range(len(who)), key=who.__getitem__)
        yield Moments(*(torch.cat(xs)[order] for xs in zip(*sent.values(), strict=True)))


def _watched(phase: Phase, trail: Trail) -> Phase:
    """The same phase, whose every step leaves its result and its gradient in the trail."""

    def step(x: Moments, gradient: Tensor) -> Moments:
        after = phase.step(x, gradient)
        trail.append((after, gradient))
        return after

    return replace(phase, step=step)


def _look(
    round: int,
    start: Moments,
    dense: Moments,
    phase: Phase,
    trail: Trail,
    objective: Objective,
    weights: Tensor,
) -> Watched:
    steps, clients = phase.local_steps, len(weights)
    ends = [trail[(n + 1) * steps - 1][0] for n in range(clients)]
    delta = Moments(*(torch.cat(xs) for xs in zip(*ends, strict=True))) - start
    ways = torch.cat([after.w for after, _ in trail]).view(clients, steps, -1)
    first = start.w.expand(clients, 1, -1)
    gradients = torch.cat([gradient for _, gradient in trail]).view(clients, steps, -1)
    central, central_gradients = _central(phase.step, steps, dense, objective)
    local = torch.cat([first, ways], dim=1)
    return Watched(
        round, {}, start, dense, delta, weights, local, gradients, central, central_gradients
    )


def _central(step: Step, steps: int, x: Moments, objective: Objective) -> tuple[Tensor, Tensor]:
    """The auxiliary w̌: the same Adam with the full gradient ∇F."""
    ways, gradients = [x.w], []
    for _ in range(steps):
        gradients.append(objective.gradient(x.w))
        x = step(x, gradients[-1])
        ways.append(x.w)
    return torch.stack(ways), torch.stack(gradients)


def _mean(delta: Moments, weights: Tensor) -> Moments:
    """The weighted mean that the server would form if nothing were masked."""
    share = weights / weights.sum()
    return Moments(*(share @ x for x in delta))


@dataclass(frozen=True)
class Noise:
    """How far gradients were from each other on a round's way.

    ``sampling``: the largest ‖∇F̃ₙ − ∇Fₙ‖ at the clients' weights; ``between``: the largest
    ‖∇Fₙ − ∇F‖ at those of centralized Adam, the σ_g of this round.
    """

    sampling: float
    between: float


def visited_noise(seen: Watched, objective: Objective) -> Noise:
    """Measure what Lemma 2 needs, where it needs it.

    >>> from fedsift.algorithms import fedadam_ssm
    >>> from fedsift.vector import Layout
    >>> model = nn.Linear(2, 1, bias=False)
    >>> data = [(torch.eye(2), torch.ones(2, 1)), (torch.eye(2), torch.zeros(2, 1))]
    >>> task = Task(model, nn.functional.mse_loss, data, None, None, 0, Layout.of(model))
    >>> (seen,) = watch(task, fedadam_ssm(local_steps=3), 1)
    >>> visited_noise(seen, Objective(task)).sampling < 1e-6  # whole local sets: no sampling
    True
    """
    sampling = between = 0.0
    for client, (ways, used) in enumerate(zip(seen.local, seen.gradients, strict=True)):
        for w, gradient in zip(ways, used, strict=False):
            gap = gradient - objective.gradient(w, client)
            sampling = max(sampling, float(gap.norm()))
        for w, gradient in zip(seen.central, seen.central_gradients, strict=False):
            gap = gradient - objective.gradient(w, client)
            between = max(between, float(gap.norm()))
    return Noise(sampling, between)
