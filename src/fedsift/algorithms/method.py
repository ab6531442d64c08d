"""What a method is: how a client trains, what it keeps, what it sends, how the server merges.

A method is a set of pure functions on stacked tensors ``(clients, d)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fedsift.codec.update import Part, Parts, Role, dense, moments, sparse
from fedsift.vector import Layout, Moments

Memory = Mapping[str, Tensor]
"""What a party keeps between rounds: by name, ``(clients, d)`` on clients and ``(1, d)`` on the
server. It begins at zero."""


@dataclass(frozen=True)
class Context:
    """What a method may know of the round beside the tensors."""

    layout: Layout
    round: int
    seed: int
    clients: tuple[int, ...]

    @property
    def d(self) -> int:
        """Number of model parameters."""
        return self.layout.d


def from_global(state: Moments, memory: Memory) -> Moments:
    """Local training starts from the global W, M and V."""
    return state


def global_weights(state: Moments, memory: Memory) -> Tensor:
    """The model is the global W."""
    return state.w


def send_nonzero(context: Context, mean: Moments, memory: Memory) -> tuple[Parts, Memory]:
    """The server sends down what it has: the coordinates that any client sent, exactly."""
    return nonzero_parts(mean), memory


def send_all(roles: tuple[Role, ...]) -> Broadcast:
    """The server sends down every coordinate of the given roles, exactly."""

    def broadcast(context: Context, mean: Moments, memory: Memory) -> tuple[Parts, Memory]:
        whole = moments(mean)
        return dense({role: whole[role][None] for role in roles}), memory

    return broadcast


def add(state: Moments, received: Moments) -> Moments:
    """W ← W + ΔW, M ← M + ΔM, V ← V + ΔV."""
    return state.plus(received)


def nonzero_parts(mean: Moments) -> Parts:
    """The nonzero coordinates of each tensor, tensors with the same ones under one mask."""
    masks: dict[Role, Tensor] = {role: x[None] != 0 for role, x in moments(mean).items()}
    whole = {role: x[None] for role, x in moments(mean).items()}
    union = masks["w"] | masks["m"] | masks["v"]
    shared = 3 * union.sum() <= 2 * sum(mask.sum() for mask in masks.values())
    if bool(shared):
        return sparse(whole, union)
    return tuple(
        part
        for role, mask in masks.items()
        if bool(mask.any())
        for part in sparse({role: whole[role]}, mask)
    )


Begin = Callable[[Moments, Memory], Moments]
Step = Callable[[Moments, Tensor], Moments]
Send = Callable[[Context, Moments, Moments, Memory], tuple[Parts, Memory]]
Broadcast = Callable[[Context, Moments, Memory], tuple[Parts, Memory]]
Apply = Callable[[Moments, Moments], Moments]
Model = Callable[[Moments, Memory], Tensor]


@dataclass(frozen=True)
class Phase:
    """How a round goes: its functions, in the order in which a round calls them.

    ``begin(state, memory)``: where a client's local training starts;
    ``step(x, gradient)``: one local step, taken ``local_steps`` times;
    ``send(context, start, end, memory)``: what the client uploads, and its new memory;
    ``broadcast(context, mean, memory)``: what the server sends down, and its new memory;
    ``apply(state, received)``: the new global state. Server and clients both compute it, from
    the same bytes.

    ``paper_bits(d)`` is what a client uploads by the paper's formula, for a model of d parameters.
    """

    local_steps: int
    step: Step
    send: Send
    paper_bits: Callable[[int], float]
    begin: Begin = from_global
    broadcast: Broadcast = send_nonzero
    apply: Apply = add


@dataclass(frozen=True)
class Algorithm:
    """A federated method with its settings; made by the functions of ``fedsift.algorithms``.

    ``model(state, memory)``: the weights to test and to hand out, of the global state and of what
    the server keeps.
    """

    phase: Callable[[int], Phase]
    client_memory: tuple[str, ...] = ()
    server_memory: tuple[str, ...] = ()
    model: Model = global_weights
    name: str = ""
    settings: Mapping[str, float | int] = field(default_factory=dict)

    def __repr__(self) -> str:
        settings = ", ".join(f"{key}={value}" for key, value in self.settings.items())
        return f"{self.name.replace('-', '_')}({settings})"


def always(phase: Phase) -> Callable[[int], Phase]:
    """The schedule of a method whose rounds are all alike."""
    return lambda round: phase


def required(told: Any, memory: Memory, who: str) -> tuple[Parts, Memory]:
    """What ``send`` or ``broadcast`` gave, if it is what it must be.

    >>> from torch import zeros
    >>> required(((), {}), {"residual": zeros(1, 2)}, "send")
    Traceback (most recent call last):
    ...
    ValueError: send kept nothing, but the method's memories are: residual
    """
    if not (isinstance(told, tuple) and len(told) == 2 and isinstance(told[1], Mapping)):
        raise TypeError(f"{who} must return the parts of a message, and a memory; {{}} is none")
    parts, kept = told
    if not (isinstance(parts, tuple) and all(isinstance(part, Part) for part in parts)):
        raise TypeError(f"{who} must return the parts of a message, as sparse and dense make them")
    if set(kept) != set(memory):
        names, declared = (", ".join(sorted(x)) or "nothing" for x in (kept, memory))
        raise ValueError(f"{who} kept {names}, but the method's memories are: {declared}")
    return parts, kept


def zeros(names: tuple[str, ...], rows: int, like: Tensor) -> dict[str, Tensor]:
    """The memory with which a party begins."""
    return {name: like.new_zeros(rows, like.shape[-1]) for name in names}
