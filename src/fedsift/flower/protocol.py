"""The messages between server and clients: a request down, a reply up, frames in both.

A frame travels as the raw bytes of one Flower ``Array`` with its own serialization type, so
Flower neither copies nor converts it. Everything else is a small ``ConfigRecord``.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedsift.codec.frame import CHECKSUM_BYTES
from fedsift.task import Weights

RECORD = "fedsift"
STYPE = "fedsift/v1"
MAX_REASON_LENGTH = 200
"""A client's reason is truncated to this many characters."""

FrameKind = Literal["full", "delta", "none"]
Outcome = Literal["update", "behind", "absent", "failed"]


class MalformedReply(ValueError):
    """A reply that no correct client sends."""


@dataclass(frozen=True)
class TrainRequest:
    """What the server sends to a client in a round.

    ``state`` is the hash of the global state from which the round starts, and ``frame`` transmits
    that state, depending on ``kind``: it contains the whole state (``full``), the broadcast of the
    last round, to be applied to the state before (``delta``), or nothing, as the client holds the
    state already (``none``).

    ``cohort`` is the client, or the whole cohort if the server does not yet know which
    client the node is. For each of them, ``receipts`` identifies the last upload that was merged,
    and thus the memory to continue from. It is empty if the method's clients have no memory.
    ``seconds`` limits the time for training. ``memories`` is the number of its latest memories that
    a client stores, so that the server can return to an earlier round.
    """

    round: int
    run: bytes
    state: bytes
    kind: FrameKind
    cohort: list[int]
    receipts: list[bytes]
    algorithm: str
    seed: int
    batch_size: int
    weights: Weights
    seconds: float
    memories: int
    frame: bytes

    def to_records(self, config: ConfigRecord) -> RecordDict:
        """Return the content of the message, including the user's ``train_config``."""
        fields: dict[str, Any] = {k: v for k, v in asdict(self).items() if k != "frame"}
        if not self.receipts:
            del fields["receipts"]
        frame = ArrayRecord({self.kind: array_of_frame(self.frame)} if self.frame else {})
        return RecordDict({RECORD: ConfigRecord(fields), "frame": frame, "config": config})

    @classmethod
    def from_records(cls, records: RecordDict) -> TrainRequest:
        """Read the request in a message's content."""
        fields: dict[str, Any] = dict(records.config_records[RECORD])
        frame = b"" if fields["kind"] == "none" else frame_in(records, str(fields["kind"]))
        return cls(**{"receipts": [], **fields}, frame=frame)


@dataclass(frozen=True)
class TrainReply:
    """A client's update, or the reason why it sends none.

    ``behind``: the client does not hold the state that a delta starts from. ``absent``: it is not
    in the cohort. ``failed``: its training raised an error, given in ``reason``.
    """

    client: int
    outcome: Outcome
    loss: float = 0.0
    examples: int = 0
    reason: str = ""
    frame: bytes = b""

    def to_records(self) -> RecordDict:
        """Return the content of the message. Its metrics are named as in Flower's examples."""
        fields: dict[str, Any] = {"client": self.client, "outcome": self.outcome}
        fields["reason"] = self.reason[:MAX_REASON_LENGTH]
        metrics = MetricRecord({"train_loss": self.loss, "num-examples": self.examples})
        arrays = ArrayRecord({"update": array_of_frame(self.frame)} if self.frame else {})
        return RecordDict({RECORD: ConfigRecord(fields), "metrics": metrics, "frame": arrays})

    @classmethod
    def from_records(cls, records: RecordDict) -> TrainReply:
        """Read and check the reply in a message's content. The client may be hostile."""
        try:
            fields = records.config_records[RECORD]
            client, outcome, reason = fields["client"], fields["outcome"], fields["reason"]
            loss = records.metric_records["metrics"]["train_loss"]
            frame = frame_in(records, "update") if outcome == "update" else b""
        except (KeyError, TypeError, AttributeError) as problem:
            raise MalformedReply(f"its reply lacks {problem}") from None
        if type(client) is not int or type(reason) is not str or type(loss) is not float:
            raise MalformedReply("its reply has values of the wrong type")
        if outcome not in ("update", "behind", "absent", "failed"):
            raise MalformedReply(f"its reply has the unknown outcome {str(outcome)[:20]!r}")
        if outcome == "update" and len(frame) <= CHECKSUM_BYTES:
            raise MalformedReply("its frame is empty")
        return cls(client, outcome, loss, 0, printable(reason), frame)  # type: ignore[arg-type]


def printable(text: str) -> str:
    r"""Return the first characters of a client's text, on one line and safe for a terminal.

    >>> printable("no\x1b[2J\nspace left")
    'no [2J space left'
    """
    return "".join(c if c.isprintable() else " " for c in text[:MAX_REASON_LENGTH])


def array_of_frame(frame: bytes) -> Array:
    """Return a frame as the array in which Flower transports it."""
    return Array(dtype="uint8", shape=(len(frame),), stype=STYPE, data=frame)


def frame_in(records: RecordDict, name: str) -> bytes:
    """Return the frame of that name in a message's content."""
    array = records.array_records["frame"][name]
    if array.stype != STYPE:
        raise MalformedReply(f"its frame is of the serialization type {array.stype[:20]!r}")
    return array.data
