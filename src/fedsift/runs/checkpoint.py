"""Checkpoints: a snapshot as named tensors on disk, and the checks before a run continues."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from fedsift.data import digest_of
from fedsift.engine.cpu import native
from fedsift.errors import ConfigError
from fedsift.federation.memories import DIGEST_BYTES, InMemory, Memories, OnDisk, SlotFile
from fedsift.federation.norm_bound import NormHistory
from fedsift.federation.round import Federation
from fedsift.federation.snapshot import Snapshot, Traffic
from fedsift.runs.config import MAY_CHANGE, Config, read_values
from fedsift.runs.disk import CorruptFile, flush_to_disk, load_tensors, save_tensors
from fedsift.runs.folder import RunFolder
from fedsift.runs.kept_checkpoints import keep_checkpoint, kept_checkpoints, rollback_command
from fedsift.runs.records import line_digests
from fedsift.vector import Layout, State


@dataclass(frozen=True)
class Checkpoint:
    """A snapshot, and the seconds of training up to it.

    ``earlier`` are the clients' memories of earlier checkpoints that are kept, oldest first. Their
    slots of the memory file are not reused as long as something refers to them.
    """

    snapshot: Snapshot
    seconds: float
    earlier: tuple[Memories, ...] = ()


def save_checkpoint(
    folder: RunFolder, checkpoint: Checkpoint, federation: Federation, config: Config
) -> None:
    """Replace the run's checkpoint, and keep the last few.

    ``config`` is the configuration used for training; config.toml may have changed since.
    """
    memories = checkpoint.snapshot.client_memory
    if isinstance(memories, OnDisk):
        memories.file.to_disk()
    for file in (folder.uploads_file, folder.metrics_file):
        if file.exists():
            flush_to_disk(file)  # a checkpoint is never newer than its metrics
    about = about_checkpoint(folder, checkpoint, federation.task.layout, config)
    about["memory"] = federation.memory_lengths
    save_tensors(folder.checkpoint_file, tensors_of(checkpoint.snapshot), about)
    keep_checkpoint(folder, checkpoint.snapshot.round, config.keep_checkpoints)


def about_checkpoint(
    folder: RunFolder, checkpoint: Checkpoint, layout: Layout, config: Config
) -> dict[str, Any]:
    """Return the metadata of a checkpoint."""
    return {
        "round": checkpoint.snapshot.round,
        "traffic": asdict(checkpoint.snapshot.traffic),
        "norms": checkpoint.snapshot.norms.medians,
        "seconds": checkpoint.seconds,
        "layout": layout.fingerprint(),
        "shapes": described_layout(layout),
        "config": fingerprint_of(config),
        "data": digest_of(config.dataset),
        "kernels": kernels_of(config),
        "lines": line_digests(folder, checkpoint.snapshot.round),
    }


def load_checkpoint(folder: RunFolder, federation: Federation, device: str) -> Checkpoint | None:
    """Read and check the last checkpoint; None if the run stopped before its first."""
    if not folder.checkpoint_file.exists():
        return None
    config = folder.config()
    require_all_settings(folder, config)
    try:
        about, tensors = load_tensors(folder.checkpoint_file, device)
    except CorruptFile as problem:
        command = rollback_command(folder)
        advice = f"; to return to an earlier round: {command}" if command else ""
        raise ConfigError(f"{problem}{advice}") from None
    for mismatch in mismatches(folder, config, federation, about):
        raise ConfigError(mismatch)
    try:
        memories = load_memories(folder, federation.memory_lengths, tensors)
        earlier = reserve_earlier(folder, memories, about["round"])
    except (OSError, ValueError) as problem:
        raise ConfigError(f"{folder.memory_file} is corrupt: {problem}") from None
    snapshot = snapshot_of(about, tensors, memories, federation.algorithm.state)
    if missing := set(federation.algorithm.server_memory) - set(snapshot.server_memory):
        raise ConfigError(older_version(folder, f"the server's {', '.join(sorted(missing))}"))
    return Checkpoint(snapshot, about["seconds"], earlier)


def require_all_settings(folder: RunFolder, config: Config) -> None:
    """Refuse a run whose configuration lacks a current setting."""
    missing = config.flat().keys() - read_values(folder.config_file).keys() - MAY_CHANGE
    if missing:
        names = ", ".join(f"`{name}`" for name in sorted(missing))
        raise ConfigError(older_version(folder, f"the setting {names}"))


def older_version(folder: RunFolder, what: str) -> str:
    """Return the error message for a run that an older version created without something."""
    return (
        f"the run in {folder.path} was created by an older version of fedsift and lacks {what}; "
        "start a new run with --out"
    )


def mismatches(
    folder: RunFolder, config: Config, federation: Federation, about: Mapping[str, Any]
) -> Iterator[str]:
    """Yield why a run cannot continue from its checkpoint with exactly the same result."""
    if about["layout"] != federation.task.layout.fingerprint():
        yield f"{folder.checkpoint_file} belongs to another model than the one in config.toml"
    if about["config"] != fingerprint_of(config):
        yield (
            f"{folder.config_file} was changed after {folder.checkpoint_file} was written: only "
            "the numbers of rounds, of workers and of checkpoints to keep may change"
        )
    if about["round"] > config.rounds:
        yield (
            f"{folder.config_file} sets rounds to {config.rounds}, but {about['round']} are "
            "finished: the number of rounds may only grow"
        )
    if about["data"] != digest_of(config.dataset):
        yield (
            f"{folder.path} was trained on another version of {config.dataset}: resume it with the "
            "Python version that it was started with, or start a new run with --out"
        )
    kernels = kernels_of(config)
    if about.get("kernels", kernels) != kernels:
        yield (
            f"{folder.path} was trained with the {about['kernels']} kernels, but this machine now "
            f"uses the {kernels} kernels, which round differently: resume it with the original "
            "kernels, or start a new run with --out"
        )


def kernels_of(config: Config) -> str:
    """Return which kernels train a run; empty on a Flower server, which does not train.

    Results of different kernels differ in the last bits.
    """
    return "" if config.wire == "flower" else kernels_on(config.torch_device())


def kernels_on(device: str) -> str:
    """Return which kernels train on a device: C, PyTorch or CUDA."""
    if device == "cuda":
        return "CUDA"
    return "PyTorch" if native.load() is None else "C"


def described_layout(layout: Layout) -> dict[str, Any]:
    """Return a layout as a JSON object; :func:`layout_from` is the inverse."""
    return {
        "names": layout.names,
        "shapes": layout.shapes,
        "dtype": str(layout.dtype).removeprefix("torch."),
        "lengths": layout.lengths,
        "buffers": described_layout(layout.buffers) if layout.buffers else None,
    }


def layout_from(about: Mapping[str, Any]) -> Layout:
    """Return the layout that a JSON object describes.

    >>> layout = Layout.of(torch.nn.Linear(3, 2))
    >>> layout_from(json.loads(json.dumps(described_layout(layout)))) == layout
    True
    """
    return Layout(
        tuple(about["names"]),
        tuple(map(tuple, about["shapes"])),
        getattr(torch, about["dtype"]),
        tuple((name, length) for name, length in about["lengths"]),
        layout_from(about["buffers"]) if about["buffers"] else None,
    )


def fingerprint_of(config: Config) -> str:
    """Hash all settings except those that may change, such as the number of rounds."""
    settings = {key: value for key, value in config.flat().items() if key not in MAY_CHANGE}
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]


def tensors_of(snapshot: Snapshot) -> dict[str, Tensor]:
    """Return a snapshot as named tensors."""
    server = {f"server/{name}": x for name, x in snapshot.server_memory.items()}
    memories = memory_tensors(snapshot.client_memory)
    receipts = {
        f"receipt/{n}": torch.tensor(list(receipt), dtype=torch.uint8)
        for n, receipt in snapshot.receipts.items()
    }
    return {**dict(snapshot.state.items()), **server, **memories, **receipts}


def memory_tensors(memories: Memories) -> dict[str, Tensor]:
    """Return the clients' memories, or their places in the memory file."""
    if not isinstance(memories, OnDisk):
        return {f"client/{n}/{key}": x for n in memories for key, x in memories[n].items()}
    pairs = [[slot.number, n] for n, slot in memories.slots.items()]
    hashes = [list(slot.digest) for slot in memories.slots.values()]
    return {
        "client_slots": torch.tensor(pairs, dtype=torch.int64).view(-1, 2),
        "client_digests": torch.tensor(hashes, dtype=torch.uint8).view(-1, DIGEST_BYTES),
    }


