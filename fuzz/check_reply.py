"""The property that is fuzzed: whatever clients upload, the server refuses or reads it cheaply.

Bytes are read as choices. They change honest replies below Flower's API, where an authenticated
client has control: the tree of objects, each object's head and body, and what is uploaded of it.
"""

from __future__ import annotations

import json
import sys
import time
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from choices import ODD, Choices
from flwr.app import ConfigRecord, Error, Message, MessageType, Metadata
from flwr.app.message import make_message, remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.message_pb2 import ObjectTree, PullObjectResponse
from flwr.proto.recorddict_pb2 import ConfigRecord as ProtoConfig
from flwr.proto.recorddict_pb2 import MetricRecord as ProtoMetrics
from flwr.proto.runtime_pb2 import PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.task_identity import TaskIdentity
from google.protobuf.message import DecodeError
from torch import nn

sys.path.append(str(Path(__file__).parents[1] / "tests" / "flower" / "fast"))
from hostile import Node

from fedsift import algorithms
from fedsift.algorithms.method import Context, LocalUpdate
from fedsift.codec import Update, encode, state_hash
from fedsift.engine.contract import Missing, Received
from fedsift.federation.snapshot import Snapshot
from fedsift.flower.deployment import Deployment
from fedsift.flower.engine import RemoteEngine
from fedsift.flower.evaluation import ClientEvaluation, EvaluateRequests
from fedsift.flower.exchange import Exchange
from fedsift.flower.protocol import OUTCOMES, TrainReply
from fedsift.flower.pull import BoundedPull
from fedsift.flower.requests import RoundRequests
from fedsift.task import RemoteClients, Task
from fedsift.vector import Layout

TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
CLIENTS, D = 3, 600
MEMORY = 48 << 20
"""The most bytes that reading all replies may take at a time; the limit of a reply is 1 MiB."""
SECONDS = 5.0
"""The most seconds that reading all replies may take, on a busy machine."""
KINDS = (
    "Message", "RecordDict", "ArrayRecord", "Array", "ArrayChunk", "ConfigRecord",
    "MetricRecord", "", "dict", "X Y",
)  # fmt: skip


@cache
def server() -> tuple[Deployment, Snapshot]:
    """A server's side of a small federation, after no round."""
    layout = Layout(("a", "b"), ((20, 29), (20,)), torch.float32)
    loss, clients = nn.functional.cross_entropy, RemoteClients(CLIENTS, {})
    task = Task(nn.Module(), loss, clients, None, 64, 0, layout)
    federation = Deployment(task, algorithms.fedadam_ssm(), RemoteEngine(None, None, None))
    return federation, federation.initial_snapshot_from(torch.zeros(D))


@cache
def honest_frame(client: int) -> bytes:
    """The update of an honest client."""
    federation, snapshot = server()
    job = federation.job_after(snapshot)
    draw = torch.Generator().manual_seed(client)
    end = job.state.map(lambda x: torch.rand(1, D, generator=draw))
    start = job.state.map(lambda x: x[None])
    context = Context.of(federation.task, 1, (client,))
    parts, _ = job.phase.send(context, LocalUpdate(start, end), {})
    spec = federation.frame_spec(1, state_hash(job.state))
    return encode(Update(parts, (64.0,)), replace(spec, client=client))


def honest(choices: Choices, id: str, client: int) -> Message:
    """Return a reply as a client of Flower's makes it, of any outcome."""
    about = Metadata(
        run_id=1, message_id="", src_node_id=client + 100, dst_node_id=1, group_id="1", ttl=60.0,
        message_type=MessageType.TRAIN, reply_to_message_id=id, created_at=1e9,
    )  # fmt: skip
    outcome = choices.one_of(("update", "update", "update", "evaluated", *OUTCOMES))
    if not choices.number(8):
        return make_message(metadata=about, error=Error(choices.number(20), "no \x1b reason"))
    frame = honest_frame(client) if outcome == "update" else b""
    metrics = {"num-examples": 64.0, "accuracy": 0.5}
    reply = TrainReply(client, outcome, 0.5, "it\nfailed", frame, metrics, evaluates=True)
    return make_message(metadata=about, content=reply.to_records())


@dataclass
class Upload:
    """What the SuperLink has of a reply: its tree, and the objects by their ids."""

    about: ProtoMessage
    tree: ObjectTree
    contents: dict[str, bytes]
    absent: set[str] = field(default_factory=set)
    unavailable: set[str] = field(default_factory=set)


