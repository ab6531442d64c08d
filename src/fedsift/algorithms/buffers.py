"""Buffers that training changes, such as the running statistics of batch normalization.

They are one more vector of the state, ``b``, which no method has to know: :func:`with_buffers`
wraps a method, which then never sees that vector.

``"average"``: clients upload the exact change of their buffers, and the server broadcasts its
weighted mean, whatever the method does with the weights.

``"local"``: X. Li, M. Jiang, X. Zhang, M. Kamp and Q. Dou, "FedBN: Federated Learning on Non-IID
Features via Local Batch Normalization", 2021. Each client keeps its normalization layers: their
statistics, and also their scale and bias, with all other vectors of the state at these coordinates.
None of them changes at the server.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fedsift.algorithms.checks import checked_message
from fedsift.algorithms.method import (
    Algorithm,
    Context,
    LocalUpdate,
    Memory,
    Phase,
    Q,
    as_sent,
)
from fedsift.codec.update import PAYLOADS, Parts, dense
from fedsift.vector import Layout, State

BUFFERS = ("average", "local", "frozen")
"""What happens to the buffers that training changes."""
OWN = "own_layers"
"""A client's memory of its own layers."""
VARIANCE = "running_var"
"""The name of the buffers that must not be negative."""


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
        lengths={**algorithm.lengths, "b": layout.buffers.d},
    )
    if buffers == "average":
        return replace(wrapped, phase=lambda round: with_averaging(algorithm.phase(round), layout))
    own = OwnLayers.of(algorithm.state, layout)
    return replace(
        wrapped,
        phase=lambda round: with_kept_layers(algorithm.phase(round), own),
        client_memory=(*algorithm.client_memory, OWN),
        lengths={**wrapped.lengths, OWN: own.length},
    )


def without_buffers(state: State) -> State:
    """Return what a method sees of a state."""
    return State(**{name: x for name, x in state.items() if name != "b"})


def joined(state: State, b: Tensor) -> State:
    """Return a state with the buffers added."""
    return State(**dict(state.items()), b=b)


def with_averaging(phase: Phase, layout: Layout) -> Phase:
    """Return a phase that also averages the buffers."""
    assert layout.buffers is not None
    extra_bits = Q * layout.buffers.d

    def local_start(state: State, memory: Memory) -> State:
        return joined(phase.local_start(without_buffers(state), memory), state.b)

    def send(context: Context, update: LocalUpdate, memory: Memory) -> tuple[Parts, Memory]:
        start, end = update.start, update.end
        inner = LocalUpdate(without_buffers(start), without_buffers(end))
        message = phase.send(with_values_of(context, start.b[0]), inner, memory)
        parts, after = checked_message(message, memory, "send")
        return (*parts, *dense({"b": end.b - start.b})), after

    def receive(context: Context, state: State, parts: Parts) -> Parts:
        others = tuple(part for part in parts if "b" not in part.values)
        inner = with_values_of(context, state.b)
        received = phase.receive(inner, without_buffers(state), others)
        return (*received, *(part for part in parts if "b" in part.values))

    def broadcast(context: Context, mean: State, memory: Memory) -> tuple[Parts, Memory]:
        inner = with_values_of(context, context.state.b)
        message = phase.broadcast(inner, without_buffers(mean), memory)
        parts, after = checked_message(message, memory, "broadcast")
        return (*parts, *dense({"b": mean.b[None]})), after

    def apply(context: Context, state: State, received: State) -> State:
        inner = with_values_of(context, state.b)
        after = phase.apply(inner, without_buffers(state), without_buffers(received))
        return joined(after, clamp_variances(state.b + received.b, layout))

    return replace(
        phase,
        local_start=local_start,
        send=send,
        receive=phase.receive if phase.receive is as_sent else receive,
        broadcast=broadcast,
        apply=apply,
        paper_bits=lambda d: phase.paper_bits(d) + extra_bits,
    )


