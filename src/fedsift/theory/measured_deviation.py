"""The real deviation of FedAdam-SSM from the auxiliary centralized Adam of Theorem 1.

The federation runs unchanged; every local step is recorded. In each round, Adam with the full
gradient ∇F starts from the non-sparse state W̆, M̆, V̆ for comparison.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedsift.adam import AdamStep
from fedsift.algorithms.method import Algorithm, Context, LocalUpdate, Memory, Phase
from fedsift.algorithms.step_context import StepContext
from fedsift.codec.frame import Spec
from fedsift.codec.limits import Limits
from fedsift.codec.update import Parts, Update
from fedsift.codec.wire import SimulatedWire
from fedsift.engine.gpu.stacked import Stacked
from fedsift.engine.reference import Reference
from fedsift.federation.round import Federation
from fedsift.task import Task
from fedsift.theory.objective import Objective
from fedsift.vector import State


@dataclass(frozen=True)
class RoundComparison:
    """One round: the path of every client, that of centralized Adam, and the last round's errors.

    ``local`` is ``(clients, L + 1, d)`` and ``central`` ``(L + 1, d)``: the weights before the
    first step and after each step. ``gradients`` ``(clients, L, d)`` and ``central_gradients``
    ``(L, d)`` are the gradients used. ``start`` is (W, M, V), ``dense`` is (W̆, M̆, V̆), and
    ``delta`` ``(clients, d)`` is the update of each client before its mask.
    """

    round: int
    settings: Mapping[str, float | int]
    start: State
    dense: State
    delta: State
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
        """The largest |coordinate| of all gradients used: G on the visited region."""
        return float(max(self.gradients.abs().max(), self.central_gradients.abs().max()))


RecordedSteps = list[tuple[State, Tensor]]
"""The result and the gradient of every local step, client by client."""
Sent = tuple[Parts, Memory]


def compare_with_centralized(
    task: Task, algorithm: Algorithm, rounds: int
) -> Iterator[RoundComparison]:
    """Run rounds of a method that shares W, M and V, and compare each with centralized Adam.

    Every client takes part in every round.

    >>> from fedsift.algorithms import fedadam_ssm
    >>> from fedsift.vector import Layout
    >>> model = nn.Linear(2, 1, bias=False)
    >>> data = [(torch.eye(2), torch.ones(2, 1)), (torch.eye(2), torch.zeros(2, 1))]
    >>> task = Task(model, nn.functional.mse_loss, data, None, None, 0, Layout.of(model))
    >>> rounds = compare_with_centralized(task, fedadam_ssm(local_steps=3), 2)
    >>> [tuple(comparison.deviation.shape) for comparison in rounds]
    [(2, 4), (2, 4)]
    """
    steps: RecordedSteps = []
    recorded = replace(algorithm, phase=lambda round: _recording(algorithm.phase(round), steps))
    federation = Federation(
        task, recorded, Reference(task), wire=SimulatedWire(_uncounted, builds_frames=False)
    )
    snapshot = federation.initial_snapshot()
    dense = snapshot.state
    objective = Objective(task)
    weights = torch.tensor([federation.weight(n) for n in range(len(task.clients))]).to(dense.w)
    for _ in range(rounds):
        steps.clear()
        start, (snapshot, _) = snapshot.state, federation.run_round(snapshot)
        phase = algorithm.phase(snapshot.round)
        comparison = _compare(snapshot.round, start, dense, phase, steps, objective, weights)
        yield replace(comparison, settings=numbers_in(algorithm, snapshot.round))
        dense = start.plus(_mean(comparison.delta, weights))


def numbers_in(algorithm: Algorithm, round: int) -> dict[str, float | int]:
    """Return the values that an algorithm's numeric settings have in a round.

    >>> from fedsift.algorithms import fedsgd
    >>> numbers_in(fedsgd(lr=lambda round: 1 / round), round=4)
    {'local_steps': 30, 'lr': 0.25}
    """
    values = {k: x(round) if callable(x) else x for k, x in algorithm.settings.items()}
    return {key: x for key, x in values.items() if isinstance(x, int | float)}


def client_updates(task: Task, algorithm: Algorithm, rounds: int) -> Iterator[State]:
    """Yield, per round, every client's full (ΔW, ΔM, ΔV) before its mask, ``(clients, d)``.

    >>> from fedsift.algorithms import fedadam_ssm
    >>> from fedsift.vector import Layout
    >>> model = nn.Linear(2, 1, bias=False)
    >>> data = [(torch.eye(2), torch.ones(2, 1)), (torch.eye(2), torch.zeros(2, 1))]
    >>> task = Task(model, nn.functional.mse_loss, data, None, None, 0, Layout.of(model))
    >>> [tuple(delta.v.shape) for delta in client_updates(task, fedadam_ssm(local_steps=3), 2)]
    [(2, 2), (2, 2)]
    """
    by_clients: dict[tuple[int, ...], State] = {}

    def recording_sends(phase: Phase) -> Phase:
        def send(context: Context, update: LocalUpdate, memory: Memory) -> Sent:
            by_clients[context.clients] = update.delta
            return phase.send(context, update, memory)

        return replace(phase, send=send)

    recorded = replace(algorithm, phase=lambda round: recording_sends(algorithm.phase(round)))
    federation = Federation(
        task, recorded, Stacked(task, recorded), wire=SimulatedWire(_uncounted, builds_frames=False)
    )
    snapshot = federation.initial_snapshot()
    for _ in range(rounds):
        by_clients.clear()
        snapshot, _ = federation.run_round(snapshot)
        # Clients arrive in stacks of equal batch size; restore their order.
        numbers = [n for clients in by_clients for n in clients]
        order = sorted(range(len(numbers)), key=numbers.__getitem__)
        yield rows_of(joined(list(by_clients.values())), order)


def joined(states: Sequence[State]) -> State:
    """Return stacks of clients as one stack."""
    return State(**{name: torch.cat([x[name] for x in states]) for name in states[0].names})


def rows_of(x: State, order: list[int]) -> State:
    """Return some clients of a stack."""
    return x.map(lambda vector: vector[order])


def _uncounted(update: Update, spec: Spec, limits: Limits) -> tuple[Update, int]:
    """A wire that skips the byte count, which is not needed here."""
    return update, 0


def adam_step_of(phase: Phase) -> AdamStep:
    """Return the phase's step, which must be the paper's."""
    if not isinstance(phase.step, AdamStep):
        raise ValueError("the comparison needs a method that takes the paper's Adam steps")
    return phase.step


def _recording(phase: Phase, steps: RecordedSteps) -> Phase:
    """The same phase, with a step that records its result and its gradient."""

    def step(x: State, gradient: Tensor, context: StepContext) -> State:
        after = adam_step_of(phase)(x, gradient)
        steps.append((after, gradient))
        return after

    return replace(phase, step=step)


def _compare(
    round: int,
    start: State,
    dense: State,
    phase: Phase,
    recorded: RecordedSteps,
    objective: Objective,
    weights: Tensor,
) -> RoundComparison:
    steps, clients = len(recorded) // len(weights), len(weights)
    ends = [recorded[(n + 1) * steps - 1][0] for n in range(clients)]
    delta = joined(ends) - start
    paths = torch.cat([after.w for after, _ in recorded]).view(clients, steps, -1)
    first = start.w.expand(clients, 1, -1)
    gradients = torch.cat([gradient for _, gradient in recorded]).view(clients, steps, -1)
    central, central_gradients = _centralized_adam(adam_step_of(phase), steps, dense, objective)
    local = torch.cat([first, paths], dim=1)
    return RoundComparison(
        round, {}, start, dense, delta, weights, local, gradients, central, central_gradients
    )


def _centralized_adam(
    step: AdamStep, steps: int, x: State, objective: Objective
) -> tuple[Tensor, Tensor]:
    """The path of the auxiliary w̌, the same Adam with the full gradient ∇F, and its gradients."""
    path, gradients = [x.w], []
    for _ in range(steps):
        gradients.append(objective.gradient(x.w))
        x = step(x, gradients[-1])
        path.append(x.w)
    return torch.stack(path), torch.stack(gradients)


def _mean(delta: State, weights: Tensor) -> State:
    """The weighted mean that the server would form if nothing were masked."""
    share = weights / weights.sum()
    return delta.map(lambda x: share @ x)


@dataclass(frozen=True)
class GradientNoise:
    """The largest distances between gradients on the paths of one round.

    ``sampling``: ‖∇F̃ₙ − ∇Fₙ‖ at the clients' weights. ``between_clients``: ‖∇Fₙ − ∇F‖ at the
    weights of centralized Adam, which is σ_g for this round.
    """

    sampling: float
    between_clients: float


def gradient_noise(comparison: RoundComparison, objective: Objective) -> GradientNoise:
    """Measure the gradient noise that Lemma 2 bounds, at the weights where the proof uses it.

    >>> from fedsift.algorithms import fedadam_ssm
    >>> from fedsift.vector import Layout
    >>> model = nn.Linear(2, 1, bias=False)
    >>> data = [(torch.eye(2), torch.ones(2, 1)), (torch.eye(2), torch.zeros(2, 1))]
    >>> task = Task(model, nn.functional.mse_loss, data, None, None, 0, Layout.of(model))
    >>> (comparison,) = compare_with_centralized(task, fedadam_ssm(local_steps=3), 1)
    >>> gradient_noise(comparison, Objective(task)).sampling < 1e-6  # full batches: no sampling
    True
    """
    sampling = between = 0.0
    paths = zip(comparison.local, comparison.gradients, strict=True)
    for client, (path, used) in enumerate(paths):
        for w, gradient in zip(path, used, strict=False):
            gap = gradient - objective.gradient(w, client)
            sampling = max(sampling, float(gap.norm()))
        for w, gradient in zip(comparison.central, comparison.central_gradients, strict=False):
            gap = gradient - objective.gradient(w, client)
            between = max(between, float(gap.norm()))
    return GradientNoise(sampling, between)
