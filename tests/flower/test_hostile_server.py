"""Whatever a server sends, a client trains or refuses it in one line, and writes only its file."""

import random
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from fedsift.flower import client_app, client_round
from fedsift.flower.protocol import RECORD, RefusedRequest, TrainRequest, array_of_frame

FUZZ = Path(__file__).parents[2] / "fuzz"
sys.path.append(str(FUZZ))
import check_request  # noqa: E402


@pytest.mark.parametrize("case", sorted((FUZZ / "requests").iterdir()), ids=lambda case: case.name)
def test_the_corpus_is_answered(case):
    assert check_request.check(case.read_bytes())


def test_some_seconds_of_random_requests_are_answered():
    draw, until, found = random.Random(1), time.monotonic() + 2, []
    for _ in range(200):
        if time.monotonic() < until:
            found += check_request.check(draw.randbytes(draw.choice([8, 60, 200])))
    assert {"update", "failed"} <= set(found)


def request_with(**changed):
    """The content of the first round's request, with other fields."""
    _, first, _ = check_request.server()
    content = check_request.requests_of(first).message_to(7).content
    return RecordDict({
        RECORD: ConfigRecord({**content.config_records[RECORD], **changed}),
        "frame": content.array_records["frame"], "config": content.config_records["config"],
    })  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"run": b"../../etc"}, "an id"),
        ({"run": 1.5}, "an id"),
        ({"state": b""}, "an id"),
        ({"round": -1}, "a number"),
        ({"cohort": ["0"]}, "a number"),
        ({"seed": "0"}, "the seed"),
        ({"seconds": float("nan")}, "the time"),
        ({"seconds": float("inf")}, "the time"),
        ({"weights": "heavy"}, "the weights"),
        ({"algorithm": b"sift"}, "the algorithm"),
        ({"kind": "tree"}, "cannot be read"),
        ({"surprise": 1}, "cannot be read"),
        ({"weight_key": 5}, "the weight's name"),
    ],
    ids=str,
)
def test_a_malformed_request_is_refused(changed, said):
    with pytest.raises(RefusedRequest, match=said) as refusal:
        TrainRequest.from_records(request_with(**changed))
    assert str(refusal.value).isprintable()


@pytest.mark.parametrize("shapes", [["1099511627776"], ["65536,65536", "3"], ["-1"], ["x"], []])
def test_a_layout_that_is_larger_than_its_state_is_refused(shapes):
    content = request_with()
    names = [f"p{n}" for n in range(len(shapes))]
    about = {"shapes": shapes, "names": names, "parameters": len(shapes), "dtype": "float32"}
    content["layout"] = ConfigRecord(about)
    with pytest.raises(RefusedRequest, match=r"the layout|cannot be read"):
        TrainRequest.from_records(content)


def refused(content, monkeypatch, tmp_path):
    """Why a client refuses a request; it logs one line, and writes nothing."""
    lines = []
    monkeypatch.setattr(client_round, "log", lambda level, text, *args: lines.append(text % args))
    _, first, _ = check_request.server()
    message = check_request.requests_of(first).message_to(7)
    message.metadata.__dict__["_message_id"] = "1"
    message.content = content
    app = client_app(
        check_request.make_model, check_request.load_data, check_request.ALGORITHM,
        state_dir=tmp_path / "state",
    )  # fmt: skip
    assert check_request.outcome_of(app, message) == "failed"
    assert not list(tmp_path.iterdir())
    (line,) = lines
    assert line.isprintable()
    return line


def with_frame(change):
    content = request_with()
    (frame,) = content.array_records["frame"].values()
    content["frame"] = ArrayRecord({"full": array_of_frame(change(frame.data))})
    return content


def test_an_oversized_or_damaged_broadcast_is_refused_in_one_line(monkeypatch, tmp_path):
    too_large = with_frame(lambda frame: bytes(2 << 20))
    assert "too large for this model" in refused(too_large, monkeypatch, tmp_path)
    damaged = with_frame(lambda frame: frame[:-1] + b"x")
    assert "wrong checksum" in refused(damaged, monkeypatch, tmp_path)
    other = request_with(algorithm="rm -rf\n" * 100)
    assert "use the same algorithm" in refused(other, monkeypatch, tmp_path)
    assert "cannot be read" in refused(RecordDict(), monkeypatch, tmp_path)


def test_an_honest_broadcast_is_not_too_large():
    federation, first, _ = check_request.server()
    layout, algorithm = federation.task.layout, federation.algorithm
    sizes = [
        len(check_request.requests_of(first).full_frame),
        *map(len, federation.wire.frames.values()),
    ]
    assert max(sizes) < client_round.max_frame_bytes(algorithm, layout)
    request = TrainRequest.from_records(request_with())
    client_round.check_request(request, algorithm, layout)
    with pytest.raises(RefusedRequest, match="different parameters"):
        client_round.check_request(replace(request, run=bytes(8)), algorithm, layout)
