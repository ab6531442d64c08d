"""A round's talk with the SuperNodes: orders out, answers in, and what became of everyone."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from flwr.app import Message
from flwr.serverapp import Grid

from fedsift.engine.contract import Missing, Received
from fedsift.errors import TooFewClients
from fedsift.flower.deployment import Node, Orders
from fedsift.flower.protocol import Answer, Malformed, plain
from fedsift.flower.pull import puller
from fedsift.flower.store import receipt_of

POLL_SECONDS = 0.5
"""Between two looks into the SuperLink."""


def connected(grid: Grid, wanted: int, least: int, wait: float) -> list[int]:
    """The nodes that are there; waits for so many as are wanted, and needs at least so many."""
    until = time.monotonic() + wait
    while len(nodes := sorted(grid.get_node_ids())) < wanted and time.monotonic() < until:
        time.sleep(POLL_SECONDS)
    if len(nodes) < least:
        raise TooFewClients(
            f"{len(nodes)} of at least {least} SuperNodes are connected after {wait:g} s: "
            "start more of them, or wait longer; then start the same run to continue it"
        )
    return nodes


@dataclass
class Exchange:
    """One round's messages. A node says itself which client it is, and may say anything else, too.

    ``due`` are the clients that are still to answer, ``waiting`` the messages that no reply came
    to, and ``problems`` says by node why its answer does not count.
    """

    grid: Grid
    orders: Orders
    asked: dict[str, int] = field(default_factory=dict)
    waiting: set[str] = field(default_factory=set)
    problems: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.due = set(self.orders.cohort)
        self.unheard = f"no reply within {self.orders.seconds:g} s"
        self.pull = puller(self.grid, self.orders.max_reply_bytes)

    def replies(self, messages: Iterable[Message]) -> Iterator[Message]:
        """Send orders, and yield replies as they come, until all are in or time is up."""
        until = time.monotonic() + self.orders.seconds
        self.push(messages)
        while self.waiting:
            is_last = time.monotonic() > until
            for id in [id for id in self.asked if id in self.waiting]:
                if (reply := self.arrived(id)) is not None:
                    yield reply
            if is_last:
                return
            time.sleep(POLL_SECONDS if self.waiting else 0)

    def arrived(self, id: str) -> Message | None:
        """The reply to the message of that id, if it has arrived and can be read."""
        try:
            reply = self.pull(id)
            if reply is not None and reply.metadata.reply_to_message_id != id:
                raise Malformed("its reply names a message that it was not sent")
        except Malformed as problem:
            self.problems[self.asked[id]] = str(problem)
            self.waiting.discard(id)
            return None
        if reply is not None:
            self.waiting.discard(id)
        return reply

    def push(self, messages: Iterable[Message]) -> None:
        """Send messages, and note which node was asked by which."""
        sent = list(messages)
        ids = self.grid.push_messages(sent)
        asked = {id: m.metadata.dst_node_id for id, m in zip(ids, sent, strict=True)}
        self.asked |= asked
        self.waiting |= asked.keys()

    def read(self, reply: Message) -> Received | Missing | None:
        """What a client that is due has to say; None if it is another, or has nothing to say yet.

        A reply to a message that was not sent is dropped. A node that turns out to be behind is
        sent everything.
        """
        node = self.asked.get(reply.metadata.reply_to_message_id)
        if node is None:
            return None
        try:
            answer = answer_in(reply)
            about = self.admit(node, answer)
        except Malformed as problem:
            self.problems[node] = str(problem)
            return None
        if answer.outcome == "behind":
            about.held = b""
            self.push([self.orders.message(node)])
            return None
        if answer.outcome in ("update", "absent"):
            about.held = self.orders.state
        if answer.client not in self.due:
            return None
        self.due.remove(answer.client)
        return taken(answer)

    def admit(self, node: int, answer: Answer) -> Node:
        """Note which client a node is; it cannot be one that another node is, or become another."""
        nodes, client = self.orders.nodes, answer.client
        about = nodes.setdefault(node, Node())
        others = [n for n, other in nodes.items() if other.client == client and n != node]
        is_taken = others and set(others) & set(self.grid.get_node_ids())
        clients = len(self.orders.federation.task.clients)
        if is_taken or not 0 <= client < clients or about.client not in (None, client):
            raise Malformed(f"it says that it is client {client}, which it cannot be")
        if answer.outcome == "update" and client not in self.due:
            raise Malformed(f"it sends an update of client {client}, which is not due")
        for other in others:
            del nodes[other]
        about.client = client
        if answer.outcome == "behind" and not about.held:
            raise Malformed("it says that it is behind, but it was sent everything")
        return about

    def why(self, client: int) -> str:
        """Why nothing came from a client."""
        clients = {n: about.client for n, about in self.orders.nodes.items()}
        for node, problem in self.problems.items():
            if clients.get(node) == client:
                return problem
        silent = {clients.get(self.asked[id]) for id in self.waiting}
        return self.unheard if silent & {client, None} else "no node is this client"

    def strangers(self) -> dict[str, str]:
        """The problems of nodes that are no client yet."""
        known = {n for n, about in self.orders.nodes.items() if about.client is not None}
        return {f"node {n}": why for n, why in sorted(self.problems.items()) if n not in known}


def answer_in(reply: Message) -> Answer:
    """The answer in a reply, which may be Flower's own word of an error instead."""
    if reply.has_error():
        raise Malformed(plain(f"Flower's error {reply.error.code}: {reply.error.reason}"))
    return Answer.read(reply.content)


def taken(answer: Answer) -> Received | Missing:
    """An answer as the federation takes it."""
    if answer.outcome != "update":
        return Missing(answer.client, answer.reason or answer.outcome)
    receipt = torch.frombuffer(bytearray(receipt_of(answer.frame)), dtype=torch.uint8)
    return Received(answer.client, answer.frame, {"receipt": receipt}, answer.loss)
