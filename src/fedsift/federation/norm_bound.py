"""Bounded influence: refuse updates whose norm is far larger than usual.

The checks of a frame say nothing about how large a well-formed update may be, and a single huge one
would destroy the model. The bound compares the L2 norm of each role (W, M, V, C and B) with the
norms of the other updates of the round and of recent rounds. What is compared is what the server
merges: the result of the method's ``receive``, if it has one. Payloads P that are merged as they
are have no norm to compare, since a scalar may well be a thousand times its median; only
``Limits.max_abs`` bounds them. The bound stops errors and crude attacks. It does not stop attackers
who agree on updates within the bound, or who are the majority.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor

from fedsift.codec.update import ROLES, Role, Update

MAX_NORM_RATIO = 30.0
"""The default bound. Without attackers, the largest ratios that ``benchmarks/norm_ratios.py`` found
are 16 for W, 17 for M and 722 for V, in runs of digits that had converged."""
RECENT_ROUNDS = 5
"""The number of rounds whose median norms are kept."""
TYPICAL = 0.1
"""Updates up to this share of the bound are merged at once."""
MAX_HELD_BYTES = 2**30
"""The most memory for updates that wait for the norms of the others."""

Norms = Mapping[Role, float]
"""The L2 norm of each role of one client's update."""


def norms_of(update: Update) -> list[Norms]:
    """Compute the norms of each client's update. A GPU synchronizes once per stack.

    >>> from fedsift.codec.update import dense
    >>> norms_of(Update(dense({"w": torch.tensor([[3.0, 4.0], [0.0, 2.0]])}), (1.0, 1.0)))
    [{'w': 5.0}, {'w': 2.0}]
    """
    found: dict[Role, Tensor] = {}
    for part in update.parts:
        for role, coded in part.values.items():
            if role == "p":
                continue
            norm = torch.linalg.vector_norm(coded.restore(), dim=-1, dtype=torch.float64)
            found[role] = torch.hypot(found[role], norm) if role in found else norm
    if not found:
        return [{} for _ in update.weights]
    rows = torch.stack(list(found.values()), dim=-1).tolist()
    return [dict(zip(found, row, strict=True)) for row in rows]


@dataclass(frozen=True)
class NormHistory:
    """By role, the median norm in each of the last rounds in which that role was sent."""

    medians: Mapping[Role, Sequence[float]] = field(default_factory=dict)

    def after(self, round: Sequence[Norms]) -> NormHistory:
        """Add a round. Refused updates count, so that the history follows a lasting change.

        >>> NormHistory({"w": [1.0]}).after([{"w": 2.0}, {"w": 3.0}, {"w": 900.0}])
        NormHistory(medians={'w': [1.0, 3.0]})
        """
        medians = dict(self.medians)
        for role in ROLES:
            if norms := positive_norms(round, role):
                medians[role] = [*medians.get(role, ()), median(norms)][-RECENT_ROUNDS:]
        return NormHistory(medians)

    def typical(self, role: Role, round: Sequence[Norms] = ()) -> float | None:
        """Estimate the usual norm: the median of recent rounds, corrected by the current round.

        It is at most the median of the current round, as norms shrink during training. It is at
        least the smallest norm of the round: when all updates grow at once, as after a restart of
        the learning rate, none is refused. Without history, it is the median of the round.

        >>> history = NormHistory({"w": [5.0, 1.0, 3.0]})
        >>> history.typical("w"), history.typical("w", [{"w": 1.0}, {"w": 2.0}, {"w": 900.0}])
        (3.0, 2.0)
        """
        norms, recent = positive_norms(round, role), self.medians.get(role)
        if not norms:
            return median(recent) if recent else None
        if not recent:
            return median(norms)
        return min(median(norms), max(min(norms), median(recent)))


@dataclass(frozen=True)
class NormBound:
    """Which updates are too large; ``max_ratio`` 0 accepts all."""

    max_ratio: float
    history: NormHistory

    def norms_of(self, update: Update) -> list[Norms]:
        """Compute the norms of each client's update, unless all updates are accepted."""
        return norms_of(update) if self.max_ratio else [{} for _ in update.weights]

    def limit(self, role: Role) -> float:
        """The largest ratio to the usual norm that is accepted.

        Gradients differ more between clients than Adam's steps do. The bounds of M and C are
        therefore twice that of W, and the bound of V and B is the square of that, as they hold
        squares: B contains running variances.

        >>> [NormBound(30.0, NormHistory()).limit(role) for role in ("w", "m", "v")]
        [30.0, 60.0, 3600.0]
        """
        ratio, square = self.max_ratio, (2 * self.max_ratio) ** 2
        return {"w": ratio, "m": 2 * ratio, "v": square, "c": 2 * ratio, "b": square}[role]

    def is_typical(self, norms: Norms) -> bool:
        """Whether an update can be merged without waiting for the others of its round."""
        usual = {role: self.history.typical(role) for role in norms}
        return all(
            norm <= TYPICAL * self.limit(role) * (usual[role] or 0) for role, norm in norms.items()
        )

    def violation(self, norms: Norms, round: Sequence[Norms] = ()) -> str | None:
        """Say which role of an update is too large, given the norms of its round so far.

        >>> bound = NormBound(20.0, NormHistory({"w": [1.0]}))
        >>> bound.violation({"w": 37.0})
        'its update of W is 37 times as large as usual in recent rounds; the bound is 20'
        """
        for role, norm in norms.items():
            usual = self.history.typical(role, round)
            if usual is not None and norm > self.limit(role) * usual:
                return (
                    f"its update of {role.upper()} is {norm / usual:.3g} times as large as usual "
                    f"in recent rounds; the bound is {self.limit(role):g}"
                )
        return None


def positive_norms(round: Sequence[Norms], role: Role) -> list[float]:
    """Collect the norms of a role. Updates of all zeros say nothing about the usual size.

    >>> positive_norms([{"w": 1.0}, {"w": 0.0}, {"m": 2.0}], "w")
    [1.0]
    """
    return [norms[role] for norms in round if norms.get(role, 0) > 0]


def held_bytes(update: Update) -> int:
    """Count the memory that an update takes.

    >>> from fedsift.codec.update import dense
    >>> held_bytes(Update(dense({"w": torch.ones(1, 2)}), (1.0,)))
    8
    """
    indices = [part.indices for part in update.parts]
    codes = [coded.quantized for part in update.parts for coded in part.values.values()]
    tensors = [*indices, *(c.codes for c in codes), *(c.scales for c in codes)]
    return sum(x.nbytes for x in tensors if x is not None)


def check_max_norm_ratio(ratio: float | None) -> None:
    """Check that the bound is a number above 1, or 0 or None for no bound.

    >>> check_max_norm_ratio(0.5)
    Traceback (most recent call last):
    ...
    ValueError: max_norm_ratio must be a number above 1, or 0 for no bound, got 0.5
    """
    is_number = isinstance(ratio, int | float) and not isinstance(ratio, bool)
    if ratio is None or (is_number and (ratio == 0 or 1 < ratio < math.inf)):
        return
    raise ValueError(f"max_norm_ratio must be a number above 1, or 0 for no bound, got {ratio!r}")
