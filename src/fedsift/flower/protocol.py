"""The messages between server and clients: a request down, a reply up, frames in both.

A frame travels as the raw bytes of one Flower ``Array`` with its own serialization type, so
Flower neither copies nor converts it. Everything else is a small ``ConfigRecord``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedsift.codec.frame import CHECKSUM_BYTES
from fedsift.codec.header import ID_BYTES
from fedsift.flower.arrays import layout_from_record, record_of_layout
from fedsift.task import Weights
from fedsift.vector import Layout

RECORD = "fedsift"
STYPE = "fedsift/v1"
MAX_REASON_LENGTH = 200
"""A client's reason is truncated to this many characters."""
MAX_METRICS = 100
"""Upper bound for the number of metrics in a reply."""
NUM_EXAMPLES = "num-examples"
"""The metric that is a client's weight by default, as in Flower's strategies."""

MAX_SECONDS = 1e8
"""The longest time that a request may give a client for its training."""

FrameKind = Literal["full", "delta", "deltas", "none"]
Outcome = Literal["update", "evaluated", "behind", "absent", "failed"]
OUTCOMES: tuple[Outcome, ...] = ("update", "evaluated", "behind", "absent", "failed")


class MalformedReply(ValueError):
    """A reply that no correct client sends."""


class RefusedRequest(ValueError):
    """A request that a client does not follow: malformed, or of another method or model."""


@dataclass(frozen=True)
class TrainRequest:
    """What the server sends to a client in a round, to train or to evaluate.

    ``state`` is the hash of the global state from which the round starts, and ``frame`` transmits
    that state, depending on ``kind``: it contains the whole state (``full``), the broadcast of the
    last round, to be applied to the state before (``delta``), the broadcasts of several rounds,
    each after its length in 4 bytes (``deltas``), or nothing, as the client holds the state already
    (``none``).

    ``cohort`` is the client, or the whole cohort if the server does not yet know which
    client the node is. For each of them, ``receipts`` identifies the last upload that was merged,
    and thus the memory to continue from. It is empty if the method's clients have no memory.
    ``seconds`` limits the time for training. ``memories`` is the number of its latest memories that
    a client stores, so that the server can return to an earlier round. ``weight_key`` names the
    metric that is the client's number of samples, if its own code reports it. ``layout``
    accompanies a whole state, for clients that know their model by its arrays only.
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
    weight_key: str = NUM_EXAMPLES
    layout: Layout | None = None

    @property
    def deltas(self) -> list[bytes]:
        """The broadcasts to apply, in their order."""
        return split(self.frame) if self.kind == "deltas" else [self.frame]

    def to_records(self, config: ConfigRecord) -> RecordDict:
        """Return the content of the message, including the user's configuration."""
        fields: dict[str, Any] = {k: v for k, v in vars(self).items() if k not in OWN_RECORDS}
        if not self.receipts:
            del fields["receipts"]
        frame = ArrayRecord({self.kind: array_of_frame(self.frame)} if self.frame else {})
        records = RecordDict({RECORD: ConfigRecord(fields), "frame": frame, "config": config})
        if self.layout is not None:
            records["layout"] = record_of_layout(self.layout)
        return records

    @classmethod
    def from_records(cls, records: RecordDict) -> TrainRequest:
        """Read and check the request in a message's content. The server may be hostile."""
        try:
            fields: dict[str, Any] = {"receipts": [], **records.config_records[RECORD]}
            frame = b"" if fields["kind"] == "none" else frame_in(records, str(fields["kind"]))
            about = records.config_records.get("layout")
            layout = None if about is None else layout_from_record(about)
            request = cls(**fields, frame=frame, layout=layout)
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as problem:
            why = printable(f"{type(problem).__name__}: {problem}")
            raise RefusedRequest(f"the server's request cannot be read ({why})") from None
        check_values(request)
        return request


def check_values(request: TrainRequest) -> None:
    """Raise :class:`RefusedRequest` unless every field has a value that a correct server sends."""
    numbers = (request.round, request.batch_size, request.memories, *request.cohort)
    ids = (request.run, request.state, *request.receipts)
    seconds, layout = request.seconds, request.layout
    checks = {
        "a number": all(type(n) is int and 0 <= n < 2**63 for n in numbers),
        "an id": all(type(x) is bytes and len(x) == ID_BYTES for x in ids),
        "the seed": type(request.seed) is int,
        "the algorithm": type(request.algorithm) is str,
        "the weights": request.weights in get_args(Weights),
        "the weight's name": type(request.weight_key) is str,
        "the time": type(seconds) in (int, float) and 0 < seconds < MAX_SECONDS,
        # Clients allocate memory for a layout, so its size must be that of the state in the frame.
        "the layout": layout is None or 0 < layout.d * layout.dtype.itemsize < len(request.frame),
    }
    for what, is_valid in checks.items():
        if not is_valid:
            raise RefusedRequest(f"the server's request is malformed: {what} has an invalid value")


