"""Updates: the coordinates of W, M, V and other vectors that are sent, and their weighted sum.

An :class:`Update` is stacked over clients; in a deployment, a client's update has one row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal

import torch
from torch import Generator, Tensor

from fedsift.codec.native import add_at
from fedsift.codec.threads import Threads
from fedsift.codec.values import BlockCoder, Quantized, ValueCoder, lossless, require_coder
from fedsift.selection.difference import Difference
from fedsift.selection.masks import positions
from fedsift.vector import State

Role = Literal["w", "m", "v", "c", "p", "b"]
"""The vector that values belong to: W, M, V, a control variate C, a method's own payload P, or the
model's buffers B."""
ROLES: tuple[Role, ...] = ("w", "m", "v", "c", "p", "b")
PAYLOADS: frozenset[Role] = frozenset({"p", "b"})
"""Roles whose length is not the number of parameters, but :meth:`Layout.length`."""
ClientIndex = slice | list[int]
"""Selects clients of a stack."""
MIN_SLICED = 1 << 15
"""Fewer values than this are added by one thread."""


@dataclass(frozen=True)
class CodedValues:
    """Values ``(clients, k)`` of one tensor, quantized by a coder."""

    coder: ValueCoder
    quantized: Quantized
    dtype: torch.dtype

    @classmethod
    def of(
        cls, x: Tensor, coder: ValueCoder | None = None, generator: Generator | None = None
    ) -> CodedValues:
        """Quantize x; without a coder, keep every bit."""
        coder = coder or lossless(x.dtype)
        require_coder(coder)
        return cls(coder, coder.quantize(x, generator), x.dtype)

    def restore(self) -> Tensor:
        """Return the values that the receiver uses."""
        return self.coder.restore(self.quantized, self.dtype)

    @cached_property
    def sizes(self) -> Tensor:
        """The bytes of each client's values, on a GPU only if they depend on the values."""
        if isinstance(self.coder, BlockCoder):
            return self.coder.sizes(self.quantized)
        clients, n = self.quantized.codes.shape
        return torch.full((clients,), self.coder.size(n))

    def rows(self, clients: ClientIndex) -> CodedValues:
        """Return the values of some clients."""
        codes, scales = self.quantized.codes, self.quantized.scales
        selected = Quantized(codes[clients], None if scales is None else scales[clients])
        return CodedValues(self.coder, selected, self.dtype)

    def to(self, device: torch.device) -> CodedValues:
        """Return the values on a device."""
        codes, scales = self.quantized.codes, self.quantized.scales
        moved = Quantized(codes.to(device), None if scales is None else scales.to(device))
        return CodedValues(self.coder, moved, self.dtype)


@dataclass(frozen=True)
class Part:
    """The part of an update under one mask: values of one or more roles.

    ``indices`` ``(clients, k)`` are the kept coordinates, ascending; None if all are sent.
    """

    indices: Tensor | None
    values: Mapping[Role, CodedValues]

    def __post_init__(self) -> None:
        """Sort the values by role: the order of ``ROLES`` is their order in a frame."""
        if unknown := set(self.values) - set(ROLES):
            raise ValueError(f"unknown roles {sorted(unknown)}; choose from: {', '.join(ROLES)}")
        ordered = {role: self.values[role] for role in ROLES if role in self.values}
        object.__setattr__(self, "values", ordered)

    def rows(self, clients: ClientIndex) -> Part:
        """Return the part of some clients."""
        indices = None if self.indices is None else self.indices[clients]
        return Part(indices, {role: coded.rows(clients) for role, coded in self.values.items()})

    def to(self, device: torch.device) -> Part:
        """Return the part on a device."""
        indices = None if self.indices is None else self.indices.to(device)
        return Part(indices, {role: coded.to(device) for role, coded in self.values.items()})


Parts = tuple[Part, ...]
"""The parts of an update, one per mask."""


