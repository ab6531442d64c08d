"""A snapshot as named tensors, and back: what a checkpoint holds."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedsift.federation.memories import DIGEST_BYTES, InMemory, Memories, OnDisk
from fedsift.federation.norm_bound import NormHistory
from fedsift.federation.snapshot import Snapshot, Traffic
from fedsift.runs.config import RunConfig
from fedsift.vector import Moments


@dataclass(frozen=True)
class Checkpoint:
    """A snapshot and the seconds that led to it."""

    snapshot: Snapshot
    seconds: float


def fingerprint_of(config: RunConfig) -> str:
    """A hash of all settings but the number of rounds, which may grow."""
    settings = {key: value for key, value in config.flat().items() if key != "rounds"}
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]


def tensors_of(snapshot: Snapshot) -> dict[str, Tensor]:
    """A snapshot as named tensors."""
    server = {f"server/{name}": x for name, x in snapshot.server_memory.items()}
    return {**snapshot.state._asdict(), **server, **memory_tensors(snapshot.client_memory)}


def memory_tensors(memories: Memories) -> dict[str, Tensor]:
    """The clients' memories, or where they are."""
    if not isinstance(memories, OnDisk):
        return {f"client/{n}/{key}": x for n in memories for key, x in memories[n].items()}
    pairs = [[slot.number, n] for n, slot in memories.slots.items()]
    hashes = [list(slot.digest) for slot in memories.slots.values()]
    return {
        "client_slots": torch.tensor(pairs, dtype=torch.int64).view(-1, 2),
        "client_digests": torch.tensor(hashes, dtype=torch.uint8).view(-1, DIGEST_BYTES),
    }


def held(tensors: Mapping[str, Tensor]) -> InMemory:
    """The clients' memories that are in a checkpoint."""
    clients: dict[int, dict[str, Tensor]] = {}
    for key, x in tensors.items():
        match key.split("/"):
            case ["client", n, name]:
                clients.setdefault(int(n), {})[name] = x
    return InMemory(clients)


def snapshot_of(
    about: Mapping[str, Any], tensors: Mapping[str, Tensor], memories: Memories
) -> Snapshot:
    """A snapshot from its named tensors and the clients' memories."""
    prefix = "server/"
    server = {key.removeprefix(prefix): x for key, x in tensors.items() if key.startswith(prefix)}
    state = Moments(tensors["w"], tensors["m"], tensors["v"])
    traffic, norms = Traffic(**about["traffic"]), NormHistory(about["norms"])
    return Snapshot(about["round"], state, server, memories, traffic, norms)
