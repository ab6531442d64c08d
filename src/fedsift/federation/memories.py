"""The clients' memories between rounds: held in RAM if they are small, else in a file.

The file consists of slots, each of which holds one client's memory. A slot is never overwritten
while a snapshot refers to it, so old snapshots stay valid; a slot that no snapshot refers to is
reused. Each round reads and writes the memory of every client in its cohort once. The file grows to
one slot per client that ever took part, plus the slots written since the oldest checkpoint that is
kept.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import weakref
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsift.algorithms.method import Memory
from fedsift.vector import raw_bytes

DIGEST_BYTES = 16
MAX_RAM = 64 * 2**20
"""The largest size in bytes of all clients' memories that is held in RAM."""
MAX_RAM_IF_ALL_TRAIN = 4 * 2**30
"""The same if every client trains in every round, so that each round needs all memories anyway."""


def memory_fits(size: int, all_train: bool) -> bool:
    """Whether memories of this size in bytes are held in RAM.

    >>> memory_fits(2**30, all_train=True), memory_fits(2**30, all_train=False)
    (True, False)
    """
    return size <= (MAX_RAM_IF_ALL_TRAIN if all_train else MAX_RAM)


class Memories(Mapping[int, Memory]):
    """The memory of each client after some round. Clients that never took part have none."""

    @abstractmethod
    def keep(self, memory: Memory) -> Any:
        """Store a memory, and return the handle to pass to :meth:`replaced`."""

    @abstractmethod
    def replaced(self, stored: Mapping[int, Any]) -> Memories:
        """Return these memories with those of some clients replaced. The old ones stay valid."""


class InMemory(Memories):
    """Memories in RAM.

    >>> before = InMemory()
    >>> after = before.replaced({3: {"residual": torch.ones(1, 2)}})
    >>> list(before), list(after)
    ([], [3])
    """

    def __init__(self, stored: Mapping[int, Memory] | None = None) -> None:
        self.stored = stored or {}

    def __getitem__(self, client: int, /) -> Memory:
        return self.stored[client]

    def __iter__(self) -> Iterator[int]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)

    def keep(self, memory: Memory) -> Memory:
        """Return the memory itself."""
        return memory

    def replaced(self, stored: Mapping[int, Memory]) -> InMemory:
        """Return these memories with those of some clients replaced."""
        return InMemory({**self.stored, **stored})


class Slot:
    """A slot of a file. It is free again when nothing refers to it."""

    def __init__(self, file: SlotFile, number: int, digest: bytes = b"") -> None:
        self.file, self.number, self._digest = file, number, digest

    def __del__(self) -> None:
        self.file.free.append(self.number)

    @property
    def digest(self) -> bytes:
        """Hash of the slot's content."""
        self._digest = self._digest or digest_of(self.file.read(self.number))
        return self._digest