def uploaded(message: Message, choices: Choices) -> Upload:
    """Change a message in some places, as a client can below Flower's API."""
    contents = {id: x.deflate() for id, x in get_all_nested_objects(message).items()}
    node = Node.load(contents, message.object_id)
    for _ in range(choices.number(4)):
        node = changed_somewhere(node, choices)
    saved: dict[str, bytes] = {}
    try:
        tree = node.save(saved)
    except DecodeError:  # a tree this deep has no encoding
        saved.clear()
        tree = Node.load(contents, message.object_id).save(saved)
    upload = Upload(message_to_proto(remove_content_from_message(message)), tree, saved)
    for _ in range(choices.number(3)):
        choices.one_of(UPLOAD_CHANGES)(upload, choices)
    return upload


def changed_somewhere(node: Node, choices: Choices) -> Node:
    """Change this object or one below it."""
    if node.children and choices.number(3):
        place = choices.number(len(node.children))
        child = changed_somewhere(node.children[place], choices)
        return replace(node, children=(*node.children[:place], child, *node.children[place + 1 :]))
    return choices.one_of(NODE_CHANGES)(node, choices)


def change_body(node: Node, choices: Choices) -> Node:
    """Replace a piece of the body."""
    return replace(node, body=choices.edited(node.body))


def change_json(node: Node, choices: Choices) -> Node:
    """Change a value in a body of JSON."""
    try:
        value = json.loads(node.body)
    except ValueError:
        return change_body(node, choices)
    return replace(node, body=json.dumps(choices.edited_json(value)).encode())


def change_record(node: Node, choices: Choices) -> Node:
    """Set or delete an entry of a record, in the form in which Flower stores it."""
    kinds = {"ConfigRecord": ProtoConfig, "MetricRecord": ProtoMetrics, "Message": ProtoMessage}
    try:
        record = kinds[node.kind].FromString(node.body)
    except Exception:
        return change_json(node, choices)
    target = record.metadata if node.kind == "Message" else record
    if node.kind != "Message" and record.items:
        item = choices.one_of(record.items)
        if not choices.number(4):
            item.key = str(choices.one_of(ODD))
        target = item.value
    names = [f.name for f in target.DESCRIPTOR.fields]
    name, value = choices.one_of(names), choices.one_of(ODD)
    with suppress(TypeError, ValueError, AttributeError, OverflowError):
        if isinstance(value, list):
            getattr(target, name).vals.extend([1] * len(value))
        else:
            setattr(target, name, value)
    return replace(node, body=record.SerializeToString())


def change_kind(node: Node, choices: Choices) -> Node:
    """Call the object something else."""
    return replace(node, kind=choices.one_of(KINDS))


def repeat_child(node: Node, choices: Choices) -> Node:
    """List a child many times, or not at all."""
    times = choices.one_of((0, 2, 60))
    return replace(node, children=node.children[:1] * times)


def nest(node: Node, choices: Choices) -> Node:
    """Put the object into itself, many times."""
    for _ in range(choices.one_of((1, 3, 30))):
        node = replace(node, children=(node,))
    return node


def blow_up(node: Node, choices: Choices) -> Node:
    """Claim a large array by listing one chunk many times, or send a large body."""
    if node.kind != "Array":
        return replace(node, body=bytes(choices.one_of((1 << 10, 1 << 18, 3 << 19))))
    about = {"dtype": "uint8", "shape": [1], "stype": "fedsift/v1"}
    about["arraychunk_ids"] = [0] * choices.one_of((0, 300, 60_000))
    chunk = Node("ArrayChunk", bytes(choices.one_of((1, 1 << 16, 1 << 20))))
    return replace(node, body=json.dumps(about).encode(), children=(chunk,))


Change = Callable[[Node, Choices], Node]
NODE_CHANGES: tuple[Change, ...] = (
    change_body, change_json, change_record, change_kind, repeat_child, nest, blow_up,
)  # fmt: skip


def lose_object(upload: Upload, choices: Choices) -> None:
    """An object was never uploaded, or its upload expired."""
    target = upload.absent if choices.number(2) else upload.unavailable
    target.add(choices.one_of(list(upload.contents)))


def change_content(upload: Upload, choices: Choices) -> None:
    """An object's content is not what its id says."""
    id = choices.one_of(list(upload.contents))
    upload.contents[id] = choices.edited(upload.contents[id])


def change_tree(upload: Upload, choices: Choices) -> None:
    """The tree lists other objects than the message has."""
    extra = [ObjectTree(object_id="f" * 64)] * choices.one_of((1, 70, 5000))
    if choices.number(2):
        del upload.tree.children[:]
    upload.tree.children.extend(extra)


def change_envelope(upload: Upload, choices: Choices) -> None:
    """The envelope says something else than the message."""
    with suppress(TypeError, ValueError, OverflowError):
        name = choices.one_of([f.name for f in upload.about.metadata.DESCRIPTOR.fields])
        setattr(upload.about.metadata, name, choices.one_of(ODD))


UPLOAD_CHANGES = (lose_object, change_content, change_tree, change_envelope)


