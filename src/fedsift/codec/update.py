"""What travels: the values of some coordinates of W, M and V, as their receiver will see them.

An :class:`Update` is stacked over clients, as everything is: a deployed client's has one row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Generator, Tensor

from fedsift.codec.values import Blocked, Codes, ValueCoder, exact
from fedsift.selection.difference import Difference
from fedsift.selection.masks import positions
from fedsift.vector import Moments

Role = Literal["w", "m", "v"]
ROLES: tuple[Role, ...] = ("w", "m", "v")
Rows = slice | list[int]
"""Which clients of a stack."""


@dataclass(frozen=True)
class Coded:
    """Values ``(clients, k)`` in the form in which they are sent."""

    coder: ValueCoder
    codes: Codes
    dtype: torch.dtype

    @classmethod
    def of(
        cls, x: Tensor, coder: ValueCoder | None = None, generator: Generator | None = None
    ) -> Coded:
        """Quantize x; without a coder every bit of it is kept."""
        coder = coder or exact(x.dtype)
        return cls(coder, coder.quantize(x, generator), x.dtype)

    def restore(self) -> Tensor:
        """The values as their receiver sees them."""
        return self.coder.restore(self.codes, self.dtype)

    @cached_property
    def sizes(self) -> Tensor:
        """The bytes of each client's values; nothing is counted on a GPU unless they can differ."""
        if isinstance(self.coder, Blocked):
            return self.coder.sizes(self.codes)
        clients, n = self.codes.codes.shape
        return torch.full((clients,), self.coder.size(n))

    def rows(self, which: Rows) -> Coded:
        """Some clients' values."""
        scales = self.codes.scales
        codes = Codes(self.codes.codes[which], None if scales is None else scales[which])
        return Coded(self.coder, codes, self.dtype)

    def to(self, device: torch.device) -> Coded:
        """The same values on a device."""
        scales = self.codes.scales
        codes = Codes(self.codes.codes.to(device), None if scales is None else scales.to(device))
        return Coded(self.coder, codes, self.dtype)


@dataclass(frozen=True)
class Part:
    """Values of one or more of W, M, V under one mask; ``indices`` is None where all are sent."""

    indices: Tensor | None
    values: Mapping[Role, Coded]

    def __post_init__(self) -> None:
        """Put the values in the order W, M, V, which is the order on the wire."""
        if unknown := set(self.values) - set(ROLES):
            raise ValueError(f"unknown roles {sorted(unknown)}; there are: {', '.join(ROLES)}")
        ordered = {role: self.values[role] for role in ROLES if role in self.values}
        object.__setattr__(self, "values", ordered)

    def rows(self, which: Rows) -> Part:
        """Some clients' part."""
        indices = None if self.indices is None else self.indices[which]
        return Part(indices, {role: coded.rows(which) for role, coded in self.values.items()})

    def to(self, device: torch.device) -> Part:
        """The same part on a device."""
        indices = None if self.indices is None else self.indices.to(device)
        return Part(indices, {role: coded.to(device) for role, coded in self.values.items()})


Parts = tuple[Part, ...]


@dataclass(frozen=True)
class Update:
    """What each client of a stack sends, and the weight it has in the mean."""

    parts: Parts
    weights: tuple[float, ...]

    def rows(self, which: list[int]) -> Update:
        """Some clients' updates."""
        parts = tuple(part.rows(which) for part in self.parts)
        return Update(parts, tuple(self.weights[row] for row in which))

    def client(self, row: int) -> Update:
        """One client's update, still with a client axis."""
        one = slice(row, row + 1)
        return Update(tuple(part.rows(one) for part in self.parts), self.weights[one])

    @property
    def device(self) -> torch.device:
        """Where its values are."""
        coded = (coded for part in self.parts for coded in part.values.values())
        return next((each.codes.codes.device for each in coded), torch.device("cpu"))

    def to(self, device: torch.device) -> Update:
        """The same update on a device."""
        return Update(tuple(part.to(device) for part in self.parts), self.weights)

    def __iter__(self) -> Iterator[Update]:
        return (self.client(row) for row in range(len(self.weights)))


def dense(
    values: Mapping[Role, Tensor],
    coder: ValueCoder | None = None,
    generator: Generator | None = None,
) -> Parts:
    """Every coordinate of the given tensors ``(clients, d)``.

    A coder that rounds at random draws from the generator.

    >>> dense({"w": torch.ones(1, 3)})[0].values["w"].restore().tolist()
    [[1.0, 1.0, 1.0]]
    """
    return (Part(None, {role: Coded.of(x, coder, generator) for role, x in values.items()}),)


