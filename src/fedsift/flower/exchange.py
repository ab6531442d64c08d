"""The messages of one round: requests to the SuperNodes, their replies, and missing replies."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from flwr.app import Message
from flwr.serverapp import Grid

from fedsift.engine.contract import Missing, Received
from fedsift.errors import TooFewClients
from fedsift.flower.protocol import MalformedReply, TrainReply, printable
from fedsift.flower.pull import Pull, pull_function
from fedsift.flower.requests import NodeStatus, RoundRequests
from fedsift.flower.store import receipt_of
from fedsift.flower.superlink import connected_nodes, push_messages
from fedsift.flower.watch import RunWatch

POLL_SECONDS = 0.5
"""Seconds between two queries to the SuperLink."""
NO_ARRAYS = "'arrays'"
"""Part of the KeyError of a function that finds no arrays in the message."""
NO_MOD = ": the ClientApp needs the mod fedsift.flower.sifted, ClientApp(mods=[sifted(algorithm)])"
"""The advice that follows such an error."""


def wait_for_nodes(
    grid: Grid, wanted: int, needed: int, seconds: float, watch: RunWatch
) -> list[int]:
    """Wait for ``wanted`` nodes and return them; at the timeout, accept at least ``needed``."""
    deadline = time.monotonic() + seconds
    while len(nodes := connected_nodes(grid)) < wanted and time.monotonic() < deadline:
        watch.waiting_for_nodes(len(nodes), wanted, deadline)
        time.sleep(POLL_SECONDS)
    watch.nodes_connected(len(nodes), wanted)
    if len(nodes) < needed:
        raise TooFewClients(
            f"{len(nodes)} of at least {needed} SuperNodes are connected after {seconds:g} s: "
            "start more of them or increase wait, then start the same run to continue it"
        )
    return nodes


@dataclass
class Exchange:
    """The messages of one round.

    Each node states its own client number, and a hostile node may state any. ``recipients`` maps
    the id of each message to the node that it was sent to. ``unanswered`` holds the ids of messages
    without a reply, and ``pending`` the clients without a result. ``problems`` gives, by node, why
    its reply does not count. ``metrics`` holds, by client, the numbers that came with its update.
    """

    grid: Grid
    requests: RoundRequests
    watch: RunWatch
    recipients: dict[str, int] = field(default_factory=dict)
    unanswered: set[str] = field(default_factory=set)
    problems: dict[int, str] = field(default_factory=dict)
    metrics: dict[int, Mapping[str, float]] = field(default_factory=dict)
    pending: set[int] = field(init=False)
    no_reply_reason: str = field(init=False)
    pull: Pull = field(init=False)

    def __post_init__(self) -> None:
        self.pending = set(self.requests.cohort)
        self.no_reply_reason = f"no reply within {self.requests.seconds:g} s"
        self.pull = pull_function(self.grid, self.requests.max_reply_bytes)

    def replies(self, messages: Iterable[Message]) -> Iterator[Message]:
        """Send messages, and yield replies as they arrive, until the last one or the timeout."""
        deadline = time.monotonic() + self.requests.seconds
        self.send(messages)
        while self.unanswered:
            is_last = time.monotonic() > deadline
            for id in [id for id in self.recipients if id in self.unanswered]:
                if (reply := self.pull_reply(id)) is not None:
                    yield reply
            self.report_progress(deadline)
            if is_last:
                return
            time.sleep(POLL_SECONDS if self.unanswered else 0)

    def report_progress(self, deadline: float) -> None:
        """Tell the run's watch which clients have answered and which have not."""
        waiting_for = {self.recipients[id] for id in self.unanswered}
        answered = set(self.recipients.values()) - waiting_for - self.problems.keys()
        self.watch.waiting_for_replies(
            sorted(map(self.name_of_node, answered)),
            sorted(map(self.name_of_node, waiting_for)),
            {self.name_of_node(node): why for node, why in self.problems.items()},
            deadline,
        )

    def name_of_node(self, node: int) -> str:
        """Return a node's client, or the node itself as long as its client is not known."""
        status = self.requests.nodes.get(node)
        known = status is not None and status.client is not None
        return f"client {status.client}" if status and known else f"node {node}"

    def pull_reply(self, id: str) -> Message | None:
        """Return the reply to a message, or None if it has not arrived or is malformed."""
        try:
            reply = self.pull(id)
            if reply is not None and reply.metadata.reply_to_message_id != id:
                raise MalformedReply("its reply names a message that it was not sent")
        except MalformedReply as problem:
            self.problems[self.recipients[id]] = str(problem)
            self.unanswered.discard(id)
            return None
        if reply is not None:
            self.unanswered.discard(id)
        return reply

    def send(self, messages: Iterable[Message]) -> None:
        """Send messages, and record which node each was sent to."""
        sent = list(messages)
        for id, message in zip(push_messages(self.grid, sent), sent, strict=True):
            node = message.metadata.dst_node_id
            if id is None:
                self.problems[node] = "the SuperLink did not accept the request to it"
            else:
                self.recipients[id] = node
                self.unanswered.add(id)

    def result_in(self, message: Message) -> Received | Missing | None:
        """Return the result of a pending client; None if the message contains none.

        Replies to messages that were not sent are dropped. A node without the last state is sent
        the whole state.
        """
        reply = self.reply_in(message)
        if reply is None or reply.client not in self.pending:
            return None
        self.pending.remove(reply.client)
        if reply.outcome == "update":
            self.metrics[reply.client] = reply.metrics
        return result_of(reply)

    def reply_in(self, message: Message) -> TrainReply | None:
        """Return the reply in a message, unless it is malformed or asks for the whole state."""
        node = self.recipients.get(message.metadata.reply_to_message_id)
        if node is None:
            return None
        try:
            reply = read_reply(message)
            status = self.identify(node, reply)
        except MalformedReply as problem:
            self.problems[node] = str(problem)
            return None
        status.evaluates = reply.evaluates
        if reply.outcome == "behind":
            status.state = b""
            self.send([self.requests.message_to(node)])
            return None
        if reply.outcome != "failed":
            status.state = self.requests.state
        return reply

    def identify(self, node: int, reply: TrainReply) -> NodeStatus:
        """Check and record which client a node is.

        Two connected nodes cannot be the same client, and a node cannot become another client.
        """
        nodes, client = self.requests.nodes, reply.client
        status = nodes.setdefault(node, NodeStatus())
        others = [n for n, other in nodes.items() if other.client == client and n != node]
        is_taken = others and set(others) & set(connected_nodes(self.grid))
        clients = len(self.requests.federation.task.clients)
        if is_taken or not 0 <= client < clients or status.client not in (None, client):
            raise MalformedReply(
                f"it claims to be client {client}, which is invalid or already taken"
            )
        if reply.outcome == "update" and client not in self.pending:
            raise MalformedReply(f"it sent an update of client {client}, which is not expected")
        for other in others:
            del nodes[other]
        status.client = client
        if reply.outcome == "behind" and not status.state:
            raise MalformedReply("it claims to be behind, but it was sent the whole state")
        return status

    def missing_reason(self, client: int) -> str:
        """Return why a client has no result."""
        clients = {n: status.client for n, status in self.requests.nodes.items()}
        for node, problem in self.problems.items():
            if clients.get(node) == client:
                return problem
        silent = {clients.get(self.recipients[id]) for id in self.unanswered}
        if silent & {client, None}:
            return self.no_reply_reason
        first = "" if clients else next(iter(self.problems.values()), "")
        return f"no node is this client; {first}" if first else "no node is this client"

    def problems_of_unknown_nodes(self) -> dict[str, str]:
        """Return the problems of nodes whose client is not known."""
        known = {n for n, status in self.requests.nodes.items() if status.client is not None}
        return {f"node {n}": why for n, why in sorted(self.problems.items()) if n not in known}


def read_reply(message: Message) -> TrainReply:
    """Return the reply in a message, which may contain an error from Flower instead."""
    if message.has_error():
        error = message.error
        advice = NO_MOD if NO_ARRAYS in str(error.reason) else ""
        raise MalformedReply(printable(f"Flower's error {error.code}: {error.reason}") + advice)
    return TrainReply.from_records(message.content)


def result_of(reply: TrainReply) -> Received | Missing:
    """Return a reply as the result that an engine yields."""
    if reply.outcome != "update":
        return Missing(reply.client, reply.reason or reply.outcome)
    return Received(reply.client, reply.frame, receipt_of(reply.frame), reply.loss)
