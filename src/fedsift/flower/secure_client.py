"""Secure aggregation on a Flower client: it answers the stages of the protocol, one per message.

After training, the client sends an ordinary frame without the values that are summed, and stores
these. Queries of the server then run the protocol. Flower may start a process per message, so the
client's keys and values are in a file that only its owner may read.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from logging import ERROR
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from flwr.supercore import log

from fedsift.codec.header import ID_BYTES
from fedsift.engine.contract import ClientResult
from fedsift.federation.secure_round import Codes, codes_of, partial_codes
from fedsift.flower.protocol import (
    MAX_REASON_LENGTH,
    MalformedReply,
    RefusedRequest,
    array_of_frame,
    frame_in,
    printable,
)
from fedsift.privacy.secure import Refusal, SecureSettings
from fedsift.privacy.secure.client import SecureClient
from fedsift.privacy.secure.exchange import reply_of
from fedsift.privacy.secure.hashing import digest
from fedsift.privacy.secure.messages import Reader, SecureStage
from fedsift.privacy.secure.refusal import require
from fedsift.privacy.secure.storage import client_from_json, client_to_json
from fedsift.runs.disk import replace_file
from fedsift.vector import State, raw_bytes

SECURE_RECORD = "fedsift-secure"
MAX_SPENT = 10_000
"""The most digests that a client keeps of values that it has masked."""
SPENT = (
    "these values were masked in another session of the server: a second sum, over other clients, "
    "would reveal their difference"
)


@dataclass(frozen=True)
class SecureQuery:
    """A request of the server at a stage.

    ``session`` is chosen at random when the server starts. Keys belong to one session.
    """

    run: bytes
    session: bytes
    request: bytes

    def to_records(self) -> RecordDict:
        """Return the content of the message."""
        about = ConfigRecord({"run": self.run, "session": self.session})
        frame = ArrayRecord({"request": array_of_frame(self.request)})
        return RecordDict({SECURE_RECORD: about, "frame": frame})

    @classmethod
    def from_records(cls, records: RecordDict) -> SecureQuery:
        """Read and check a query. The server may be hostile."""
        try:
            fields: dict[str, Any] = dict(records.config_records[SECURE_RECORD])
            query = cls(fields["run"], fields["session"], frame_in(records, "request"))
        except (KeyError, TypeError, AttributeError, ValueError) as problem:
            raise RefusedRequest(f"the server's query cannot be read ({problem})") from None
        for id in (query.run, query.session):
            if type(id) is not bytes or len(id) != ID_BYTES:
                raise RefusedRequest("the server's query is malformed: an id has an invalid value")
        return query


@dataclass(frozen=True)
class SecureReply:
    """A client's reply at a stage, or the reason why it refuses."""

    client: int
    reply: bytes = b""
    reason: str = ""

    def to_records(self) -> RecordDict:
        """Return the content of the message."""
        reason = self.reason[:MAX_REASON_LENGTH]
        about = ConfigRecord({"client": self.client, "reason": reason})
        frame = ArrayRecord({"reply": array_of_frame(self.reply)} if self.reply else {})
        return RecordDict({SECURE_RECORD: about, "frame": frame})

    @classmethod
    def from_records(cls, records: RecordDict) -> SecureReply:
        """Read and check a reply. The client may be hostile."""
        try:
            fields: dict[str, Any] = dict(records.config_records[SECURE_RECORD])
            client, reason = fields["client"], fields["reason"]
            reply = b"" if reason else frame_in(records, "reply")
        except (KeyError, TypeError, AttributeError) as problem:
            raise MalformedReply(f"its reply lacks {problem}") from None
        if type(client) is not int or type(reason) is not str:
            raise MalformedReply("its reply has values of the wrong type")
        return cls(client, reply, printable(reason))