def with_values_of(context: Context, b: Tensor) -> Context:
    """Return a method's context, whose gradient is computed with the given buffers."""

    def gradient(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return context.gradient(torch.cat([w, b]), x, y)

    return replace(inner_context(context), gradient=gradient)


def inner_context(context: Context) -> Context:
    """Return what a method sees of a context."""
    return replace(context, state=without_buffers(context.state))


def clamp_variances(b: Tensor, layout: Layout) -> Tensor:
    """Set negative running variances to zero, in place."""
    assert layout.buffers is not None
    for name, span in layout.buffers.layers.items():
        if name.rpartition(".")[2] == VARIANCE:
            b[span].clamp_(min=0)
    return b


@dataclass(frozen=True)
class OwnLayers:
    """The layers that each client keeps: all buffers, and the parameters of normalization layers.

    A client's memory holds the buffers, then these parameters' coordinates of each vector of the
    state, then 1 once the client has trained.
    """

    layout: Layout
    vectors: tuple[str, ...]

    @classmethod
    def of(cls, names: Sequence[str], layout: Layout) -> OwnLayers:
        """Return the layers that clients keep, if a method's state has vectors of these names."""
        return cls(layout, tuple(name for name in names if name not in PAYLOADS))

    @cached_property
    def places(self) -> Tensor:
        """The coordinates of the normalization layers' parameters."""
        assert self.layout.buffers is not None
        owners = {
            name.rpartition(".")[0]
            for name in self.layout.buffers.names
            if name.rpartition(".")[2] == VARIANCE
        }
        spans = [
            torch.arange(span.start, span.stop)
            for name, span in self.layout.layers.items()
            if name.rpartition(".")[0] in owners
        ]
        return torch.cat([torch.zeros(0, dtype=torch.int64), *spans])

    @property
    def sizes(self) -> list[int]:
        """The lengths of what the memory holds."""
        assert self.layout.buffers is not None
        return [self.layout.buffers.d, *[len(self.places)] * len(self.vectors), 1]

    @property
    def length(self) -> int:
        """The length of the memory."""
        return sum(self.sizes)

    def remember(self, state: State) -> Tensor:
        """Return the memory ``(clients, length)`` of clients that have trained."""
        places = self.places.to(state.w.device)
        kept = [state[name].index_select(-1, places) for name in self.vectors]
        return torch.cat([state.b, *kept, torch.ones_like(state.b[:, :1])], dim=-1)

    def restore(self, state: State, own: Tensor) -> State:
        """Return a state ``(clients, d)`` with the clients' own layers, if they have trained."""
        b, *kept, has_trained = torch.split(own, self.sizes, dim=-1)
        places, is_own = self.places.to(own.device), has_trained > 0
        changed = {"b": torch.where(is_own, b, state.b)}
        for name, mine in zip(self.vectors, kept, strict=True):
            x = state[name]
            values = torch.where(is_own, mine, x.index_select(-1, places))
            changed[name] = x.index_copy(-1, places, values)
        return state.replace(**changed)

    def erased(self, state: State) -> State:
        """Return a state with zeros in place of the normalization layers' parameters."""
        places = self.places.to(state.w.device)
        zeros = {name: state[name].index_fill(-1, places, 0) for name in self.vectors}
        return state.replace(**zeros)

    def kept_from(self, before: State, after: State) -> State:
        """Return the state after a broadcast, with the normalization layers of the one before."""
        places = self.places.to(after.w.device)
        kept = {
            name: after[name].index_copy(-1, places, before[name].index_select(-1, places))
            for name in self.vectors
        }
        return after.replace(**kept)

    def values(self, values: Tensor, own: Tensor) -> Tensor:
        """Return a model's weights and buffers, with the layers of a client that has trained."""
        b, mine, *_ = torch.split(own[0], self.sizes)
        w, _ = self.layout.split(values)
        return torch.cat([w.index_copy(0, self.places.to(w.device), mine), b])


def with_kept_layers(phase: Phase, own: OwnLayers) -> Phase:
    """Return a phase in which each client keeps its normalization layers."""

    def local_start(state: State, memory: Memory) -> State:
        start = phase.local_start(without_buffers(state), without_own(memory))
        return own.restore(joined(start, state.b), memory[OWN])

    def send(context: Context, update: LocalUpdate, memory: Memory) -> tuple[Parts, Memory]:
        start, end = (own.erased(without_buffers(x)) for x in (update.start, update.end))
        inner = without_own(memory)
        message = phase.send(inner_context(context), LocalUpdate(start, end), inner)
        parts, after = checked_message(message, inner, "send")
        return parts, {**after, OWN: own.remember(update.end)}

    def receive(context: Context, state: State, parts: Parts) -> Parts:
        return phase.receive(inner_context(context), without_buffers(state), parts)

    def broadcast(context: Context, mean: State, memory: Memory) -> tuple[Parts, Memory]:
        return phase.broadcast(inner_context(context), without_buffers(mean), memory)

    def apply(context: Context, state: State, received: State) -> State:
        before = without_buffers(state)
        after = phase.apply(inner_context(context), before, without_buffers(received))
        return joined(own.kept_from(before, after), state.b)

    return replace(
        phase,
        local_start=local_start,
        send=send,
        receive=phase.receive if phase.receive is as_sent else receive,
        broadcast=broadcast,
        apply=apply,
    )


def keeps_layers(algorithm: Algorithm) -> bool:
    """Whether clients keep their own layers."""
    return OWN in algorithm.client_memory


def mean_layers(memories: Iterable[Memory]) -> Memory:
    """Return a memory with the mean of the layers that some clients keep."""
    return {OWN: torch.cat([memory[OWN] for memory in memories]).mean(0, keepdim=True)}


def client_values(layout: Layout, state: State, values: Tensor, memory: Memory | None) -> Tensor:
    """Return the weights and buffers with which a client with this memory uses the model."""
    if memory is None or OWN not in memory:
        return values
    return OwnLayers.of(state.names, layout).values(values, memory[OWN])


def without_own(memory: Memory) -> Memory:
    """Return what a method sees of a client's memory."""
    return {name: x for name, x in memory.items() if name != OWN}