def sparse(
    values: Mapping[Role, Tensor | Difference],
    mask: Tensor,
    coders: Mapping[Role, ValueCoder] | None = None,
    generator: Generator | None = None,
    k: int | None = None,
) -> Parts:
    """The masked coordinates of the given tensors, all under one mask.

    ``k``: how many each client keeps, if that is known; without it a GPU must synchronize with the
    host to count them.
    A :class:`Difference` is computed at these coordinates only.

    >>> mask = torch.tensor([[True, False, True]])
    >>> (part,) = sparse({"w": torch.tensor([[1.0, 2.0, 3.0]])}, mask)
    >>> part.indices.tolist(), part.values["w"].restore().tolist()
    ([[0, 2]], [[1.0, 3.0]])
    >>> (part,) = sparse({"w": Difference(torch.full((1, 3), 4.0), torch.ones(1, 3))}, mask)
    >>> part.values["w"].restore().tolist()
    [[-3.0, -3.0]]
    """
    indices = positions(mask, k)
    chosen = coders or {}
    kept = {
        role: Coded.of(_values_at(indices, x), chosen.get(role), generator)
        for role, x in values.items()
    }
    return (Part(indices, kept),)


def _values_at(indices: Tensor, x: Tensor | Difference) -> Tensor:
    """The coordinates ``(clients, k)`` of x."""
    return x.at(indices) if isinstance(x, Difference) else x.gather(-1, indices)


def residual_after(x: Tensor, part: Part, role: Role) -> Tensor:
    """What of x ``(clients, d)`` the receiver of a part does not get.

    >>> (part,) = sparse({"w": torch.tensor([[1.0, 2.0]])}, torch.tensor([[False, True]]))
    >>> residual_after(torch.tensor([[1.0, 2.0]]), part, "w").tolist()
    [[1.0, 0.0]]
    """
    sent = part.values[role].restore()
    return x - sent if part.indices is None else x.scatter_add(-1, part.indices, -sent)


def moments(x: Moments) -> dict[Role, Tensor]:
    """The three tensors by role."""
    return {"w": x.w, "m": x.m, "v": x.v}


class Sum:
    """The running weighted sum of updates: one dense vector a role, however many clients.

    >>> total = Sum(Moments.start(torch.zeros(2)))
    >>> total.add(Update(dense({"w": torch.tensor([[2.0, 4.0]])}), (3.0,)))
    >>> total.mean().w.tolist()
    [2.0, 4.0]
    """

    def __init__(self, like: Moments) -> None:
        self.total = Moments(*(torch.zeros_like(x) for x in like))
        self.weight = 0.0

    def add(self, update: Update) -> None:
        """Add each client's update, in the order of the stack."""
        if self.total.w.device.type == "cpu":
            for client in update:
                add_parts(self.total, client.parts, *client.weights)
        else:
            add_stack(self.total, update)
        self.weight += sum(update.weights)

    def mean(self) -> Moments:
        """The weighted mean: Σ D̃ₙ Δₙ / Σ D̃ₙ."""
        return Moments(*(x / self.weight for x in self.total))


def add_parts(total: Moments, parts: Iterable[Part], weight: float = 1.0) -> None:
    """Add one sender's parts, times a weight, to dense vectors ``(d,)`` in place."""
    by_role = moments(total)
    for part in parts:
        for role, coded in part.values.items():
            weighted = weight * coded.restore()[0]
            if part.indices is None:
                by_role[role].add_(weighted)
            else:
                by_role[role].index_add_(0, part.indices[0], weighted)


def add_stack(total: Moments, update: Update) -> None:
    """Add all clients' parts at once: for accelerators, where many small sums take longer.

    Unlike adding them up by index, the sums over a stack always have the same order.

    >>> update = Update(dense({"w": torch.tensor([[2.0, 4.0], [1.0, 1.0]])}), (1.0, 3.0))
    >>> total = Moments.start(torch.zeros(2))
    >>> add_stack(total, update)
    >>> total.w.tolist()
    [5.0, 7.0]
    """
    by_role = moments(total)
    weights = torch.tensor(update.weights, dtype=total.w.dtype, device=total.w.device)[:, None]
    for part in update.parts:
        for role, coded in part.values.items():
            x = weights * coded.restore()
            if part.indices is not None:
                x = x.new_zeros(len(x), len(total.w)).scatter_(1, part.indices, x)
            by_role[role].add_(x.sum(0))
