"""What an engine's processes say to each other: words, tensors and frames. Nothing is pickled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from safetensors.torch import load, save
from torch import Tensor

from fedsift.engine.task import Diverged


class WorkerDied(RuntimeError):
    """A process of the engine ended on its own."""


class Line(Protocol):
    """Carries bytes to one other process, and back."""

    def send_bytes(self, content: bytes) -> None:
        """Send some bytes."""
        ...

    def recv_bytes(self) -> bytes:
        """Wait for the next bytes."""
        ...


@dataclass(frozen=True)
class Message:
    """A few words, some tensors, and a frame."""

    words: Mapping[str, Any]
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    frame: bytes = b""

    def send(self, line: Line) -> None:
        """Write the message."""
        line.send_bytes(json.dumps(self.words).encode())
        line.send_bytes(save({name: x.contiguous() for name, x in self.tensors.items()}))
        line.send_bytes(self.frame)

    @classmethod
    def receive(cls, line: Line) -> Message:
        """Wait for the next message."""
        return cls(json.loads(line.recv_bytes()), load(line.recv_bytes()), line.recv_bytes())


def checked(reply: Message) -> Message:
    """The reply, unless it tells of a failure."""
    match reply.words:
        case {"diverged": reason}:
            raise Diverged(reason)
        case {"failed": trace}:
            raise RuntimeError(f"a process of the engine failed:\n{trace}")
    return reply