@dataclass(frozen=True)
class SecureFile:
    """A client's file of secure aggregation: the values of its last round, and its keys.

    ``basis`` is a hash of what the values were computed from. ``spent`` are digests of masked
    values, with their session. They outlast a session, so that a server cannot get a second sum of
    the same values, over other clients, in a new session.
    """

    path: Path
    round: int = 0
    weight: int = 0
    codes: bytes = b""
    basis: bytes = b""
    client: SecureClient | None = None
    spent: tuple[tuple[str, str], ...] = ()

    @classmethod
    def load(cls, folder: Path) -> SecureFile:
        """Read the file in a client's folder; without a file, return an empty one."""
        path = folder / "secure.json"
        try:
            found = json.loads(path.read_bytes())
        except (OSError, ValueError):
            return cls(path)
        client = None if found["client"] is None else client_from_json(found["client"])
        codes, basis = (bytes.fromhex(found[name]) for name in ("codes", "basis"))
        spent = tuple((values, session) for values, session in found["spent"])
        return cls(path, found["round"], found["weight"], codes, basis, client, spent)

    def save(self) -> None:
        """Replace the file; only its owner may read it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        before = os.umask(0o077)
        try:
            content = {
                "round": self.round,
                "weight": self.weight,
                "codes": self.codes.hex(),
                "basis": self.basis.hex(),
                "client": None if self.client is None else client_to_json(self.client),
                "spent": self.spent,
            }
            replace_file(self.path, json.dumps(content).encode())
        finally:
            os.umask(before)

    def digest_in(self, run: bytes) -> str:
        """Return a digest of the values of this round of a run."""
        return digest("values", run, self.round, self.codes).hex()

    def spent_in(self, query: SecureQuery) -> SecureFile:
        """Return the file after its values were masked; refuse it in a second session."""
        values, session = self.digest_in(query.run), query.session.hex()
        known = dict(self.spent)
        require(known.get(values, session) == session or not any(self.codes), SPENT)
        return replace(self, spent=tuple((known | {values: session}).items())[-MAX_SPENT:])


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Let one process at a time use a client's file.

    A server could otherwise send two queries at once, and get two replies to the same state.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "secure.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed
        yield


def basis_of(state: State, config: ConfigRecord) -> bytes:
    """Return a hash of what the server sent for a round: the state, and the training's config."""
    vectors = ((name, hashlib.sha256(raw_bytes(x)).digest()) for name, x in state.items())
    settings = repr(sorted(config.items()))
    return digest("basis", settings, *(field for vector in vectors for field in vector))


def without_summed(
    result: ClientResult, roles: tuple[str, ...], round: int, basis: bytes, folder: Path
) -> ClientResult:
    """Store the values of the summed roles, and return the result without them."""
    update, codes, _ = codes_of(result.update, roles)  # type: ignore[arg-type]
    (weight,) = update.weights
    raw = codes.astype(np.int8).tobytes()
    with exclusive(folder):
        file = SecureFile.load(folder)
        replace(file, round=round, weight=int(weight), codes=raw, basis=basis).save()
    return replace(result, update=update)


def answer_query(
    query: SecureQuery, client: int, folder: Path, settings: SecureSettings
) -> SecureReply:
    """Return a client's reply to a query, and store what it must remember before."""
    try:
        with exclusive(folder):
            file, reply = answered(query, client, SecureFile.load(folder), settings)
            file.save()
    except Refusal as problem:
        log(ERROR, "client %s refused the server's query: %s", client, problem)
        return SecureReply(client, reason=str(problem))
    return SecureReply(client, reply)


def answered(
    query: SecureQuery, client: int, file: SecureFile, settings: SecureSettings
) -> tuple[SecureFile, bytes]:
    """Return a client's file after a query, and its reply."""
    run, party = query.run + query.session, file.client
    header = Reader(query.request).header()
    require(file.round == header.round, f"this client has no values of round {header.round}")
    if header.stage is SecureStage.KEYS and (party is None or party.run != run):
        party = SecureClient(run, client, file.weight, settings)
    if party is None or party.run != run:
        raise Refusal("this client has no keys for this session of the server")
    if header.stage is SecureStage.MASKED:
        file = file.spent_in(query)
    codes: Codes = np.frombuffer(file.codes, np.int8)
    reply = reply_of(party, header.stage, query.request, partial_codes(codes), file.basis)
    return replace(file, client=party), reply