class SlotFile:
    """A file of slots, each of which holds the named vectors of one client, one after another."""

    def __init__(self, lengths: Mapping[str, int], like: Tensor, path: Path | None = None) -> None:
        self.lengths, self.like = lengths, like
        self.slot_bytes = sum(lengths.values()) * like.element_size()
        if path is None:
            with tempfile.TemporaryFile() as file:  # deleted when its last handle is closed
                self.handle = os.dup(file.fileno())
        else:
            self.handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        weakref.finalize(self, os.close, self.handle)
        self.free: list[int] = []
        self.slots = 0

    def put(self, memory: Memory) -> Slot:
        """Write a memory to a free slot."""
        if not self.free:
            self.free.append(self.slots)
            self.slots += 1
        slot = Slot(self, self.free.pop())
        offset = slot.number * self.slot_bytes
        for name, length in self.lengths.items():
            write_all(self.handle, raw_bytes(memory[name]), offset)
            offset += length * self.like.element_size()
        return slot

    def get(self, slot: Slot) -> Memory:
        """Read a memory."""
        raw = np.frombuffer(bytearray(self.read(slot.number)), np.uint8)
        numbers = torch.from_numpy(raw).view(self.like.dtype).to(self.like.device)
        vectors = torch.split(numbers, list(self.lengths.values()))
        return {name: x[None] for name, x in zip(self.lengths, vectors, strict=True)}

    def read(self, number: int) -> bytes:
        """The bytes of a slot."""
        return read_all(self.handle, self.slot_bytes, number * self.slot_bytes)

    def claim(self, numbers: Sequence[int], digests: Sequence[bytes]) -> list[Slot]:
        """Return the slots that a checkpoint refers to, after checking their content."""
        self.slots = max(numbers, default=-1) + 1
        self.free = sorted(set(range(self.slots)) - set(numbers), reverse=True)
        slots = [Slot(self, n, digest) for n, digest in zip(numbers, digests, strict=True)]
        if any(digest_of(self.read(slot.number)) != slot.digest for slot in slots):
            raise ValueError("the clients' memories were altered")
        return slots

    def reserve(self, numbers: Iterable[int]) -> dict[int, Slot]:
        """Return more slots of earlier checkpoints by number, without reading their content."""
        found = {number: Slot(self, number) for number in numbers}
        slots = max(self.slots, max(found, default=-1) + 1)
        free = {*self.free, *range(self.slots, slots)} - found.keys()
        self.slots, self.free = slots, sorted(free, reverse=True)
        return found

    def to_disk(self) -> None:
        """Flush everything written to the disk."""
        os.fsync(self.handle)


class OnDisk(Memories):
    """Memories in a file.

    >>> before = OnDisk(SlotFile({"residual": 2}, torch.zeros(2)))
    >>> after = before.replaced({3: before.keep({"residual": torch.ones(1, 2)})})
    >>> len(before), after[3]["residual"].tolist()
    (0, [[1.0, 1.0]])
    """

    def __init__(self, file: SlotFile, slots: Mapping[int, Slot] | None = None) -> None:
        self.file, self.slots = file, slots or {}

    def __getitem__(self, client: int, /) -> Memory:
        return self.file.get(self.slots[client])

    def __iter__(self) -> Iterator[int]:
        return iter(self.slots)

    def __len__(self) -> int:
        return len(self.slots)

    def keep(self, memory: Memory) -> Slot:
        """Write a memory to the file."""
        return self.file.put(memory)

    def replaced(self, stored: Mapping[int, Slot]) -> OnDisk:
        """Return these memories with those of some clients replaced."""
        return OnDisk(self.file, {**self.slots, **stored})


class CohortMemory(Mapping[int, Memory]):
    """The memory with which each member of a cohort begins a round, read when needed."""

    def __init__(self, known: Memories, cohort: tuple[int, ...], zeros: Memory) -> None:
        self.known, self.cohort, self.zeros = known, cohort, zeros

    def __getitem__(self, client: int, /) -> Memory:
        if client in self.known:
            return self.known[client]
        return {name: x.clone() for name, x in self.zeros.items()}

    def __iter__(self) -> Iterator[int]:
        return iter(self.cohort)

    def __len__(self) -> int:
        return len(self.cohort)


def digest_of(content: bytes) -> bytes:
    """Return the hash of a slot's bytes."""
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()


def write_all(handle: int, content: bytes, offset: int) -> None:
    """Write bytes at an offset of a file, in as many pieces as the system needs."""
    view = memoryview(content)
    while view:
        done = os.pwrite(handle, view, offset)
        view, offset = view[done:], offset + done


def read_all(handle: int, size: int, offset: int) -> bytes:
    """Read bytes at an offset of a file."""
    pieces = []
    while size:
        piece = os.pread(handle, size, offset)
        if not piece:
            raise ValueError("the file of the clients' memories is truncated")
        pieces.append(piece)
        size, offset = size - len(piece), offset + len(piece)
    return b"".join(pieces)
