"""Buffers that training changes, such as the running statistics of batch normalization.

They are one more vector of the state, ``b``, which no method has to know: a method is wrapped by
:func:`with_buffers`, and never sees that vector.

``"average"`` (McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized
Data", 2017, applied to every number of the model): clients upload the exact change of their
buffers, and the server broadcasts its weighted mean, whatever the method does with the weights.

``"local"`` (Andreux et al., "Siloed Federated Learning for Multi-Centric Histopathology Datasets",
2020): every client keeps its own buffers in its memory, and they are never sent. FedBN (Li et al.,
"FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", 2021) keeps the scale
and bias of these layers on the client as well; here they are parameters like all others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedsift.adam import AdamStep
from fedsift.algorithms.method import (
    Algorithm,
    Context,
    LocalUpdate,
    Memory,
    Phase,
    Q,
    Step,
    StepContext,
    as_sent,
    checked_message,
)
from fedsift.codec.update import Parts, dense
from fedsift.vector import Layout, State

BUFFERS = ("average", "local", "frozen")
"""What happens to the buffers that training changes."""
OWN = "buffers"
"""A client's memory of its own buffers: their values, then 1 once it has trained."""


def with_buffers(algorithm: Algorithm, layout: Layout, buffers: str) -> Algorithm:
    """Return a method that also trains the buffers of a layout, if it has any.

    >>> from torch import nn
    >>> from fedsift.algorithms import fedadam
    >>> model = nn.BatchNorm1d(2)
    >>> layout = Layout.of(model).with_buffers(model, ["running_mean", "running_var"])
    >>> with_buffers(fedadam(), layout, "average").state
    ('w', 'm', 'v', 'b')
    """
    if layout.buffers is None:
        return algorithm
    wrapped = replace(
        algorithm,
        state=(*algorithm.state, "b"),
        model=lambda state, memory: torch.cat([algorithm.model(state, memory), state.b]),
        lengths={**algorithm.lengths, "b": num_buffers},
    )
    if buffers == "average":
        return replace(wrapped, phase=lambda round: averaged(algorithm.phase(round), layout))
    return replace(
        wrapped,
        phase=lambda round: kept(algorithm.phase(round)),
        client_memory=(*algorithm.client_memory, OWN),
        lengths={**wrapped.lengths, OWN: lambda layout: num_buffers(layout) + 1},
    )


def keeps_buffers(algorithm: Algorithm) -> bool:
    """Whether clients keep their own buffers."""
    return OWN in algorithm.client_memory


def num_buffers(layout: Layout) -> int:
    """Return the length of the vector of buffers."""
    return layout.buffers.d if layout.buffers else 0


def without_buffers(state: State) -> State:
    """Return what a method sees of a state."""
    return State(**{name: x for name, x in state.items() if name != "b"})


def joined(state: State, b: Tensor) -> State:
    """Return a state with the buffers added."""
    return State(**dict(state.items()), b=b)


def method_update(update: LocalUpdate) -> LocalUpdate:
    """Return what a method sees of a client's local training."""
    return LocalUpdate(without_buffers(update.start), without_buffers(update.end))


def averaged(phase: Phase, layout: Layout) -> Phase:
    """Return a phase that also averages the buffers."""

    def send(context: Context, update: LocalUpdate, memory: Memory) -> tuple[Parts, Memory]:
        inner = with_values_of(context, update.start.b[0])
        parts, memory = checked_message(
            phase.send(inner, method_update(update), memory), memory, "send"
        )
        return (*parts, *dense({"b": update.end.b - update.start.b})), memory

    def receive(context: Context, state: State, parts: Parts) -> Parts:
        inner = with_values_of(context, state.b)
        others = tuple(part for part in parts if "b" not in part.values)
        received = phase.receive(inner, without_buffers(state), others)
        return (*received, *(part for part in parts if "b" in part.values))

    def broadcast(context: Context, mean: State, memory: Memory) -> tuple[Parts, Memory]:
        parts, memory = checked_message(
            phase.broadcast(context, without_buffers(mean), memory), memory, "broadcast"
        )
        return (*parts, *dense({"b": mean.b[None]})), memory

    def apply(context: Context, state: State, received: State) -> State:
        inner = with_values_of(context, state.b)
        after = phase.apply(inner, without_buffers(state), without_buffers(received))
        return joined(after, clamp_variances(state.b + received.b, layout))

    return replace(
        phase,
        send=send,
        receive=phase.receive if phase.receive is as_sent else receive,
        broadcast=broadcast,
        apply=apply,
        paper_bits=lambda d: phase.paper_bits(d) + Q * num_buffers(layout),
    )


def with_values_of(context: Context, b: Tensor) -> Context:
    """Return a context whose gradient is computed with the given buffers."""

    def gradient(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return context.gradient(torch.cat([w, b]), x, y)[: context.d]

    return replace(context, gradient=gradient)


def clamp_variances(b: Tensor, layout: Layout) -> Tensor:
    """Return buffers ``(n,)`` in which no running variance is negative."""
    assert layout.buffers is not None
    for name, span in layout.buffers.layers.items():
        if name.rpartition(".")[2] == "running_var":
            b[span].clamp_(min=0)
    return b


def kept(phase: Phase) -> Phase:
    """Return a phase in which each client keeps its own buffers."""

    def local_start(state: State, memory: Memory) -> State:
        start = phase.local_start(without_buffers(state), without_own(memory))
        return joined(start, own_buffers(state.b, memory))

    def send(context: Context, update: LocalUpdate, memory: Memory) -> tuple[Parts, Memory]:
        inner = without_own(memory)
        message = phase.send(context, method_update(update), inner)
        parts, after = checked_message(message, inner, "send")
        b = update.end.b
        return parts, {**after, OWN: torch.cat([b, torch.ones_like(b[:, :1])], dim=-1)}

    def receive(context: Context, state: State, parts: Parts) -> Parts:
        return phase.receive(context, without_buffers(state), parts)

    def broadcast(context: Context, mean: State, memory: Memory) -> tuple[Parts, Memory]:
        return phase.broadcast(context, without_buffers(mean), memory)

    def apply(context: Context, state: State, received: State) -> State:
        after = phase.apply(context, without_buffers(state), without_buffers(received))
        return joined(after, state.b)

    return replace(
        phase,
        local_start=local_start,
        step=phase.step if isinstance(phase.step, AdamStep) else KeepOwn(phase.step),
        send=send,
        receive=phase.receive if phase.receive is as_sent else receive,
        broadcast=broadcast,
        apply=apply,
    )


def without_own(memory: Memory) -> Memory:
    """Return what a method sees of a client's memory."""
    return {name: x for name, x in memory.items() if name != OWN}


def own_buffers(initial: Tensor, memory: Memory) -> Tensor:
    """Return a client's buffers ``(clients, n)``: the initial ones until it has trained."""
    own = memory[OWN]
    return torch.where(own[:, -1:] > 0, own[:, :-1], initial)


@dataclass(frozen=True)
class KeepOwn:
    """A method's step, which may change the client's memory but does not know its buffers."""

    step: Step

    def __call__(
        self, x: State, gradient: Tensor, context: StepContext
    ) -> State | tuple[State, Memory]:
        """Return the step's result, with the client's buffers in its memory if it returns one."""
        result = self.step(x, gradient, context)
        if isinstance(result, State):
            return result
        after, memory = result
        return after, {**memory, OWN: context.memory[OWN]}
