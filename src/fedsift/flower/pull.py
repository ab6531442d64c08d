"""Pull replies one at a time, within bounds on their size.

Flower 1.41's ``Grid.pull_messages`` downloads and decodes whatever clients have uploaded, and waits
until every object of every reply has arrived. A single hostile client could crash the server, delay
the round or exhaust the memory. Flower's public API offers no bounds, so this module (and no other)
uses the internal client of Flower's HTTP grid. Other grids, such as the one of Flower's simulation,
already hold the replies in memory and are read through ``pull_messages``.
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

from fedsift.flower.protocol import MalformedReply

RECORD_BYTES = 1 << 18
"""Upper bound for an object that is not a chunk of an array: metadata, a record, a list."""
SMALLEST_CHUNK = 1 << 16
"""Clients may split arrays into chunks of this many bytes or more; Flower's default is 5 MiB."""
RECORDS = 32
"""Upper bound for the number of objects in a reply that are not chunks of an array."""
MAX_INCOMPLETE_BYTES = 2**26
"""The most memory for replies that have not arrived completely."""
TREE_BYTES = 128
"""Upper bound for one object in the list of a reply's objects: its id and the list's structure."""

Pull = Callable[[str], Message | None]
"""Returns the reply to the message with that id, or None if it has not arrived completely.

Raises :class:`MalformedReply` if the reply is refused. A refused reply is not pulled again.
"""


def pull_function(grid: Grid, max_bytes: int) -> Pull:
    """Return the function that pulls replies of at most ``max_bytes`` from this grid."""
    if isinstance(grid, HttpGrid):
        return BoundedPull(grid, max_bytes)
    return partial(pull_by_public_api, grid)


def pull_by_public_api(grid: Grid, id: str) -> Message | None:
    """Pull one reply, without bounds."""
    try:
        return next(iter(grid.pull_messages([id])), None)
    except Exception as problem:  # a malformed reply can make Flower raise anything
        raise MalformedReply(f"its reply cannot be read ({type(problem).__name__})") from None


