"""A SuperNode that tampers with its uploads below Flower's API; the round decides how."""

import json
import time
from dataclasses import dataclass, replace
from functools import partial

from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_object import (
    get_object_head_values_from_object_content,
    get_object_id,
)
from flwr.supernode import start_client_internal


def install():
    """Let this process, a SuperNode, push what it likes."""
    start_client_internal._push_messages = push_messages


@dataclass(frozen=True)
class Node:
    """An object of Flower's with all that it consists of."""

    kind: str
    body: bytes
    children: tuple["Node", ...] = ()

    @classmethod
    def load(cls, store, id):
        while not (content := store.get(id)):
            time.sleep(0.1)
        kind, children, _ = get_object_head_values_from_object_content(content)
        body = content.split(b"\0", 1)[1]
        # Records name their children by their ids, which depend on what is in them.
        for number, child in enumerate(children):
            body = body.replace(child.encode(), b"<%d>" % number)
        return cls(kind, body, tuple(cls.load(store, child) for child in children))

    def save(self, contents):
        """Write every object's content by its id; gives the tree of ids."""
        trees = [child.save(contents) for child in self.children]
        body = self.body
        for number, tree in enumerate(trees):
            body = body.replace(b"<%d>" % number, tree.object_id.encode())
        ids = ",".join(tree.object_id for tree in trees)
        content = f"{self.kind} {ids} {len(body)}".encode() + b"\0" + body
        contents[get_object_id(content)] = content
        return ObjectTree(object_id=get_object_id(content), children=trees)

    def with_each(self, kind, change):
        """This, with all objects of a kind changed."""
        changed = replace(self, children=tuple(c.with_each(kind, change) for c in self.children))
        return change(changed) if self.kind == kind else changed


def to_another_message(node):
    message = ProtoMessage.FromString(node.body)
    message.metadata.reply_to_message_id = "f" * 64
    return replace(node, body=message.SerializeToString())


def unparsable(node):
    return replace(node, body=b"\xff" * 9)


def with_repeated_chunk(node):
    """1.2 GB by one chunk of 512 KiB."""
    about = {**json.loads(node.body), "arraychunk_ids": [0] * 2400}
    return replace(node, body=json.dumps(about).encode(),
                   children=(Node("ArrayChunk", bytes(1 << 19)),))  # fmt: skip


def huge(node):
    return replace(node, body=bytes(128 << 20))


ATTACKS = {
    "1": ("Message", to_another_message),
    "2": ("Message", unparsable),
    "3": ("Array", with_repeated_chunk),
    "4": ("ArrayChunk", huge),
    "5": ("Message", lambda node: node),
}


def push_messages(state, object_store, send, push_object):
    while not (messages := state.get_messages_legacy(is_reply=True)):
        time.sleep(0.1)
    for message in messages:
        about = message.metadata
        whole, contents = Node.load(object_store, about.message_id), {}
        tree = whole.with_each(*ATTACKS[about.group_id]).save(contents)
        state.delete_messages(message_ids=[about.message_id, about.reply_to_message_id])
        about.__dict__["_message_id"] = tree.object_id
        ids, session = send(message, tree, 1.0)
        push = partial(push_object, about.run_id, session)
        for id in ids:
            if not (about.group_id == "5" and contents[id].startswith(b"ArrayChunk ")):
                push(id, contents[id])
