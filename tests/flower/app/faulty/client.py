"""A client with faults: the file FOLDER/faults/ROUND-CLIENT names what it does wrong."""

import os
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from flwr.app import Message
from flwr.clientapp import ClientApp

from faulty.task import load_data, make_algorithm, make_model, note
from fedsift.codec.frame import Spec, checksum, decode, encode
from fedsift.flower.client import client_app
from fedsift.flower.protocol import TrainReply, TrainRequest
from fedsift.flower.secure_client import SecureQuery
from fedsift.privacy.secure.messages import Reader, SecureStage
from fedsift.vector import Layout

app = ClientApp()


@app.train()
def train(message, context):
    request = TrainRequest.from_records(message.content)
    client, folder = context.node_config["partition-id"], context.run_config["folder"]
    path = Path(folder) / "faults" / f"{request.round}-{client}"
    fault = path.read_text() if path.exists() else ""

    def data(partition, partitions):
        note(folder, f"begun-{request.round}-{client}")
        if fault == "raise":
            raise RuntimeError("the disk is full of eels")
        if fault == "hang":
            time.sleep(3600)
        if fault == "pause":
            time.sleep(1)
        if fault.startswith("clock"):
            set_clock(float(fault.split()[1]))
        return load_data(partition, partitions)

    secure = bool(context.run_config["secure"])
    honest = client_app(make_model, data, make_algorithm, secure=secure)
    reply = honest(message, context)
    sent, last = TrainReply.from_records(reply.content), Path(folder) / f"last-{client}"
    if sent.outcome != "update":
        return reply
    if fault == "replay":
        sent = replace(sent, frame=last.read_bytes())
    elif fault in TAMPER:
        sent = replace(sent, frame=TAMPER[fault](sent.frame, request))
    else:
        last.write_bytes(sent.frame)
    return Message(content=sent.to_records(), reply_to=message)


@app.query()
def query(message, context):
    """Answer secure aggregation; with the fault "masked", hang once the values are masked."""
    client, folder = context.node_config["partition-id"], context.run_config["folder"]
    header = Reader(SecureQuery.from_records(message.content).request).header()
    path = Path(folder) / "faults" / f"{header.round}-{client}"
    is_faulty = path.exists() and path.read_text() == "masked"
    if is_faulty and header.stage is SecureStage.CONSENT:
        note(folder, f"masked-{header.round}-{client}")
        time.sleep(3600)
    return client_app(make_model, load_data, make_algorithm, secure=True)(message, context)


def set_clock(seconds):
    """Let Flower's clock in this process, which serves one message, differ from the others'."""
    from flwr.supercore import date

    own = date.now
    for module in list(sys.modules.values()):
        if vars(module).get("now") is own:
            module.now = lambda: datetime.now(UTC) + timedelta(seconds=seconds)


def garbage(frame, request):
    return os.urandom(len(frame))


def corrupt(frame, request):
    return frame[:40] + bytes([frame[40] ^ 1]) + frame[41:]


def of_another_round(frame, request):
    layout = Layout.of(make_model())
    spec = Spec(layout, request.algorithm.split("(")[0].replace("_", "-"), request.round - 1,
                request.cohort[0], request.run, request.state)  # fmt: skip
    return encode(decode(frame, layout), spec)


def with_nan(frame, request):
    body = frame[:-12] + b"\x00\x00\xc0\x7f"  # the last value of V becomes NaN
    return body + checksum(body)


TAMPER = {"garbage": garbage, "corrupt": corrupt, "round": of_another_round, "nan": with_nan}
