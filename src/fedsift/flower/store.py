"""What a client stores on its own disk between rounds: the global state and its memories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from flwr.app import ConfigRecord
from torch import Tensor

from fedsift.algorithms.method import Memory
from fedsift.codec.frame import CHECKSUM_BYTES
from fedsift.codec.update import ROLES
from fedsift.flower.arrays import layout_from_record, record_of_layout
from fedsift.runs.disk import CorruptFile, load_tensors, read_metadata, save_tensors
from fedsift.vector import Layout, State

NO_RECEIPT = bytes(8)
"""The receipt of a client before its first merged upload."""
MAX_MEMORIES = 100
"""The most memories that a client stores, whatever the server asks for."""


def receipt_of(frame: bytes) -> bytes:
    """Return the receipt that identifies an upload: the checksum of its frame."""
    return frame[-CHECKSUM_BYTES:]


@dataclass(frozen=True)
class ClientState:
    """The global state that a client holds, and its own memories by receipt.

    A client does not know whether its last upload was merged. It therefore stores its memory
    before and after that upload, and those before earlier uploads, as the server may return to an
    earlier round. The receipt in the next request selects one of them. The latest is the last one.
    """

    state: State | None = None
    memories: Mapping[bytes, Memory] = field(default_factory=dict)

    def with_memories(self, latest: Mapping[bytes, Memory], number: int) -> ClientState:
        """Return the state with the latest memories added, of which the last few are stored.

        >>> stored = ClientState().with_memories({b"1": {}, b"2": {}}, number=3)
        >>> list(stored.with_memories({b"1": {}, b"3": {}}, number=2).memories)
        [b'1', b'3']
        """
        earlier = {k: memory for k, memory in self.memories.items() if k not in latest}
        found = [*earlier.items(), *latest.items()]
        return replace(self, memories=dict(found[-min(number, MAX_MEMORIES) :]))


@dataclass(frozen=True)
class ClientStore:
    """A client's file for one run. It is always replaced as a whole."""

    folder: Path

    @property
    def file(self) -> Path:
        """The path of the file."""
        return self.folder / "client.safetensors"

    def load(self, layout: Layout) -> ClientState:
        """Read the file; return an empty state if it is missing, corrupt or of another model."""
        try:
            about, tensors = load_tensors(self.file, "cpu")
        except CorruptFile:
            return ClientState()
        if about.get("layout") != layout.fingerprint():
            return ClientState()
        return state_from_tensors(tensors, about.get("receipts", ()))

    def known_layout(self) -> Layout | None:
        """Return the layout of the stored state's model; None if nothing is stored."""
        about = read_metadata(self.file).get("model")
        return None if about is None else layout_from_record(ConfigRecord(about))

    def save(self, layout: Layout, stored: ClientState) -> None:
        """Replace the file."""
        self.folder.mkdir(parents=True, exist_ok=True)
        # Residuals reveal private data: only the owner may read them.
        about = {
            "layout": layout.fingerprint(),
            "model": dict(record_of_layout(layout)),
            "receipts": [receipt.hex() for receipt in stored.memories],
        }
        save_tensors(self.file, tensors_from_state(stored), about, mode=0o600)


def tensors_from_state(stored: ClientState) -> dict[str, Tensor]:
    """Return what a client stores as named tensors."""
    state = {} if stored.state is None else dict(stored.state.items())
    memories = {
        f"{receipt.hex()}/{name}": x.clone()  # memories may share a tensor, a file may not
        for receipt, memory in stored.memories.items()
        for name, x in memory.items()
    }
    return {**state, **memories}


def state_from_tensors(tensors: Mapping[str, Tensor], receipts: Sequence[str]) -> ClientState:
    """Return what a client stores; the inverse of :func:`tensors_from_state`."""
    memories: dict[bytes, dict[str, Tensor]] = {bytes.fromhex(receipt): {} for receipt in receipts}
    for key, x in tensors.items():
        if "/" in key:
            receipt, name = key.split("/")
            memories.setdefault(bytes.fromhex(receipt), {})[name] = x
    vectors = {key: tensors[key] for key in ROLES if key in tensors}
    return ClientState(State(**vectors) if vectors else None, memories)