@dataclass(frozen=True)
class Update:
    """What each client of a stack sends, and its weight in the mean."""

    parts: Parts
    weights: tuple[float, ...]

    def rows(self, clients: list[int]) -> Update:
        """Return the updates of some clients."""
        parts = tuple(part.rows(clients) for part in self.parts)
        return Update(parts, tuple(self.weights[row] for row in clients))

    def client(self, row: int) -> Update:
        """Return one client's update, still with a client axis."""
        one = slice(row, row + 1)
        return Update(tuple(part.rows(one) for part in self.parts), self.weights[one])

    @property
    def device(self) -> torch.device:
        """The device of the values."""
        tensors = (x.quantized.codes for part in self.parts for x in part.values.values())
        return next((x.device for x in tensors), torch.device("cpu"))

    def to(self, device: torch.device) -> Update:
        """Return the update on a device."""
        return Update(tuple(part.to(device) for part in self.parts), self.weights)

    def __iter__(self) -> Iterator[Update]:
        return (self.client(row) for row in range(len(self.weights)))


def dense(
    values: Mapping[Role, Tensor],
    coder: ValueCoder | None = None,
    generator: Generator | None = None,
) -> Parts:
    """Return every coordinate of the given tensors ``(clients, d)`` as the parts of an update.

    A coder that rounds at random draws from the generator.

    >>> dense({"w": torch.ones(1, 3)})[0].values["w"].restore().tolist()
    [[1.0, 1.0, 1.0]]
    """
    for role, x in values.items():
        require_client_axis(role, x)
    coded = {role: CodedValues.of(x, coder, generator) for role, x in values.items()}
    alike = {role: x for role, x in coded.items() if role not in PAYLOADS}
    groups = [alike, *({role: x} for role, x in coded.items() if role in PAYLOADS)]
    return tuple(Part(None, group) for group in groups if group)


def sparse(
    values: Mapping[Role, Tensor | Difference],
    mask: Tensor,
    coders: Mapping[Role, ValueCoder] | None = None,
    generator: Generator | None = None,
    k: int | None = None,
) -> Parts:
    """Return the masked coordinates of the given tensors, all under one mask.

    ``k`` is the number of ones in each row of the mask; without it, a GPU synchronizes with the
    host to count them. A :class:`Difference` is computed at these coordinates only.

    >>> mask = torch.tensor([[True, False, True]])
    >>> (part,) = sparse({"w": torch.tensor([[1.0, 2.0, 3.0]])}, mask)
    >>> part.indices.tolist(), part.values["w"].restore().tolist()
    ([[0, 2]], [[1.0, 3.0]])
    >>> (part,) = sparse({"w": Difference(torch.full((1, 3), 4.0), torch.ones(1, 3))}, mask)
    >>> part.values["w"].restore().tolist()
    [[-3.0, -3.0]]
    """
    require_client_axis("mask", mask)
    if mask.dtype != torch.bool:
        raise TypeError(f"a mask must be of booleans, such as top_k(x, k), got {mask.dtype}")
    indices = positions(mask, k)
    chosen = coders or {}
    kept = {
        role: CodedValues.of(_values_at(indices, x), chosen.get(role), generator)
        for role, x in values.items()
    }
    return (Part(indices, kept),)


def require_client_axis(name: str, x: Tensor) -> None:
    """Raise ValueError for a tensor without an axis for clients.

    >>> require_client_axis("w", torch.zeros(3))
    Traceback (most recent call last):
    ...
    ValueError: w must have the shape (clients, d), got (3,): on the server, pass x[None]
    """
    if x.dim() != 2:
        raise ValueError(
            f"{name} must have the shape (clients, d), got {tuple(x.shape)}: on the server, pass "
            "x[None]"
        )


def _values_at(indices: Tensor, x: Tensor | Difference) -> Tensor:
    """Return the coordinates ``(clients, k)`` of x."""
    return x.at(indices) if isinstance(x, Difference) else x.gather(-1, indices)


