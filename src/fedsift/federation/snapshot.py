"""The state of a federation between rounds, and how it is sent to a client that has none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedsift.algorithms.method import Memory
from fedsift.codec.errors import FrameError
from fedsift.codec.update import Update, by_role, dense
from fedsift.federation.memories import Memories
from fedsift.federation.norm_bound import NormHistory
from fedsift.privacy.secure.settings import SecureTraffic
from fedsift.vector import Layout, State


@dataclass(frozen=True)
class Traffic:
    """Traffic so far, as mean totals per client."""

    uplink_bits_paper: float = 0.0
    uplink_bytes: float = 0.0
    downlink_bytes: float = 0.0


@dataclass(frozen=True)
class Snapshot:
    """Everything that a round changes. Checkpoints store it, and each round returns a new one.

    ``receipts`` identifies, by client, the last merged upload of a remote client that keeps its own
    memory. In a simulation it is empty, and ``client_memory`` holds the memories themselves.
    """

    round: int
    state: State
    server_memory: Memory
    client_memory: Memories
    traffic: Traffic
    norms: NormHistory = field(default_factory=NormHistory)
    receipts: Mapping[int, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class RoundReport:
    """What happened in a round, apart from accuracy and traffic.

    ``clients`` counts the merged updates and ``rejected`` those that were refused. ``clamped``
    counts the coordinates of V that became negative and were set to zero. ``problems`` gives, by
    client, the reason why its update was not merged. ``secure`` are the bytes of secure
    aggregation, which the traffic includes.
    """

    clients: int
    rejected: int
    clamped: int
    train_loss: float | None
    problems: Mapping[str, str] = field(default_factory=dict)
    secure: SecureTraffic = field(default_factory=SecureTraffic)


def full_update(state: State) -> Update:
    """Pack a whole state for a client that has none, without vectors that are all zero.

    >>> [part.values.keys() for part in full_update(State.start(torch.ones(2))).parts]
    [dict_keys(['w'])]
    """
    roles = {role: x[None] for role, x in by_role(state).items() if role == "w" or bool(x.any())}
    return Update(dense(roles), (1.0,))


def state_from(update: Update, layout: Layout, names: Sequence[str]) -> State:
    """Return the state that :func:`full_update` packed, up to the sign of its zeros."""
    if any(part.indices is not None for part in update.parts):
        raise FrameError("a full state must contain every coordinate")
    found: dict[str, Tensor] = {}
    for part in update.parts:
        found.update((role, coded.restore()[0]) for role, coded in part.values.items())
    if unknown := found.keys() - set(names):
        raise FrameError(f"the state has no {', '.join(sorted(unknown))}")
    zeros = {name: torch.zeros(layout.length(name), dtype=layout.dtype) for name in names}
    return State(**{k: found.get(k, x).to(layout.dtype, copy=True) for k, x in zeros.items()})
