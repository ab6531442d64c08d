"""Pull replies one at a time, within bounds on their size.

Flower 1.41's ``Grid.pull_messages`` downloads and decodes whatever clients have uploaded, and waits
until every object of every reply has arrived. A single hostile client could crash the server, delay
the round or exhaust the memory. Flower's public API offers no bounds, so for Flower's HTTP grid
this module, and no other, uses the grid's internal client. Other grids, such as the one of Flower's
simulation, already hold the replies in memory; they are asked through ``pull_messages``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from logging import WARNING

import httpx
from flwr.app import Array, Message
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree, PullObjectRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.serverapp import Grid
from flwr.supercore import log
from flwr.supercore.inflatable.inflatable_object import (
    get_object_body,
    get_object_head_values_from_object_content,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.superlink.grid import HttpGrid

from fedsift.flower.protocol import Malformed

RECORD_BYTES = 1 << 18
"""Upper bound for one object that is not a piece of an array: metadata, a record, a list."""
SMALLEST_CHUNK = 1 << 16
"""Clients may cut arrays into pieces of this many bytes or more; Flower's default is 5 MiB."""
RECORDS = 32
"""Upper bound for the number of objects in a reply that are not pieces of an array."""

Pull = Callable[[str], Message | None]
"""Gives the reply to a message, by the message's id; None if it has not arrived completely.

Raises :class:`Malformed` for a reply that is refused. It will not arrive again.
"""


def puller(grid: Grid, max_bytes: int) -> Pull:
    """The way to pull replies of at most ``max_bytes`` from this grid."""
    if isinstance(grid, HttpGrid):
        return BoundedPull(grid, max_bytes)
    return partial(pull_decoded, grid)


def pull_decoded(grid: Grid, id: str) -> Message | None:
    """Pull one reply by the public API."""
    try:
        return next(iter(grid.pull_messages([id])), None)
    except Exception as problem:  # whatever a reply makes Flower raise is that reply's fault
        raise Malformed(f"its reply cannot be read ({type(problem).__name__})") from None


@dataclass
class Download:
    """A reply of which some objects may not have arrived yet."""

    root: str
    missing: list[str]
    contents: dict[str, bytes] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes that have arrived."""
        return sum(map(len, self.contents.values()))


@dataclass
class BoundedPull:
    """Pulls replies from a SuperLink, and never waits for an object that has not arrived."""

    grid: HttpGrid
    max_bytes: int
    downloads: dict[str, Download] = field(default_factory=dict)

    def __call__(self, id: str) -> Message | None:
        """The reply to the message of this id; see :data:`Pull`."""
        try:
            if id not in self.downloads and not self.begin(id):
                return None
            return self.resume(id)
        except httpx.HTTPStatusError as problem:
            log(WARNING, "the SuperLink did not deliver a reply, will try again: %s", problem)
            return None

    def begin(self, id: str) -> bool:
        """Ask whether a reply was announced, and note which objects it consists of."""
        with self.bounded() as client:
            found = client.PullMessages(PullAppMessagesRequest(message_ids=[id]))
        replies = zip(found.messages_list, found.message_object_trees, strict=True)
        for reply, tree in replies:
            if reply.metadata.reply_to_message_id == id:
                self.downloads[id] = Download(tree.object_id, self.objects_of(tree))
        return id in self.downloads

    def objects_of(self, tree: ObjectTree) -> list[str]:
        """The ids of all objects in a reply."""
        most = RECORDS + self.max_bytes // SMALLEST_CHUNK
        ids = [each.object_id for each in islice(iterate_object_tree(tree), most + 1)]
        if len(ids) > most:
            raise Malformed(f"its reply has more than {most} objects")
        return list(dict.fromkeys(ids))

    def resume(self, id: str) -> Message | None:
        """Download what has arrived meanwhile; gives the reply once it is complete."""
        download = self.downloads[id]
        try:
            if not self.is_complete(download):
                return None
            message = decoded(download, self.max_bytes)
        except Malformed:
            self.forget(id)
            raise
        self.forget(id)
        return message

    def is_complete(self, download: Download) -> bool:
        """Download objects until one has not arrived; tell whether all have."""
        while download.missing:
            content = self.content_of(download.missing[-1])
            if content is None:
                return False
            download.contents[download.missing.pop()] = content
            if download.size > self.max_bytes:
                raise Malformed(f"its reply is larger than {self.max_bytes} bytes")
        return True

    def content_of(self, object_id: str) -> bytes | None:
        """One object's content, None if it has not arrived."""
        run = self.grid.run.run_id
        request = PullObjectRequest(node=self.grid.node, run_id=run, object_id=object_id)
        with self.bounded() as client:
            found = client.PullObject(request)
        if not found.object_found:
            raise Malformed("its upload was not completed in time")
        return bytes(found.object_content) if found.object_available else None

    def forget(self, id: str) -> None:
        """Let the SuperLink delete a reply."""
        root, run = self.downloads.pop(id).root, self.grid.run.run_id
        request = ConfirmMessageReceivedRequest(
            node=self.grid.node, run_id=run, message_object_id=root
        )
        with suppress(httpx.HTTPStatusError):
            self.grid._runtime_client.ConfirmMessageReceived(request)

    @contextmanager
    def bounded(self) -> Iterator[RuntimeHttpClient]:
        """The grid's client; inside, it refuses a response that is too long before reading it."""
        client = self.grid._runtime_client
        hooks = client._client.event_hooks["response"]
        hooks.append(self.check_length)
        try:
            yield client
        except Malformed:
            raise
        except ValueError as problem:  # the response is no protobuf message
            raise Malformed(f"its reply cannot be read: {problem}") from None
        finally:
            hooks.remove(self.check_length)

    def check_length(self, response: httpx.Response) -> None:
        """Refuse a response by the length that its header states."""
        most = self.max_bytes + RECORD_BYTES
        if int(response.headers.get("content-length", 0)) > most:
            raise Malformed(f"its reply has an object of more than {self.max_bytes} bytes")


def decoded(download: Download, max_bytes: int) -> Message:
    """The message in a complete reply, or :class:`Malformed`."""
    try:
        check_sizes(download.contents, max_bytes)
        message = inflate_object_from_contents(download.root, download.contents)
    except Malformed:
        raise
    except Exception as problem:  # the content is a client's and may be anything
        raise Malformed(f"its reply cannot be read ({type(problem).__name__})") from None
    if not isinstance(message, Message):
        raise Malformed(f"its reply is no message but {type(message).__name__}")
    return message


def check_sizes(contents: Mapping[str, bytes], max_bytes: int) -> None:
    """Refuse objects that take much more memory once decoded than they take on the wire."""
    claimed = 0
    for content in contents.values():
        kind, children, _ = get_object_head_values_from_object_content(content)
        if kind != "ArrayChunk" and len(content) > RECORD_BYTES:
            raise Malformed(f"its reply has a record of more than {RECORD_BYTES} bytes")
        if kind == "Array":
            claimed += array_size(content, [len(contents[child]) for child in children])
    if claimed > max_bytes:
        raise Malformed(f"its arrays are larger than {max_bytes} bytes")


def array_size(content: bytes, chunk_sizes: list[int]) -> int:
    """The size of an array that may list the same chunk many times."""
    listed = json.loads(get_object_body(content, Array))["arraychunk_ids"]
    return sum(chunk_sizes[place] for place in listed)