def snapshot_of(
    about: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    memories: Memories,
    names: tuple[str, ...],
) -> Snapshot:
    """Return the snapshot of a checkpoint, whose state has the vectors of these names."""
    prefix = "server/"
    server = {key.removeprefix(prefix): x for key, x in tensors.items() if key.startswith(prefix)}
    state = State(**{name: tensors[name] for name in names})
    traffic, norms = Traffic(**about["traffic"]), NormHistory(about["norms"])
    receipts = {
        int(key.removeprefix("receipt/")): bytes(x.tolist())
        for key, x in tensors.items()
        if key.startswith("receipt/")
    }
    return Snapshot(about["round"], state, server, memories, traffic, norms, receipts)


def load_memories(
    folder: RunFolder, lengths: Mapping[str, int], tensors: Mapping[str, Tensor]
) -> Memories:
    """Return the clients' memories from the checkpoint, or from the file that it refers to."""
    if "client_slots" not in tensors:
        return memories_among(tensors)
    file = SlotFile(lengths, tensors["w"], folder.memory_file)
    numbers, clients = tensors["client_slots"].T.tolist()
    digests = [bytes(row) for row in tensors["client_digests"].tolist()]
    return OnDisk(file, dict(zip(clients, file.claim(numbers, digests), strict=True)))


def reserve_earlier(folder: RunFolder, memories: Memories, round: int) -> tuple[Memories, ...]:
    """Return the memories of the kept checkpoints before a round, whose slots are not reused.

    Their content is not read. A damaged checkpoint keeps nothing.
    """
    if not isinstance(memories, OnDisk):
        return ()
    slots = {slot.number: slot for slot in memories.slots.values()}
    found = []
    for file in (path for n, path in kept_checkpoints(folder).items() if n < round):
        with suppress(CorruptFile):
            _, tensors = load_tensors(file, "cpu")
            numbers, clients = tensors["client_slots"].T.tolist()
            slots |= memories.file.reserve(set(numbers) - slots.keys())
            pairs = zip(clients, (slots[n] for n in numbers), strict=True)
            found.append(OnDisk(memories.file, dict(pairs)))
    return tuple(found)


def memories_among(tensors: Mapping[str, Tensor]) -> InMemory:
    """Return the clients' memories that the checkpoint itself holds."""
    clients: dict[int, dict[str, Tensor]] = {}
    for key, x in tensors.items():
        match key.split("/"):
            case ["client", n, name]:
                clients.setdefault(int(n), {})[name] = x
    return InMemory(clients)
