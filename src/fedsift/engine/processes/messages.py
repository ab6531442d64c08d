"""What an engine's processes say to each other: words, tensors and frames. Nothing is pickled."""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from safetensors.torch import load, save
from torch import Tensor

from fedsift.codec.frame import Spec, decode, encode
from fedsift.codec.limits import Limits
from fedsift.engine.contract import ClientResult
from fedsift.errors import Diverged
from fedsift.task import (
    Task,
)
from fedsift.vector import Layout


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


def message_of(result: ClientResult, layout: Layout, algorithm: str, round: int) -> Message:
    """A client's result, its update as a frame."""
    frame = encode(result.update, Spec(layout, algorithm, round, result.client))
    return Message({"loss": result.loss}, result.memory, frame)


def result_of(message: Message, client: int, task: Task) -> ClientResult:
    """What :func:`message_of` was made of, on the task's device."""
    device = task.clients[0][0].device
    update = decode(message.frame, task.layout, Limits(max_abs=float("inf"))).to(device)
    kept = {name: x.to(device) for name, x in message.tensors.items()}
    return ClientResult(client, update, kept, message.words["loss"], size=len(message.frame))


def failure(problem: Exception) -> Message:
    """The answer of a process in which something went wrong."""
    if isinstance(problem, Diverged):
        return Message({"diverged": str(problem)})
    return Message({"failed": "".join(traceback.format_exception(problem))})


def checked(reply: Message) -> Message:
    """The reply, unless it tells of a failure."""
    match reply.words:
        case {"diverged": reason}:
            raise Diverged(reason)
        case {"failed": trace}:
            raise RuntimeError(f"a process of the engine failed:\n{trace}")
    return reply
