"""The messages between an engine's processes: JSON fields, tensors and a frame; no pickle."""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from safetensors.torch import load, save
from torch import Tensor

from fedsift.codec.frame import Spec, decode, encode
from fedsift.codec.limits import Limits
from fedsift.engine.contract import ClientResult
from fedsift.errors import Diverged, WorkerDied
from fedsift.task import Task
from fedsift.vector import Layout

FAILURES = frozenset({"diverged", "out_of_memory", "failed"})
"""The fields of a message that reports a failure."""


class Channel(Protocol):
    """Carries bytes to and from one other process."""

    def send_bytes(self, content: bytes) -> None:
        """Send bytes."""
        ...

    def recv_bytes(self) -> bytes:
        """Wait for the next bytes and return them."""
        ...


@dataclass(frozen=True)
class Message:
    """JSON fields, named tensors, and a frame."""

    fields: Mapping[str, Any]
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    frame: bytes = b""

    def send(self, channel: Channel) -> None:
        """Send the message."""
        channel.send_bytes(json.dumps(self.fields).encode())
        channel.send_bytes(save({name: x.contiguous() for name, x in self.tensors.items()}))
        channel.send_bytes(self.frame)

    @classmethod
    def receive(cls, channel: Channel) -> Message:
        """Wait for the next message and return it."""
        return cls(
            json.loads(channel.recv_bytes()), load(channel.recv_bytes()), channel.recv_bytes()
        )


def result_to_message(result: ClientResult, layout: Layout, algorithm: str, round: int) -> Message:
    """Return a client's result as a message, with its update encoded as a frame."""
    frame = encode(result.update, Spec(layout, algorithm, round, result.client))
    return Message({"loss": result.loss}, result.memory, frame)


def result_from_message(message: Message, client: int, task: Task) -> ClientResult:
    """Return the result in a message of :func:`result_to_message`, on the task's device."""
    device = task.device
    update = decode(message.frame, task.layout, Limits(max_abs=float("inf"))).to(device)
    memory = {name: x.to(device) for name, x in message.tensors.items()}
    return ClientResult(client, update, memory, message.fields["loss"], size=len(message.frame))


def failure_message(problem: Exception) -> Message:
    """Return the reply of a process in which an exception was raised."""
    if isinstance(problem, Diverged):
        return Message({"diverged": str(problem)})
    if is_out_of_memory(problem):
        return Message({"out_of_memory": str(problem).strip().partition("\n")[0]})
    return Message({"failed": "".join(traceback.format_exception(problem))})


def is_out_of_memory(problem: Exception) -> bool:
    """Whether an exception means that memory ran out.

    >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("unknown layer"))
    (True, False)
    """
    if isinstance(problem, MemoryError | torch.cuda.OutOfMemoryError):
        return True
    return isinstance(problem, RuntimeError) and "allocate memory" in str(problem)


def checked(reply: Message) -> Message:
    """Return a reply, or raise the failure that it reports."""
    match reply.fields:
        case {"diverged": reason}:
            raise Diverged(reason)
        case {"out_of_memory": reason}:
            raise WorkerDied(f"a worker process ran out of memory: {reason}")
        case {"failed": trace}:
            raise RuntimeError(f"a worker process failed:\n{trace}")
    return reply
