"""Secure aggregation on the server of a Flower federation: the protocol's stages as queries."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from logging import WARNING
from typing import TYPE_CHECKING

import numpy as np
from flwr.app import Message, MessageType
from flwr.supercore import log

from fedsift.codec.header import ID_BYTES
from fedsift.codec.update import Update
from fedsift.engine.contract import Job, Missing, Received
from fedsift.federation.inbox import Arrival, Inbox, Refused, Reply
from fedsift.federation.secure_round import add_sum, codes_of
from fedsift.flower.deployment import METADATA_BYTES
from fedsift.flower.exchange import POLL_SECONDS, Exchange
from fedsift.flower.protocol import MalformedReply, printable
from fedsift.flower.pull import Pull, pull_function
from fedsift.flower.requests import GRACE_SECONDS
from fedsift.flower.secure_client import SPENT, SecureQuery, SecureReply, basis_of
from fedsift.flower.superlink import connected_nodes, push_messages
from fedsift.privacy.secure import SecureSettings, SecureSumStopped
from fedsift.privacy.secure.exchange import StageBytes, run_exchange
from fedsift.privacy.secure.server import Replies, Request, SecureServer, SecureSum
from fedsift.privacy.secure.settings import SecureTraffic
from fedsift.task import weight_of

if TYPE_CHECKING:
    from fedsift.flower.deployment import Deployment

QUERY_SECONDS = 60.0
"""The longest time to wait for replies at one stage. No client trains meanwhile."""


class RemoteSecureRounds:
    """The server's side of a run. Its keys of clients last until its process ends.

    ``skipped`` is the last round whose values clients had masked before the server was restarted.
    They mask them only once, so nothing is merged.
    """

    def __init__(self, federation: Deployment) -> None:
        self.federation, self.skipped = federation, 0
        self.session = secrets.token_bytes(ID_BYTES)
        samples, batch = federation.max_samples, federation.task.batch_size
        most = weight_of(federation.weighting, samples, batch or samples)
        settings = federation.secure or SecureSettings()
        run = federation.run_id + self.session
        self.server = SecureServer(run, settings, max_weight=int(most))

    def collect(self, job: Job, inbox: Inbox, replies: Iterable[Reply]) -> SecureTraffic:
        """Take the frames of a round, and then the secure sum of what they leave out."""
        uploads: dict[int, Arrival] = {}
        for reply in replies:
            if isinstance(reply, Missing):
                inbox.problems[str(reply.client)] = reply.reason
            elif isinstance(reply, Received):
                upload = inbox.checked(reply)
                if isinstance(upload, Refused):
                    inbox.take_checked([upload])
                else:
                    uploads[reply.client] = upload
        if not job.phase.summed:
            inbox.take_checked(uploads.values())
            return SecureTraffic()
        sizes = StageBytes()
        total = self.sum_round(job, uploads, sizes)
        inbox.take_checked(x for client, x in uploads.items() if client in total.weights)
        left_out = [client for client in uploads if client not in total.weights]
        inbox.size += sum(size for client in left_out for size in uploads[client].sizes)
        inbox.size += sum(sizes.up.values())
        for client in left_out:
            inbox.problems[str(client)] = total.problems.get(client, "lost in the secure sum")
        add_sum(inbox.total.total, job.phase.summed, total.total)
        self.federation.wire.bytes_sent += sum(sizes.down.values())
        return sizes.per_client(len(self.federation.task.clients))

    def sum_round(self, job: Job, uploads: Mapping[int, Arrival], sizes: StageBytes) -> SecureSum:
        """Run the protocol among the clients whose frames have arrived."""
        layout, roles = self.federation.task.layout, job.phase.summed
        n = sum(layout.length(role) for role in roles)
        example = Update(self.federation.example_upload(job), (1.0,))
        largest = job.phase.largest or codes_of(example, roles)[2]
        absent = [client for client in job.cohort if client not in uploads]
        exchange: Exchange = self.federation.engine.current  # type: ignore[attr-defined]
        run, most = self.federation.run_id, METADATA_BYTES + 8 * n
        queries = SecureQueries(exchange, run, self.session, most)
        basis = basis_of(job.state, exchange.requests.config)
        try:
            total = run_exchange(
                self.server, job.round, job.cohort, n, largest, queries.ask, sizes, absent, basis
            )
            return replace(total, problems={**total.problems, **queries.reasons})
        except SecureSumStopped as problem:
            if SPENT in queries.reasons.values():
                self.skipped = job.round
            stopped = dict.fromkeys(uploads, f"no secure sum: {problem}")
            problems = stopped | self.server.problems | queries.reasons
            return SecureSum(np.zeros(n, np.int64), {}, problems)


@dataclass
class SecureQueries:
    """Sends the queries of a stage to the SuperNodes of its clients, and collects their replies.

    ``reasons`` are those that clients gave for refusing, by client.
    """

    exchange: Exchange
    run: bytes
    session: bytes
    max_reply_bytes: int
    reasons: dict[int, str] = field(default_factory=dict)
    pull: Pull = field(init=False)

    def __post_init__(self) -> None:
        self.pull = pull_function(self.exchange.grid, self.max_reply_bytes)

    def ask(self, request: Request) -> Replies:
        """Return the replies that arrive in time."""
        seconds = min(self.exchange.requests.seconds, QUERY_SECONDS)
        connected = set(connected_nodes(self.exchange.grid))
        nodes = {
            status.client: node
            for node, status in self.exchange.requests.nodes.items()
            if node in connected and status.client in request.messages
        }
        sent = [
            self.message(node, request.messages[client], seconds)
            for client, node in nodes.items()
            if client is not None
        ]
        ids = push_messages(self.exchange.grid, sent)
        waiting = {id: client for id, client in zip(ids, nodes, strict=True) if id is not None}
        replies: dict[int, bytes] = {}
        deadline = time.monotonic() + seconds
        while waiting:
            is_last = time.monotonic() > deadline
            for id, client in list(waiting.items()):
                if (reply := self.reply(id, client)) is not None:
                    replies |= {reply.client: reply.reply} if reply.reply else {}
                    del waiting[id]
            if is_last:
                break
            time.sleep(POLL_SECONDS if waiting else 0)
        return replies

    def message(self, node: int, request: bytes, seconds: float) -> Message:
        """Return the message with a client's request."""
        return Message(
            content=SecureQuery(self.run, self.session, request).to_records(),
            dst_node_id=node,
            message_type=MessageType.QUERY,
            ttl=seconds + GRACE_SECONDS,
            group_id=str(self.exchange.requests.round),
        )

    def reply(self, id: str, client: int | None) -> SecureReply | None:
        """Return the reply to a message; None if it has not arrived, empty if it is malformed."""
        try:
            message = self.pull(id)
            if message is None:
                return None
            if message.has_error():
                raise MalformedReply(printable(f"Flower's error: {message.error.reason}"))
            reply = SecureReply.from_records(message.content)
            if reply.client != client:
                raise MalformedReply(f"it claims to be client {reply.client}")
        except MalformedReply as problem:
            reply = SecureReply(client or 0, reason=str(problem))
        if reply.reason:
            self.reasons[reply.client] = reply.reason
            log(WARNING, "\t\tclient %s: %s", client, reply.reason)
        return reply
