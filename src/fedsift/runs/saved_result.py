"""Results as files: the snapshot and the trained weights of a finished run, without its task."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fedsift.codec.update import ROLES
from fedsift.errors import ConfigError
from fedsift.federation.memories import InMemory
from fedsift.federation.snapshot import Snapshot
from fedsift.runs.checkpoint import (
    Checkpoint,
    about_checkpoint,
    layout_from,
    load_memories,
    older_version,
    snapshot_of,
    tensors_of,
)
from fedsift.runs.disk import CorruptFile, load_tensors, save_tensors
from fedsift.runs.folder import RunFolder
from fedsift.vector import Layout


def save_snapshot(folder: RunFolder, snapshot: Snapshot, seconds: float, layout: Layout) -> None:
    """Write a snapshot as the folder's checkpoint, which holds all memories itself."""
    whole = replace(snapshot, client_memory=InMemory(dict(snapshot.client_memory)))
    about = about_checkpoint(folder, Checkpoint(whole, seconds), layout, folder.config())
    save_tensors(folder.checkpoint_file, tensors_of(whole), about)


def load_snapshot(folder: RunFolder) -> tuple[Snapshot, Layout]:
    """Read the folder's checkpoint, and the layout of its vectors."""
    if not folder.checkpoint_file.exists():
        raise ConfigError(f"{folder.path} has no {folder.checkpoint_file.name}")
    try:
        about, tensors = load_tensors(folder.checkpoint_file, "cpu")
        if "shapes" not in about:
            raise ConfigError(older_version(folder, "the shapes of the parameters"))
        memories = load_memories(folder, about.get("memory", {}), tensors)
    except CorruptFile as problem:
        raise ConfigError(str(problem)) from None
    names = tuple(role for role in ROLES if role in tensors)
    in_ram = InMemory(dict(memories))
    return snapshot_of(about, tensors, in_ram, names), layout_from(about["shapes"])


def load_weights(folder: RunFolder, layout: Layout) -> Tensor:
    """Read the trained parameters, and the buffers that training changes, as one vector."""
    if not folder.model_file.exists():
        raise ConfigError(f"the run in {folder.path} is not finished: it has no model")
    try:
        _, tensors = load_tensors(folder.model_file, "cpu")
    except CorruptFile as problem:
        raise ConfigError(str(problem)) from None
    w = layout.flatten(tensors)
    return torch.cat([w, layout.buffers.flatten(tensors).to(w)]) if layout.buffers else w