OWN_RECORDS = ("frame", "layout")
"""Fields of a request that are records of their own."""


@dataclass(frozen=True)
class TrainReply:
    """A client's update, its metrics, or the reason why it sends neither.

    ``behind``: the client does not hold the state that a delta starts from. ``absent``: it is not
    in the cohort. ``failed``: its training raised an error, given in ``reason``. ``metrics`` are
    the numbers that the client's own code measured. ``evaluates`` says whether the client can
    evaluate a model.
    """

    client: int
    outcome: Outcome
    loss: float = 0.0
    reason: str = ""
    frame: bytes = b""
    metrics: Mapping[str, float] = field(default_factory=dict)
    evaluates: bool = False

    def to_records(self) -> RecordDict:
        """Return the content of the message. Its metrics are named as in Flower's examples."""
        fields: dict[str, Any] = {"client": self.client, "outcome": self.outcome}
        fields["reason"] = self.reason[:MAX_REASON_LENGTH]
        fields["evaluates"] = self.evaluates
        loss = {} if self.outcome == "evaluated" else {"train_loss": self.loss}
        metrics = MetricRecord({**self.metrics, **loss})
        arrays = ArrayRecord({"update": array_of_frame(self.frame)} if self.frame else {})
        return RecordDict({RECORD: ConfigRecord(fields), "metrics": metrics, "frame": arrays})

    @classmethod
    def from_records(cls, records: RecordDict) -> TrainReply:
        """Read and check the reply in a message's content. The client may be hostile."""
        try:
            fields = records.config_records[RECORD]
            client, outcome, reason = fields["client"], fields["outcome"], fields["reason"]
            metrics = records.metric_records["metrics"]
            loss = 0.0 if outcome == "evaluated" else metrics["train_loss"]
            frame = frame_in(records, "update") if outcome == "update" else b""
        except (KeyError, TypeError, AttributeError) as problem:
            raise MalformedReply(f"its reply lacks {problem}") from None
        if type(client) is not int or type(reason) is not str or type(loss) is not float:
            raise MalformedReply("its reply has values of the wrong type")
        if outcome not in OUTCOMES:
            raise MalformedReply(f"its reply has the unknown outcome {str(outcome)[:20]!r}")
        if outcome == "update" and len(frame) <= CHECKSUM_BYTES:
            raise MalformedReply("its frame is empty")
        evaluates = fields.get("evaluates") is True
        numbers = numbers_in(metrics)
        return cls(client, outcome, loss, printable(reason), frame, numbers, evaluates)


def numbers_in(metrics: MetricRecord) -> dict[str, float]:
    """Return the finite numbers among a client's metrics; lists and other values are left out.

    >>> numbers_in(MetricRecord({"accuracy": 0.5, "loss": float("nan"), "all": [1.0, 2.0]}))
    {'accuracy': 0.5}
    """
    if len(metrics) > MAX_METRICS:
        raise MalformedReply(f"its reply has more than {MAX_METRICS} metrics")
    return {
        printable(name): float(x)
        for name, x in metrics.items()
        if isinstance(x, int | float) and math.isfinite(x)
    }


def printable(text: str) -> str:
    r"""Return the first characters of a client's text, on one line and safe for a terminal.

    >>> printable("no\x1b[2J\nspace left")
    'no [2J space left'
    """
    return "".join(c if c.isprintable() else " " for c in text[:MAX_REASON_LENGTH])


def joined(frames: Sequence[bytes]) -> bytes:
    """Return several frames as one, each after its length.

    >>> joined([b"ab", b"c"]).hex(" ", 1)
    '02 00 00 00 61 62 01 00 00 00 63'
    """
    return b"".join(len(frame).to_bytes(4, "little") + frame for frame in frames)


def split(frames: bytes) -> list[bytes]:
    """Return the frames that :func:`joined` has joined.

    >>> split(joined([b"ab", b"c"]))
    [b'ab', b'c']
    """
    found, at = [], 0
    while at < len(frames):
        end = at + 4 + int.from_bytes(frames[at : at + 4], "little")
        found.append(frames[at + 4 : end])
        at = end
    return found


def array_of_frame(frame: bytes) -> Array:
    """Return a frame as the array in which Flower transports it."""
    return Array(dtype="uint8", shape=(len(frame),), stype=STYPE, data=frame)


def frame_in(records: RecordDict, name: str) -> bytes:
    """Return the frame of that name in a message's content."""
    array = records.array_records["frame"][name]
    if array.stype != STYPE:
        raise MalformedReply(f"its frame is of the serialization type {array.stype[:20]!r}")
    return array.data
