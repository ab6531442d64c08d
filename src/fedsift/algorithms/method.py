"""The contract of a method: how clients train, what they send and remember, how the server merges.

A method is a set of pure functions on stacked tensors ``(clients, d)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from fedsift.algorithms.settings import GivenSetting
from fedsift.codec.update import Part, Parts, Role, dense, moments, sparse
from fedsift.schedules import describe
from fedsift.selection.difference import Difference
from fedsift.vector import Layout, Moments

Q = 32
"""The paper's q: bits per floating-point value."""
Memory = Mapping[str, Tensor]
"""What a client or the server keeps between rounds, by name. Tensors are ``(clients, d)`` on
clients and ``(1, d)`` on the server, and start at zero."""


@dataclass(frozen=True)
class Context:
    """Information about the round that a method may use besides the tensors."""

    layout: Layout
    round: int
    seed: int
    clients: tuple[int, ...]

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
    >>> start, end = (Moments.start(tensor([[w, 1.0]])) for w in (1.0, 1.5))
    >>> LocalUpdate(start, end).delta_w
    tensor([[0.5000, 0.0000]])
    """

    start: Moments
    end: Moments

    @cached_property
    def differences(self) -> dict[Role, Difference]:
        """The differences by role."""
        before, after = moments(self.start), moments(self.end)
        return {role: Difference(before[role], after[role]) for role in after}

    @property
    def delta_w(self) -> Tensor:
        """ΔW, all coordinates."""
        return self.differences["w"].dense

    @property
    def delta_m(self) -> Tensor:
        """ΔM, all coordinates."""
        return self.differences["m"].dense

    @property
    def delta_v(self) -> Tensor:
        """ΔV, all coordinates."""
        return self.differences["v"].dense

    @property
    def delta(self) -> Moments:
        """ΔW, ΔM and ΔV, all coordinates."""
        return Moments(self.delta_w, self.delta_m, self.delta_v)


LocalStart = Callable[[Moments, Memory], Moments]
Step = Callable[[Moments, Tensor], Moments]
Send = Callable[[Context, LocalUpdate, Memory], tuple[Parts, Memory]]
Broadcast = Callable[[Context, Moments, Memory], tuple[Parts, Memory]]
Apply = Callable[[Moments, Moments], Moments]
Model = Callable[[Moments, Memory], Tensor]


def from_global(state: Moments, memory: Memory) -> Moments:
    """Start local training from the global W, M and V."""
    return state


def broadcast_all(roles: tuple[Role, ...]) -> Broadcast:
    """Return a broadcast of every coordinate of the mean, for the given roles."""

    def broadcast(context: Context, mean: Moments, memory: Memory) -> tuple[Parts, Memory]:
        by_role = moments(mean)
        return dense({role: by_role[role][None] for role in roles}), memory

    return broadcast


def broadcast_nonzero(context: Context, mean: Moments, memory: Memory) -> tuple[Parts, Memory]:
    """Broadcast the nonzero coordinates of the mean: those that any client sent."""
    return nonzero_parts(mean), memory


def nonzero_parts(mean: Moments) -> Parts:
    """Return the nonzero coordinates of W, M and V, under one shared mask if that is smaller."""
    values = {role: x[None] for role, x in moments(mean).items()}
    masks = {role: x != 0 for role, x in values.items()}
    union = masks["w"] | masks["m"] | masks["v"]
    is_one_mask_smaller = 3 * union.sum() <= 2 * sum(mask.sum() for mask in masks.values())
    if bool(is_one_mask_smaller):
        return sparse(values, union)
    return tuple(
        part
        for role, mask in masks.items()
        if bool(mask.any())
        for part in sparse({role: values[role]}, mask)
    )


def add_received(state: Moments, received: Moments) -> Moments:
    """W ← W + ΔW, M ← M + ΔM, V ← V + ΔV."""
    return state.plus(received)


def global_weights(state: Moments, memory: Memory) -> Tensor:
    """Use the global W as the model's weights."""
    return state.w


@dataclass(frozen=True)
class Phase:
    """The functions of a round, in the order in which they are called.

    ``local_start(state, memory)``: where a client's local training starts;
    ``step(x, gradient)``: one local step, taken ``local_steps`` times;
    ``send(context, update, memory)``: what the client uploads, and its new memory;
    ``broadcast(context, mean, memory)``: what the server sends down, and its new memory;
    ``apply(state, received)``: the new global state. The server and the clients both compute it,
    from the same bytes.

    ``paper_bits(d)`` is the uplink per client and round in bits by the paper's formula, for a model
    with d parameters.
    """

    local_steps: int
    step: Step
    send: Send
    paper_bits: Callable[[int], float]
    local_start: LocalStart = from_global
    broadcast: Broadcast = broadcast_nonzero
    apply: Apply = add_received


@dataclass(frozen=True)
class Algorithm:
    """A federated method with its settings, as the functions of ``fedsift.algorithms`` return it.

    ``phase(round)`` returns the functions of a round. ``client_memory`` and ``server_memory`` name
    what clients and the server keep between rounds. ``model(state, memory)`` returns the weights to
    evaluate and to return to the user, given the global state and the server's memory.
    """

    phase: Callable[[int], Phase]
    client_memory: tuple[str, ...] = ()
    server_memory: tuple[str, ...] = ()
    model: Model = global_weights
    name: str = ""
    settings: Mapping[str, GivenSetting] = field(default_factory=dict)

    def __repr__(self) -> str:
        shown = {k: describe(x) if callable(x) else repr(x) for k, x in self.settings.items()}
        settings = ", ".join(f"{key}={value}" for key, value in shown.items())
        return f"{self.name.replace('-', '_')}({settings})"


def always(phase: Phase) -> Callable[[int], Phase]:
    """Use the same phase in every round."""
    return lambda round: phase


def checked_message(returned: Any, memory: Memory, function: str) -> tuple[Parts, Memory]:
    """Return what ``send`` or ``broadcast`` returned, after checking its form.

    >>> from torch import zeros
    >>> checked_message(((), {}), {"residual": zeros(1, 2)}, "send")
    Traceback (most recent call last):
    ...
    ValueError: send returned memory named nothing; the method declares residual
    """
    if not (
        isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping)
    ):
        raise TypeError(f"{function} must return the parts of a message and a memory (or {{}})")
    parts, new_memory = returned
    if not (isinstance(parts, tuple) and all(isinstance(part, Part) for part in parts)):
        raise TypeError(f"{function} must return parts of a message made by sparse() or dense()")
    if set(new_memory) != set(memory):
        got, declared = (", ".join(sorted(x)) or "nothing" for x in (new_memory, memory))
        raise ValueError(f"{function} returned memory named {got}; the method declares {declared}")
    return parts, new_memory


def zero_memory(names: tuple[str, ...], rows: int, like: Tensor) -> dict[str, Tensor]:
    """Return the memory before the first round, ``(rows, d)`` for each name."""
    return {name: like.new_zeros(rows, like.shape[-1]) for name in names}
