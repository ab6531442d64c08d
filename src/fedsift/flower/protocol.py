"""What server and client say to each other: an order down, an answer up, frames inside both.

A frame travels as the raw bytes of one Flower ``Array`` with a type of its own, so Flower neither
copies nor converts it. All else is a small ``ConfigRecord``.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedsift.codec.frame import CHECKSUM_BYTES

RECORD = "fedsift"
STYPE = "fedsift/v1"
MOST_WORDS = 200
"""Characters of a reason."""

Kind = Literal["full", "delta", "none"]
Outcome = Literal["update", "behind", "absent", "failed"]


class Malformed(ValueError):
    """A message that no honest fedsift sends."""


@dataclass(frozen=True)
class Order:
    """What the server asks of a client in a round.

    ``frame`` leads to the global state of that hash: all of it (``full``), what a client adds to
    the state of the round before (``delta``), or nothing (``none``). ``cohort`` is the client, or
    everyone who trains if the server does not know yet who it is talking to. ``receipts`` name the
    last upload of each that was merged, and so which of its memories counts; empty where clients
    keep none. ``seconds`` is all the time there is.
    """

    round: int
    run: bytes
    state: bytes
    kind: Kind
    cohort: list[int]
    receipts: list[bytes]
    algorithm: str
    seed: int
    batch_size: int
    seconds: float
    frame: bytes

    def records(self, config: ConfigRecord) -> RecordDict:
        """The message that carries it, and the app's own settings beside it."""
        words: dict[str, Any] = {k: v for k, v in asdict(self).items() if k != "frame"}
        if not self.receipts:
            del words["receipts"]
        frame = ArrayRecord({self.kind: packed(self.frame)} if self.frame else {})
        return RecordDict({RECORD: ConfigRecord(words), "frame": frame, "config": config})

    @classmethod
    def read(cls, records: RecordDict) -> Order:
        """The order in a message."""
        words: dict[str, Any] = dict(records.config_records[RECORD])
        frame = b"" if words["kind"] == "none" else unpacked(records, str(words["kind"]))
        return cls(**{"receipts": [], **words}, frame=frame)


@dataclass(frozen=True)
class Answer:
    """What a client says back: its update, or why there is none.

    ``behind``: it does not hold the state that a delta starts from. ``absent``: it is not in the
    cohort. ``failed``: its training raised, for that ``reason``.
    """

    client: int
    outcome: Outcome
    loss: float = 0.0
    examples: int = 0
    reason: str = ""
    frame: bytes = b""

    def records(self) -> RecordDict:
        """The message that carries it; Flower's own strategies could read its metrics."""
        words: dict[str, Any] = {"client": self.client, "outcome": self.outcome}
        words["reason"] = self.reason[:MOST_WORDS]
        metrics = MetricRecord({"train_loss": self.loss, "num-examples": self.examples})
        arrays = ArrayRecord({"update": packed(self.frame)} if self.frame else {})
        return RecordDict({RECORD: ConfigRecord(words), "metrics": metrics, "frame": arrays})

    @classmethod
    def read(cls, records: RecordDict) -> Answer:
        """The answer in a message from a client that may be hostile."""
        try:
            words = records.config_records[RECORD]
            client, outcome, reason = words["client"], words["outcome"], words["reason"]
            loss = records.metric_records["metrics"]["train_loss"]
            frame = unpacked(records, "update") if outcome == "update" else b""
        except (KeyError, TypeError, AttributeError) as problem:
            raise Malformed(f"its answer lacks {problem}") from None
        if type(client) is not int or type(reason) is not str or type(loss) is not float:
            raise Malformed("its answer has values of the wrong kind")
        if outcome not in ("update", "behind", "absent", "failed"):
            raise Malformed(f"its answer is {str(outcome)[:20]!r}")
        if outcome == "update" and len(frame) <= CHECKSUM_BYTES:
            raise Malformed("its frame is empty")
        return cls(client, outcome, loss, 0, plain(reason), frame)  # type: ignore[arg-type]


def plain(words: str) -> str:
    r"""What somebody elsewhere says, short and on one line, and harmless to a terminal.

    >>> plain("no\x1b[2J\nspace left")
    'no [2J space left'
    """
    return "".join(c if c.isprintable() else " " for c in words[:MOST_WORDS])


def packed(frame: bytes) -> Array:
    """A frame as Flower carries it."""
    return Array(dtype="uint8", shape=(len(frame),), stype=STYPE, data=frame)


def unpacked(records: RecordDict, name: str) -> bytes:
    """The frame of that name in a message."""
    array = records.array_records["frame"][name]
    if array.stype != STYPE:
        raise Malformed(f"its frame is of type {array.stype[:20]!r}")
    return array.data