@dataclass
class ReplyDownload:
    """A reply whose objects are downloaded one by one as they arrive."""

    root: str
    missing: list[str]
    contents: dict[str, bytes] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Number of bytes downloaded so far."""
        return sum(map(len, self.contents.values()))


@dataclass
class BoundedPull:
    """Pulls replies from a SuperLink, and never waits for an object that has not arrived."""

    grid: HttpGrid
    max_bytes: int
    downloads: dict[str, ReplyDownload] = field(default_factory=dict)

    @property
    def max_objects(self) -> int:
        """Upper bound for the number of objects in a reply."""
        return RECORDS + self.max_bytes // SMALLEST_CHUNK

    def __call__(self, id: str) -> Message | None:
        """Return the reply to the message with this id; see :data:`Pull`."""
        try:
            if id not in self.downloads and not self.start_download(id):
                return None
            return self.continue_download(id)
        except httpx.HTTPStatusError as problem:
            log(WARNING, "the SuperLink did not deliver a reply; trying again: %s", problem)
            return None

    def start_download(self, id: str) -> bool:
        """Record which objects a reply consists of, and return whether it was announced at all."""
        with self.bounded("a list of objects", self.max_objects * TREE_BYTES) as client:
            found = client.PullMessages(PullAppMessagesRequest(message_ids=[id]))
        replies = zip(found.messages_list, found.message_object_trees, strict=True)
        for reply, tree in replies:
            if reply.metadata.reply_to_message_id == id:
                self.downloads[id] = ReplyDownload(tree.object_id, self.object_ids(tree))
        return id in self.downloads

    def object_ids(self, tree: ObjectTree) -> list[str]:
        """Return the ids of all objects in a reply."""
        limit = self.max_objects
        ids = [each.object_id for each in islice(iterate_object_tree(tree), limit + 1)]
        if len(ids) > limit:
            raise MalformedReply(f"its reply has more than {limit} objects")
        return list(dict.fromkeys(ids))

    def continue_download(self, id: str) -> Message | None:
        """Download the objects that have arrived, and return the reply once it is complete."""
        download = self.downloads[id]
        try:
            if not self.download_available(download):
                return None
            message = decode_reply(download, self.max_bytes)
        except MalformedReply:
            self.forget(id)
            raise
        self.forget(id)
        return message

    def download_available(self, download: ReplyDownload) -> bool:
        """Download objects until one has not arrived, and return whether all have."""
        while download.missing:
            content = self.pull_object(download.missing[-1])
            if content is None:
                self.drop_if_many(download)
                return False
            download.contents[download.missing.pop()] = content
            if download.size > self.max_bytes:
                raise MalformedReply(f"its reply is larger than {self.max_bytes} bytes")
        return True

    def drop_if_many(self, download: ReplyDownload) -> None:
        """Drop an incomplete reply if such replies take too much memory, to download it again.

        The object that has not arrived stays the first one to ask for.
        """
        if sum(other.size for other in self.downloads.values()) > MAX_INCOMPLETE_BYTES:
            download.missing[:-1] += download.contents
            download.contents.clear()

    def pull_object(self, object_id: str) -> bytes | None:
        """Return the content of an object, or None if it has not arrived."""
        run = self.grid.run.run_id
        request = PullObjectRequest(node=self.grid.node, run_id=run, object_id=object_id)
        with self.bounded("an object", self.max_bytes) as client:
            found = client.PullObject(request)
        if not found.object_found:
            raise MalformedReply("its upload was not completed in time")
        return bytes(found.object_content) if found.object_available else None

    def forget(self, id: str) -> None:
        """Forget a reply, and let the SuperLink delete it."""
        root, run = self.downloads.pop(id).root, self.grid.run.run_id
        request = ConfirmMessageReceivedRequest(
            node=self.grid.node, run_id=run, message_object_id=root
        )
        with suppress(httpx.HTTPStatusError):
            self.grid._runtime_client.ConfirmMessageReceived(request)

    @contextmanager
    def bounded(self, what: str, max_bytes: int) -> Iterator[RuntimeHttpClient]:
        """Yield the grid's client, which refuses longer responses before reading them."""
        client = self.grid._runtime_client
        hooks = client._client.event_hooks["response"]
        check = partial(check_length, what, max_bytes)
        hooks.append(check)
        try:
            yield client
        except MalformedReply:
            raise
        except ValueError as problem:  # the response is not a protobuf message
            raise MalformedReply(f"its reply cannot be read: {problem}") from None
        finally:
            hooks.remove(check)


def check_length(what: str, max_bytes: int, response: httpx.Response) -> None:
    """Refuse a response that is too long according to its header."""
    if int(response.headers.get("content-length", 0)) > max_bytes + RECORD_BYTES:
        raise MalformedReply(f"its reply has {what} of more than {max_bytes} bytes")


def decode_reply(download: ReplyDownload, max_bytes: int) -> Message:
    """Return the message in a complete download, or raise :class:`MalformedReply`."""
    try:
        check_sizes(download.contents, max_bytes)
        message = inflate_object_from_contents(download.root, download.contents)
    except MalformedReply:
        raise
    except Exception as problem:  # the client may have sent anything
        raise MalformedReply(f"its reply cannot be read ({type(problem).__name__})") from None
    if not isinstance(message, Message):
        raise MalformedReply(f"its reply is not a message but {type(message).__name__}")
    return message


def check_sizes(contents: Mapping[str, bytes], max_bytes: int) -> None:
    """Refuse objects that take much more memory when decoded than they take on the wire."""
    claimed = 0
    for content in contents.values():
        kind, children, _ = get_object_head_values_from_object_content(content)
        if kind != "ArrayChunk" and len(content) > RECORD_BYTES:
            raise MalformedReply(f"its reply has a record of more than {RECORD_BYTES} bytes")
        if kind == "Array":
            claimed += array_size(content, [len(contents[child]) for child in children])
    if claimed > max_bytes:
        raise MalformedReply(f"its arrays are larger than {max_bytes} bytes")


def array_size(content: bytes, chunk_sizes: list[int]) -> int:
    """Return the size of an array, which may list the same chunk many times."""
    listed = json.loads(get_object_body(content, Array))["arraychunk_ids"]
    return sum(chunk_sizes[place] for place in listed)