class SuperLink:
    """Flower's runtime API, with what the clients have uploaded, and the grid that uses it."""

    def __init__(self, choices: Choices) -> None:
        self.choices, self.uploads, self.count, self.requests = choices, {}, 0, 0
        self.run, self.node = SimpleNamespace(run_id=1), None
        self._client = SimpleNamespace(event_hooks={"response": []})
        self._runtime_client = self

    def get_node_ids(self) -> list[int]:
        """Return the nodes."""
        return [100, 101, 102]

    def push_messages(self, messages: Any) -> list[str]:
        """Let each node answer at once."""
        return [self.push(message.metadata.dst_node_id - 100) for message in messages]

    def push(self, client: int) -> str:
        """Store a client's reply to a new message, and return the message's id."""
        self.count += 1
        id = f"{self.count:064x}"
        claimed = self.choices.one_of((client, client, client, 0, CLIENTS - 1))
        self.uploads[id] = uploaded(honest(self.choices, id, claimed), self.choices)
        return id

    def PullMessages(self, request: Any) -> PullAppMessagesResponse:  # noqa: N802
        """Return the tree of a reply."""
        response, (id,) = PullAppMessagesResponse(), request.message_ids
        if (upload := self.uploads.get(id)) is not None:
            response.messages_list.append(upload.about)
            response.message_object_trees.append(upload.tree)
        return self.sent(response)

    def PullObject(self, request: Any) -> PullObjectResponse:  # noqa: N802
        """Return an object if it was uploaded."""
        for upload in self.uploads.values():
            if (content := upload.contents.get(request.object_id)) is not None:
                found = request.object_id not in upload.absent
                available = found and request.object_id not in upload.unavailable
                sent = content if available else b""
                return self.sent(PullObjectResponse(
                    object_found=found, object_available=available, object_content=sent
                ))  # fmt: skip
        return self.sent(PullObjectResponse(object_found=False))

    def ConfirmMessageReceived(self, request: Any) -> None:  # noqa: N802
        """Take note."""

    def sent(self, response: Any) -> Any:
        """Let the client see the length of a response, as httpx does, and return it."""
        self.requests += 1
        for hook in self._client.event_hooks["response"]:
            hook(SimpleNamespace(headers={"content-length": str(response.ByteSize())}))
        return response


def check(data: bytes) -> int:
    """Let three clients train and then evaluate; return how many updates the server would merge."""
    federation, snapshot = server()
    grid = SuperLink(Choices(data))
    requests = RoundRequests(federation, snapshot, {}, 60.0, ConfigRecord(), memories=1)
    exchange = Exchange(grid, requests, watch=None)  # nobody watches
    exchange.pull = BoundedPull(grid, requests.max_reply_bytes)
    exchange.send([requests.message_to(node) for node in grid.get_node_ids()])
    tracemalloc.start()
    began = time.process_time()
    try:
        merged = sum(answers(exchange, federation))
        memory = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert memory < MEMORY, f"{memory >> 20} MiB"
    assert time.process_time() - began < SECONDS
    assert grid.requests < 500, f"{grid.requests} requests"
    assert merged <= CLIENTS
    said = [exchange.missing_reason(client) for client in range(CLIENTS)]
    said += [*exchange.problems.values(), *exchange.problems_of_unknown_nodes().values()]
    assert all(text.isprintable() and len(text) < 400 for text in said), said
    check_evaluation(grid, requests)
    return merged


def check_evaluation(grid: SuperLink, train: RoundRequests) -> None:
    """Let the same clients evaluate; what the server writes to metrics.jsonl must be finite."""
    requests = EvaluateRequests(
        train.federation, train.snapshot, train.nodes, 60.0, ConfigRecord(), memories=1
    )
    exchange = Exchange(grid, requests, watch=None)  # nobody watches
    exchange.pull = BoundedPull(grid, requests.max_reply_bytes)
    exchange.send([requests.message_to(node) for node in grid.get_node_ids()])
    evaluation = ClientEvaluation(exchange)
    for _ in range(3):
        pulled = [exchange.pull_reply(id) for id in sorted(exchange.unanswered)]
        evaluation.take(reply for reply in pulled if reply is not None)
    line = json.dumps(evaluation.summary(), allow_nan=False)
    assert len(line) < 100_000
    assert all(text.isprintable() for text in evaluation.summary()["problems"].values())


def answers(exchange: Exchange, federation: Deployment) -> Any:
    """Poll three times, and yield for every answer whether it is a valid update."""
    limits = RemoteEngine(None, None, None, exchange)
    for _ in range(3):
        for id in sorted(exchange.unanswered):
            if (reply := exchange.pull_reply(id)) is None:
                continue
            result = exchange.result_in(reply)
            assert result is None or isinstance(result, Received | Missing)
            if isinstance(result, Received):
                job = exchange.requests.job
                yield limits.is_valid(result, limits.upload_limits(job))
