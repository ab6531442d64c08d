"""The contract of a method: how clients train, what they send and remember, how the server merges.

A method is a set of pure functions on stacked tensors ``(clients, d)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from fedsift.algorithms.checks import (
    check_declared,
    check_function,
    check_memory_names,
    check_state,
    check_steps,
    names_with_lengths,
)
from fedsift.algorithms.settings import GivenSetting
from fedsift.algorithms.step_context import StepContext
from fedsift.codec.update import PAYLOADS, ROLES, Parts, Role, by_role, dense, sparse
from fedsift.schedules import describe
from fedsift.selection.difference import Difference
from fedsift.task import NumSteps, Task, Weights, check_weights
from fedsift.vector import MOMENTS, Layout, State

Q = 32
"""The paper's q: bits per floating-point value."""
Memory = Mapping[str, Tensor]
"""What a client or the server keeps between rounds, by name. Tensors are ``(clients, d)`` on
clients and ``(1, d)`` on the server, and start at zero. A vector may have another length, if
``Algorithm.lengths`` declares it."""
LossGradient = Callable[[Tensor, Tensor, Tensor], Tensor]
"""The gradient of the loss: (weights ``(d,)``, x, y) to a vector ``(d,)``."""


def no_gradient(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Fail, because there is no model that could compute a gradient."""
    raise ValueError(
        "this method computes gradients on the server, which needs the model: on Flower, pass "
        "network=model to FedSift"
    )


@dataclass(frozen=True)
class Context:
    """Information about the round that a method may use besides the tensors.

    ``clients`` are the clients of the stack, and empty where the server acts for all. ``state`` is
    the global state ``(d,)`` at the start of the round.
    ``gradient(w, x, y)`` is the gradient ``(d,)`` of the task's loss at weights w ``(d,)``, with
    the model in evaluation mode. It can itself be differentiated with respect to x and y.
    ``merged_share`` is the share of all clients whose updates are in the mean, in ``broadcast``;
    0 elsewhere.
    """

    layout: Layout
    round: int
    seed: int
    clients: tuple[int, ...]
    state: State = field(default_factory=State, repr=False, compare=False)
    gradient: LossGradient = field(default=no_gradient, repr=False, compare=False)
    merged_share: float = 0.0

    @classmethod
    def of(cls, task: Task, round: int, state: State, clients: tuple[int, ...] = ()) -> Context:
        """Return the context of a round of a task that starts from the given state."""
        gradient = task.gradient if task.has_model else no_gradient
        return cls(task.layout, round, task.seed, clients, state, gradient)

    @property
    def d(self) -> int:
        """Number of model parameters."""
        return self.layout.d


@dataclass(frozen=True, eq=False)
class LocalUpdate:
    """Where clients' local training started and ended, and the differences ΔW, ΔM and ΔV.

    Each difference is computed at most once, and only if it is used. To send a few coordinates,
    pass ``differences`` to :func:`fedsift.codec.update.sparse`, which reads no others.

    >>> from torch import tensor
    >>> start, end = (State.start(tensor([[w, 1.0]])) for w in (1.0, 1.5))
    >>> LocalUpdate(start, end).delta_w
    tensor([[0.5000, 0.0000]])
    """

    start: State
    end: State

    @cached_property
    def differences(self) -> dict[Role, Difference]:
        """The differences by role."""
        before = by_role(self.start)
        return {role: Difference(before[role], x) for role, x in by_role(self.end).items()}

    @property
    def delta_w(self) -> Tensor:
        """ΔW, all coordinates."""
        return self._dense("w")

    @property
    def delta_m(self) -> Tensor:
        """ΔM, all coordinates."""
        return self._dense("m")

    @property
    def delta_v(self) -> Tensor:
        """ΔV, all coordinates."""
        return self._dense("v")

    @property
    def delta(self) -> State:
        """The differences of all vectors, all coordinates."""
        return State(**{role: x.dense for role, x in self.differences.items()})

    def _dense(self, role: Role) -> Tensor:
        if role not in self.end:
            self.end[role]  # raises the error that names the vectors of the state
        return self.differences[role].dense


LocalStart = Callable[[State, Memory], State]
Step = Callable[[State, Tensor, StepContext], State | tuple[State, Memory]]
Points = Callable[[State, StepContext], Iterator[Tensor]]
Send = Callable[[Context, LocalUpdate, Memory], tuple[Parts, Memory]]
Receive = Callable[[Context, State, Parts], Parts]
Broadcast = Callable[[Context, State, Memory], tuple[Parts, Memory]]
Apply = Callable[[Context, State, State], State]
Model = Callable[[State, Memory], Tensor]


def from_global(state: State, memory: Memory) -> State:
    """Start local training from the global state."""
    return state


def as_sent(context: Context, state: State, parts: Parts) -> Parts:
    """Merge what clients send as it is."""
    return parts


def broadcast_all(roles: tuple[Role, ...]) -> Broadcast:
    """Return a broadcast of every coordinate of the mean, for the given roles."""

    def broadcast(context: Context, mean: State, memory: Memory) -> tuple[Parts, Memory]:
        return dense({role: mean[role][None] for role in roles}), memory

    return broadcast


def broadcast_nonzero(context: Context, mean: State, memory: Memory) -> tuple[Parts, Memory]:
    """Broadcast the nonzero coordinates of the mean: those that any client sent."""
    return nonzero_parts(mean), memory


def nonzero_parts(mean: State) -> Parts:
    """Return the nonzero coordinates of the mean, under one shared mask if that is smaller.

    Payloads are sent in full.
    """
    values = {role: x[None] for role, x in by_role(mean).items()}
    payloads = dense({role: x for role, x in values.items() if role in PAYLOADS})
    values = {role: x for role, x in values.items() if role not in PAYLOADS}
    masks = {role: x != 0 for role, x in values.items()}
    union = torch.stack(list(masks.values())).any(0)
    is_one_mask_smaller = 3 * union.sum() <= 2 * sum(mask.sum() for mask in masks.values())
    if bool(is_one_mask_smaller):
        return (*sparse(values, union), *payloads)
    separate = tuple(
        part
        for role, mask in masks.items()
        if bool(mask.any())
        for part in sparse({role: values[role]}, mask)
    )
    return (*separate, *payloads)


def add_received(context: Context, state: State, received: State) -> State:
    """Add what was received to each vector: W ← W + ΔW and so on."""
    return state.plus(received)


def global_weights(state: State, memory: Memory) -> Tensor:
    """Use the global W as the model's weights."""
    return state.w


PARAMETERS = {
    "step": "x, gradient, context",
    "send": "context, update, memory",
    "paper_bits": "d",
    "local_start": "state, memory",
    "broadcast": "context, mean, memory",
    "apply": "context, state, received",
    "points": "x, context",
    "receive": "context, state, parts",
}
"""The parameters of the functions of a phase."""


@dataclass(frozen=True)
class Phase:
    """The functions of a round, in the order in which they are called.

    ``local_start(state, memory)``: where a client's local training starts. It may add vectors, such
    as a momentum, which then last for this round;
    ``step(x, gradient, context)``: one local step; it returns the next x, or x and those
    vectors of the client's memory that it changes;
    ``points(x, context)``: for methods without gradients. It yields weights ``(clients, d)``, and
    ``step`` receives the losses of the mini-batch there, ``(clients, points)``, instead of a
    gradient;
    ``send(context, update, memory)``: what the client uploads, and its new memory;
    ``receive(context, state, parts)``: what the server merges of an upload;
    ``broadcast(context, mean, memory)``: what the server sends down, and its new memory;
    ``apply(context, state, received)``: the new global state. The server and the clients both
    compute it, from the same bytes.

    ``local_steps`` is the number of steps per client and round, or a function of the number of the
    client's samples and its batch size, such as :class:`fedsift.task.Epochs`. ``paper_bits(d)`` is
    the uplink per client and round in bits by the paper's formula, for a model with d parameters.
    ``summed`` names the roles of which the server needs only the weighted sum over clients. Every
    client sends them in full, as whole numbers on a scale that all clients share. ``largest`` is
    the largest of these numbers; without it, the largest that their coder can hold.
    """

    local_steps: NumSteps
    step: Step
    send: Send
    paper_bits: Callable[[int], float]
    local_start: LocalStart = from_global
    broadcast: Broadcast = broadcast_nonzero
    apply: Apply = add_received
    points: Points | None = None
    receive: Receive = as_sent
    summed: tuple[Role, ...] = ()
    largest: int = 0

    def __post_init__(self) -> None:
        check_steps(self.local_steps)
        for name, parameters in PARAMETERS.items():
            if (function := getattr(self, name)) is not None:
                check_function(name, function, parameters)


Length = int | Callable[[Layout], int]
"""The length of a vector, or a function that computes it from the model's layout."""


@dataclass(frozen=True)
class Algorithm:
    """A federated method with its settings, as the functions of ``fedsift.algorithms`` return it.

    ``phase(round)`` returns the functions of a round. ``state`` names the vectors of the global
    state, in the order w, m, v, c. ``client_memory`` and ``server_memory`` name what clients and
    the server keep between rounds. ``model(state, memory)`` returns the weights to evaluate and to
    return to the user, given the global state and the server's memory. ``lengths`` are the lengths
    of payloads and memories that do not have one number per parameter. ``weights`` are the clients'
    weights in the mean: ``"batch"``, their mini-batch sizes; ``"examples"``, their numbers of
    samples; or ``"equal"``. ``server_start`` are the values with which the server's memories start,
    for those that do not start at zero. With ``makes_samples``, the payload ``p`` is a synthetic
    sample: the layout then has the shapes of an input and of its label, and the payload's bits are
    added to those of ``Phase.paper_bits``.
    """

    phase: Callable[[int], Phase]
    client_memory: tuple[str, ...] = ()
    server_memory: tuple[str, ...] = ()
    model: Model = global_weights
    state: tuple[str, ...] = MOMENTS
    lengths: Mapping[str, Length] = field(default_factory=dict)
    weights: Weights = "batch"
    server_start: Mapping[str, float] = field(default_factory=dict)
    makes_samples: bool = False
    name: str = ""
    settings: Mapping[str, GivenSetting] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not callable(self.phase):
            raise TypeError("a method's phase must be a function of the round: use always(phase)")
        check_weights(self.weights)
        check_state(self.state)
        check_memory_names("client_memory", self.client_memory)
        check_memory_names("server_memory", self.server_memory)
        check_declared("server_start", self.server_start, self.server_memory)
        declared = names_with_lengths(self.state, self.client_memory, self.server_memory)
        check_declared("lengths", self.lengths, declared)

    def __repr__(self) -> str:
        shown = {k: describe(x) if callable(x) else repr(x) for k, x in self.settings.items()}
        settings = ", ".join(f"{key}={value}" for key, value in shown.items())
        return f"{self.name.replace('-', '_')}({settings})"

    def layout_for(self, layout: Layout) -> Layout:
        """Return a model's layout with the lengths of this method's vectors."""
        return layout.with_lengths(
            {name: n(layout) if callable(n) else n for name, n in self.lengths.items()}
        )

    def paper_bits(self, phase: Phase, layout: Layout) -> float:
        """Return the uplink per client in a round of a phase, in bits by the paper's formula."""
        sample = Q * layout.length("p") if self.makes_samples else 0
        return phase.paper_bits(layout.d) + sample

    def initial_state(self, layout: Layout, values: Tensor) -> State:
        """Return the state before round 1: the model's values, and zeros in all other vectors."""
        zeros = {name: values.new_zeros(layout.length(name)) for name in self.state}
        w, b = layout.split(values)
        return State(**{**zeros, "w": w.clone(), **({"b": b.clone()} if layout.buffers else {})})

    def initial_server_memory(self, layout: Layout, like: Tensor) -> dict[str, Tensor]:
        """Return the server's memory before round 1."""
        zeros = zero_memory(self.server_memory, layout, like)
        return {name: x + self.server_start.get(name, 0.0) for name, x in zeros.items()}

    def zero_update(self, layout: Layout, w: Tensor) -> State:
        """Return zeros for everything that clients or the server may send."""
        payloads = [role for role in ROLES if role in PAYLOADS and role in dict(layout.lengths)]
        sent = dict.fromkeys([*self.state, *payloads])
        return State(**{name: w.new_zeros(layout.length(name)) for name in sent})


def always(phase: Phase) -> Callable[[int], Phase]:
    """Use the same phase in every round."""
    return lambda round: phase


def zero_memory(names: tuple[str, ...], layout: Layout, like: Tensor) -> dict[str, Tensor]:
    """Return the memory before the first round, one row for each name."""
    return {name: like.new_zeros(1, layout.length(name)) for name in names}
