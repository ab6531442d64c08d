"""Where a run begins: with the initial model, or with the end of an earlier run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fedsift.api.result import Result
from fedsift.federation.memories import InMemory, Memories, OnDisk, SlotFile
from fedsift.federation.round import Federation
from fedsift.federation.snapshot import Snapshot
from fedsift.runs.checkpoint import Checkpoint
from fedsift.runs.run import RestoredRun, new_run


def begin_run(
    federation: Federation, start: Result | Snapshot | None, memory_file: Path | None = None
) -> RestoredRun:
    """Return the state from which a run begins, with its history so far."""
    if start is None:
        return new_run(federation, memory_file)
    history = list(start.history) if isinstance(start, Result) else []
    seconds = start.seconds if isinstance(start, Result) else 0.0
    snapshot = on_device(snapshot_of(start), federation, memory_file)
    return RestoredRun(Checkpoint(snapshot, seconds), is_on_disk=False, history=history)


def snapshot_of(start: Result | Snapshot) -> Snapshot:
    """Return the snapshot to start from."""
    return start.snapshot if isinstance(start, Result) else start


def check_start(start: Any, federation: Federation, rounds: int) -> None:
    """Raise ValueError unless a run can continue from a result or snapshot."""
    if not isinstance(start, Result | Snapshot):
        raise ValueError(f"start must be a Result or a Snapshot, got {type(start).__name__}")
    snapshot, layout = snapshot_of(start), federation.task.layout
    if snapshot.round >= rounds:
        raise ValueError(
            f"start has {snapshot.round} rounds and rounds={rounds} is the total: pass at least "
            f"rounds={snapshot.round + 1}"
        )
    is_same = not isinstance(start, Result) or start.layout.names == layout.names
    if not is_same or snapshot.state.w.shape != (layout.d,):
        raise ValueError("start has another model: load its weights into the model instead")
    ours, theirs = vectors_of(federation.initial_snapshot()), vectors_of(snapshot)
    if ours != theirs:
        raise ValueError(
            f"start has the vectors {', '.join(theirs)}, but the algorithm needs "
            f"{', '.join(ours)}: continue with the same algorithm, or load the weights into the "
            "model instead"
        )
    check_clients(snapshot, federation)
    if (privacy := federation.privacy) is not None:
        known = start.settings if isinstance(start, Result) else {}
        if any(known.get(key) != value for key, value in privacy.settings().items()):
            raise ValueError(
                "epsilon counts the rounds of start, too: pass a Result with the same privacy"
            )


def vectors_of(snapshot: Snapshot) -> dict[str, int]:
    """Return the lengths of the state's and the server's vectors, by name."""
    state = {name: x.numel() for name, x in snapshot.state.items()}
    return {**state, **{f"server/{name}": x.numel() for name, x in snapshot.server_memory.items()}}


def check_clients(snapshot: Snapshot, federation: Federation) -> None:
    """Raise ValueError if a snapshot has memories that no client of this federation can have."""
    memories, lengths = snapshot.client_memory, federation.memory_lengths
    clients = len(federation.task.clients)
    if any(client >= clients for client in memories):
        raise ValueError(f"start has {max(memories) + 1} clients, but there are only {clients}")
    for client in list(memories)[:1]:
        if {name: x.numel() for name, x in memories[client].items()} != lengths:
            raise ValueError("start is of an algorithm whose clients remember other vectors")


def on_device(snapshot: Snapshot, federation: Federation, memory_file: Path | None) -> Snapshot:
    """Return a snapshot on the federation's device, with its memories in RAM or in a file."""
    device = federation.task.device
    return replace(
        snapshot,
        state=snapshot.state.map(lambda x: x.to(device)),
        server_memory={name: x.to(device) for name, x in snapshot.server_memory.items()},
        client_memory=copy_memories(snapshot.client_memory, federation, memory_file),
    )


def copy_memories(memories: Memories, federation: Federation, memory_file: Path | None) -> Memories:
    """Return a copy of the clients' memories, in a file if they are large."""
    device = federation.task.device
    if not federation.needs_memory_file:
        moved = ((n, {k: x.to(device) for k, x in memories[n].items()}) for n in memories)
        return InMemory(dict(moved))
    like = torch.empty(0, dtype=federation.task.layout.dtype, device=device)
    file = SlotFile(federation.memory_lengths, like, memory_file)
    return OnDisk(file, {n: file.put(memories[n]) for n in memories})