def residual_after(x: Tensor, part: Part, role: Role) -> Tensor:
    """Return x ``(clients, d)`` minus what the receiver of a part restores.

    >>> (part,) = sparse({"w": torch.tensor([[1.0, 2.0]])}, torch.tensor([[False, True]]))
    >>> residual_after(torch.tensor([[1.0, 2.0]]), part, "w").tolist()
    [[1.0, 0.0]]
    """
    sent = part.values[role].restore()
    return x - sent if part.indices is None else x.scatter_add(-1, part.indices, -sent)


def by_role(x: State) -> dict[Role, Tensor]:
    """Return the vectors of a state by role."""
    return {role: x[role] for role in ROLES if role in x}


class WeightedSum:
    """The running weighted sum of updates, in one dense vector per role.

    >>> total = WeightedSum(State.start(torch.zeros(2)))
    >>> total.add(Update(dense({"w": torch.tensor([[2.0, 4.0]])}), (3.0,)))
    >>> total.mean().w.tolist()
    [2.0, 4.0]
    """

    def __init__(self, like: State) -> None:
        self.total = like.map(torch.zeros_like)
        self.weight = 0.0

    def add(self, update: Update, threads: Threads | None = None) -> None:
        """Add the clients' updates in the order of the stack. Threads do not change the bits."""
        if self.total.w.device.type == "cpu":
            for client in update:
                accumulate(self.total, client.parts, client.weights[0], threads)
        else:
            accumulate_stack(self.total, update)
        self.weight += sum(update.weights)

    def mean(self) -> State:
        """Return the weighted mean Σ D̃ₙ Δₙ / Σ D̃ₙ."""
        return self.total.map(lambda x: x / self.weight)


def accumulate(
    total: State, parts: Iterable[Part], weight: float = 1.0, threads: Threads | None = None
) -> None:
    """Add one client's parts, times a weight, to dense vectors ``(d,)`` in place."""
    for part in parts:
        indices = None if part.indices is None else part.indices[0]
        for role, coded in part.values.items():
            target, values = vector_for(role, total), weight * coded.restore()[0]
            if threads is None or len(values) < MIN_SLICED:
                add_to(target, indices, values)
            else:
                threads.in_slices(partial(add_slice, target, indices, values))


def add_to(target: Tensor, indices: Tensor | None, values: Tensor) -> None:
    """Add values to the ascending coordinates ``indices``, or to all, of a vector in place."""
    if indices is None:
        target.add_(values)
    else:
        add_at(target, indices, values)


def add_slice(
    target: Tensor, indices: Tensor | None, values: Tensor, slice: int, slices: int
) -> None:
    """Add values to one of several slices of a vector.

    One thread adds all that its slice receives, so the order of additions, and thus every bit, is
    the same for any number of slices.
    """
    start, end = (len(target) * n // slices for n in (slice, slice + 1))
    first, last = start, end
    if indices is not None:
        first, last = torch.searchsorted(indices, torch.tensor([start, end])).tolist()
        indices = indices[first:last] - start
    add_to(target[start:end], indices, values[first:last])


def vector_for(role: Role, total: State) -> Tensor:
    """Return the vector to which a role is added."""
    if role not in total:
        raise ValueError(
            f"a message contains {role.upper()}, but the method's state is {', '.join(total.names)}"
        )
    return total[role]


def accumulate_stack(total: State, update: Update) -> None:
    """Add all clients' parts at once, which is faster on a GPU than many small sums.

    The sum over a stack has a fixed order, which ``index_add_`` does not guarantee on a GPU.

    >>> update = Update(dense({"w": torch.tensor([[2.0, 4.0], [1.0, 1.0]])}), (1.0, 3.0))
    >>> total = State.start(torch.zeros(2))
    >>> accumulate_stack(total, update)
    >>> total.w.tolist()
    [5.0, 7.0]
    """
    weights = torch.tensor(update.weights, dtype=total.w.dtype, device=total.w.device)[:, None]
    for part in update.parts:
        for role, coded in part.values.items():
            target, x = vector_for(role, total), weights * coded.restore()
            if part.indices is not None:
                x = x.new_zeros(len(x), len(target)).scatter_(1, part.indices, x)
            target.add_(x.sum(0))
