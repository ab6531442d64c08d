"""The property that is fuzzed: whatever a server sends, a client trains or refuses, in its folder.

Bytes are read as choices. They change honest requests: their fields, records, arrays and frames.
"""

from __future__ import annotations

import logging
import re
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from choices import ODD, Choices
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.supercore.task_identity import TaskIdentity
from torch import nn

from fedsift import algorithms
from fedsift.codec.frame import checksum
from fedsift.federation.snapshot import Snapshot
from fedsift.flower import arrays_of, client_app
from fedsift.flower.arrays import vector_from_arrays
from fedsift.flower.deployment import Deployment
from fedsift.flower.engine import RemoteEngine
from fedsift.flower.protocol import RECORD, TrainReply
from fedsift.flower.requests import NodeStatus, RoundRequests
from fedsift.task import RemoteClients, Task

TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
FILE = re.compile(r"[0-9a-f]{16}/client-0/client\.safetensors")
"""What a client may write in its folder."""
ALGORITHM = algorithms.sift(local_steps=1, density=0.2)


def make_model() -> nn.Module:
    """A model of 15 parameters."""
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def load_data(client: int, clients: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight samples."""
    draw = torch.Generator().manual_seed(client)
    return torch.randn(8, 4, generator=draw), torch.arange(8) % 3


@cache
def server() -> tuple[Deployment, Snapshot, Snapshot]:
    """A server, and its snapshots before the first round and after one."""
    layout, w = vector_from_arrays(arrays_of(make_model()))
    layout = ALGORITHM.layout_for(layout)
    clients = RemoteClients(2, {})
    task = Task(nn.Module(), nn.functional.cross_entropy, clients, None, 4, 0, layout)
    federation = Deployment(task, ALGORITHM, RemoteEngine(None, None, None))
    first = federation.initial_snapshot_from(w)
    inbox = federation.open_inbox(federation.job_after(first), first)
    inbox.total.weight, inbox.merged = 1.0, 1
    after = Snapshot(1, first.state, first.server_memory, first.client_memory, first.traffic)
    second, _, _ = federation.broadcast(after, ALGORITHM.phase(1), inbox)
    return federation, first, second


def requests_of(snapshot: Snapshot) -> RoundRequests:
    """The requests of the round after a snapshot."""
    config = ConfigRecord({"server-round": snapshot.round + 1})
    return RoundRequests(server()[0], snapshot, {}, 60.0, config, memories=1)


def changed(records: RecordDict, choices: Choices) -> RecordDict:
    """Change a request in some places."""
    fields, frames = dict(records.config_records[RECORD]), dict(records.array_records["frame"])
    other: dict[str, Any] = {"config": ConfigRecord({"server-round": 1})}
    for _ in range(choices.number(4)):
        kind = choices.number(6)
        if kind < 2:
            fields[choices.one_of(sorted(fields))] = choices.one_of(ODD)
        elif kind == 2:
            fields.pop(choices.one_of(sorted(fields)))
        elif kind == 3:
            fields[str(choices.one_of(ODD))[:99]] = choices.one_of(ODD)
        elif kind == 4 and frames:
            name = choices.one_of(sorted(frames))
            frames[name] = changed_array(frames[name], choices)
        else:
            name = choices.one_of(("config", "frame", RECORD, "arrays", "layout", "x"))
            other[name] = choices.one_of((ConfigRecord(), MetricRecord(), ArrayRecord()))
    record = ConfigRecord()
    for name, value in fields.items():
        with suppress(TypeError, ValueError):
            record[name] = value
    arrays = ArrayRecord()
    arrays.update(frames)
    return RecordDict({RECORD: record, "frame": arrays, **other})


def changed_array(array: Array, choices: Choices) -> Array:
    """Change an array that holds a frame, mostly with a correct checksum of the frame."""
    about = {"dtype": array.dtype, "shape": array.shape, "stype": array.stype}
    data = array.data
    kind = choices.number(6)
    if kind == 0:
        about[choices.one_of(sorted(about))] = choices.one_of(("", "float32", (2**40,), None, 5))
    elif kind == 1:
        data = choices.one_of((b"", b"fs", data[:-1], data * 2, bytes(3 << 20)))
    else:
        body = choices.edited(data[:-8])
        data = body + checksum(body)
    changed = Array(dtype="uint8", shape=(len(data),), stype="", data=data)
    changed.__dict__.update(about)
    return changed


def check(data: bytes) -> list[str]:
    """Send a client two requests, and return the outcomes of its replies."""
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    choices, outcomes = Choices(data), []
    _, first, second = server()
    with TemporaryDirectory() as outer:
        folder = Path(outer) / "state"
        app = client_app(make_model, load_data, ALGORITHM, state_dir=folder)
        for snapshot in (first, choices.one_of((second, first))):
            status = choices.one_of((None, NodeStatus(0, b""), NodeStatus(0, b"")))
            requests = requests_of(snapshot)
            if status is not None:
                requests.nodes[7] = status
            message = requests.message_to(7)
            message.metadata.__dict__["_message_id"] = "1"
            message.metadata.__dict__["_message_type"] = MessageType.TRAIN
            message.content = changed(message.content, choices)
            outcomes.append(outcome_of(app, message))
        assert list(Path(outer).iterdir()) in ([], [folder]), "a file outside of the folder"
        found = [str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()]
        assert all(FILE.fullmatch(name) for name in found), found
    return outcomes


def outcome_of(app: Any, message: Message) -> str:
    """Let the client answer; check that its reply is one that a server can read."""
    context = Context(1, 7, {"partition-id": 0, "num-partitions": 2}, RecordDict(), {})
    reply = TrainReply.from_records(app(message, context).content)
    assert reply.client == 0
    assert reply.reason.isprintable()
    return reply.outcome
