"""What a client keeps on its own disk between rounds: the global state, and its memories."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from fedsift.algorithms.method import Memory
from fedsift.codec.frame import CHECKSUM_BYTES
from fedsift.runs.disk import CorruptFile, load_tensors, save_tensors
from fedsift.vector import Layout, Moments

NO_RECEIPT = bytes(8)
"""Stands for the upload of a client of which none was merged yet."""


def receipt_of(frame: bytes) -> bytes:
    """What an upload is remembered by: its frame's checksum."""
    return frame[-CHECKSUM_BYTES:]


@dataclass(frozen=True)
class Kept:
    """The state that a client holds, and its memory after each upload that may yet count.

    A client does not know whether its last upload arrived. It keeps its memory from before and from
    after it, by the upload's receipt, until the next order says which of them counts.
    """

    state: Moments | None = None
    memories: Mapping[bytes, Memory] = field(default_factory=dict)


@dataclass(frozen=True)
class Store:
    """One client's file for one run; written whole or not at all."""

    folder: Path

    @property
    def file(self) -> Path:
        """Where it is."""
        return self.folder / "client.safetensors"

    def load(self, layout: Layout) -> Kept:
        """What was kept; nothing if there is no file, or none that can be trusted."""
        try:
            about, tensors = load_tensors(self.file, "cpu")
        except CorruptFile:
            return Kept()
        if about.get("layout") != layout.fingerprint():
            return Kept()
        return kept_of(tensors)

    def save(self, layout: Layout, kept: Kept) -> None:
        """Replace what was kept."""
        self.folder.mkdir(parents=True, exist_ok=True)
        # Residuals reveal private data: only the owner may read them.
        save_tensors(self.file, tensors_of(kept), {"layout": layout.fingerprint()}, mode=0o600)


def tensors_of(kept: Kept) -> dict[str, Tensor]:
    """What is kept, as named tensors."""
    state = {} if kept.state is None else kept.state._asdict()
    memories = {
        f"{receipt.hex()}/{name}": x.clone()  # a round may leave a memory as it is
        for receipt, memory in kept.memories.items()
        for name, x in memory.items()
    }
    return {**state, **memories}


def kept_of(tensors: Mapping[str, Tensor]) -> Kept:
    """What is kept, from its named tensors."""
    memories: dict[bytes, dict[str, Tensor]] = {}
    for key, x in tensors.items():
        if "/" in key:
            receipt, name = key.split("/")
            memories.setdefault(bytes.fromhex(receipt), {})[name] = x
    state = Moments(tensors["w"], tensors["m"], tensors["v"]) if "w" in tensors else None
    return Kept(state, memories)
