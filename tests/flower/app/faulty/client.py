"""A client that reads from a file what to do wrong: FOLDER/faults/ROUND-CLIENT holds the word."""

import time
from dataclasses import replace
from pathlib import Path

from flwr.app import Message
from flwr.clientapp import ClientApp

from faulty.task import load_data, make_algorithm, make_model, note
from fedsift.codec.frame import Spec, checksum, decode, encode
from fedsift.flower.client import client_app
from fedsift.flower.protocol import TrainReply, TrainRequest
from fedsift.vector import Layout

app = ClientApp()


@app.train()
def train(message, context):
    order = TrainRequest.from_records(message.content)
    client, folder = context.node_config["partition-id"], context.run_config["folder"]
    path = Path(folder) / "faults" / f"{order.round}-{client}"
    fault = path.read_text() if path.exists() else ""

    def data(partition, partitions):
        note(folder, f"begun-{order.round}-{client}")
        if fault == "raise":
            raise RuntimeError("the disk is full of eels")
        if fault == "hang":
            time.sleep(3600)
        return load_data(partition, partitions)

    honest = client_app(make_model, data, make_algorithm)
    reply = honest(message, context)
    if fault in TAMPER:
        answer = TrainReply.from_records(reply.content)
        bad = replace(answer, frame=TAMPER[fault](answer.frame, order))
        return Message(content=bad.to_records(), reply_to=message)
    return reply


def corrupt(frame, order):
    return frame[:40] + bytes([frame[40] ^ 1]) + frame[41:]


def of_another_round(frame, order):
    layout = Layout.of(make_model())
    spec = Spec(layout, order.algorithm.split("(")[0].replace("_", "-"), order.round - 1,
                order.cohort[0], order.run, order.state)  # fmt: skip
    return encode(decode(frame, layout), spec)


def with_nan(frame, order):
    body = frame[:-12] + b"\x00\x00\xc0\x7f"  # the last of V's values is a NaN now
    return body + checksum(body)


TAMPER = {"corrupt": corrupt, "round": of_another_round, "nan": with_nan}
