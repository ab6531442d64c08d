"""The server alone: frames of 1,000 clients per round against dense updates and Flower's FedAvg.

python benchmarks/flower/load.py

Run it while nothing else runs; it takes some minutes and 4 GiB. It ends with the tables for
docs/how-to/flower.md.

Replies travel over a TCP socket on 127.0.0.1, as the objects in which Flower stores and transmits a
message: a process sends them, this one receives, inflates and merges them. SuperLink and its HTTP
requests are not part of it; they cost the same number of requests for a frame, and more for a dense
update. The sparse updates are what fedsift's server does with a round: ``RemoteEngine``,
``Exchange`` and ``Federation.run_round``. The dense updates are float32 arrays, one per layer, in
an ``ArrayRecord``, inflated with Flower's function and averaged by ``FedAvg.aggregate_train``.
Flower needs all replies in memory, so there are fewer of them.

Both are measured in turn. CPU seconds of the steps are those of the threads that do them. Besides
the ratio of wall times there is one of CPU times, which other processes hardly disturb.
"""

from __future__ import annotations

import argparse
import logging
import os
import pkgutil
import resource
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Message,
    MessageType,
    Metadata,
    MetricRecord,
    RecordDict,
)
from flwr.app.message import make_message
from flwr.serverapp.strategy import FedAvg, Result
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from measure import write
from torch import nn

from fedsift import algorithms
from fedsift.algorithms.method import Algorithm
from fedsift.codec import Update, encode, sparse, state_hash
from fedsift.codec.threads import usable_cores
from fedsift.federation.snapshot import Snapshot
from fedsift.flower.deployment import Deployment
from fedsift.flower.engine import RemoteEngine
from fedsift.flower.exchange import Exchange
from fedsift.flower.protocol import TrainReply
from fedsift.flower.pull import ReplyDownload, decode_reply
from fedsift.flower.requests import RoundRequests
from fedsift.selection.masks import top_k
from fedsift.task import RemoteClients, Task
from fedsift.vector import Layout

D, DENSITY, LAYERS, DISTINCT = 10_000_000, 0.01, 20, 16
CASES: dict[str, tuple[Callable[..., Algorithm], str]] = {
    "W": (algorithms.sparse_fedsgd, "w"),
    "W, M and V": (algorithms.fedadam_ssm, "wmv"),
}
Objects = tuple[str, dict[str, bytes]]
"""A message's id, and its objects as Flower transmits them."""


def objects_of(content: RecordDict, number: int) -> Objects:
    """A client's reply as the objects that its SuperNode uploads."""
    about = Metadata(
        run_id=1, message_id="", src_node_id=number + 1, dst_node_id=1, group_id="1", ttl=600.0,
        message_type=MessageType.TRAIN, reply_to_message_id=str(number), created_at=time.time(),
    )  # fmt: skip
    message = make_message(metadata=about, content=content)
    found = get_all_nested_objects(message)
    return message.object_id, {id: each.deflate() for id, each in found.items()}


class Sender:
    """A process that sends prepared replies over a socket whenever it is asked to."""

    def __init__(self, replies: Callable[[], Iterable[Objects]], times: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            arguments = (listener.getsockname(), replies, times)
            self.process = get_context("fork").Process(target=send_when_asked, args=arguments)
            self.process.start()
            self.near, _ = listener.accept()
        self.near.recv(1)  # ready

    def replies(self) -> Iterator[Objects]:
        """Receive each reply when it is asked for."""
        self.near.sendall(b"go")
        (count,) = struct.unpack("<q", self.receive(8))
        for _ in range(count):
            yield self.reply()

    def reply(self) -> Objects:
        root, contents = self.receive(64).decode(), {}
        (count,) = struct.unpack("<q", self.receive(8))
        for _ in range(count):
            id, size = struct.unpack("<64sq", self.receive(72))
            contents[id.decode()] = self.receive(size)
        return root, contents

    def receive(self, size: int) -> bytes:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            if not (got := self.near.recv_into(view)):
                raise ConnectionError("the sender is gone")
            view = view[got:]
        return bytes(data)

    def close(self) -> None:
        self.near.close()
        self.process.kill()
        self.process.join()


def send_when_asked(
    address: tuple[str, int], replies: Callable[[], Iterable[Objects]], times: int
) -> None:
    prepared = list(replies())
    with socket.create_connection(address) as far:
        far.sendall(b"r")
        while far.recv(2):
            far.sendall(struct.pack("<q", times * len(prepared)))
            for root, contents in prepared * times:
                far.sendall(root.encode() + struct.pack("<q", len(contents)))
                for id, content in contents.items():
                    far.sendall(struct.pack("<64sq", id.encode(), len(content)))
                    far.sendall(content)


@dataclass
class Stopwatch:
    """CPU seconds per step, over all threads. A step within a step counts only for itself."""

    seconds: Counter[str]

    @contextmanager
    def steps(self, **functions: str) -> Iterator[None]:
        """Time the functions with these dotted names while the block runs."""
        patches = [self.timed(step, path) for step, paths in functions.items() for path in
                   paths.split()]  # fmt: skip
        for each in patches:
            each.start()
        try:
            yield
        finally:
            for each in patches:
                each.stop()

    def timed(self, step: str, path: str) -> Any:
        place, _, name = path.rpartition(".")
        original = getattr(pkgutil.resolve_name(place), name)

        def measured(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            try:
                return original(*args, **kwargs)
            finally:
                self.seconds[step] += time.thread_time() - began

        return patch(path, measured)


STEPS = {
    "receive": "__main__.Sender.reply",
    "inflate": "__main__.decode_reply fedsift.flower.exchange.read_reply",
    "header_and_checksum": "fedsift.codec.frame.parse_expected_frame",
    "indices": "fedsift.codec.index.Entropy.decode",
    "values": "fedsift.codec.values.Float.unpack fedsift.codec.frame.require_bounded",
    "norms": "fedsift.federation.norm_bound.norms_of",
    "sum": "fedsift.codec.update.add_to",
    "broadcast": "fedsift.federation.round.Federation.broadcast",
}


class NoGrid:
    """Stands where Flower's grid would be: no message is sent in this benchmark."""

    def get_node_ids(self) -> list[int]:
        return []


@dataclass
class Server:
    """fedsift's server in a round of many clients, with its sender."""

    clients: int
    algorithm: Algorithm
    roles: str

    def __post_init__(self) -> None:
        shapes = ((D // LAYERS,),) * LAYERS
        layout = Layout(tuple(f"layer{n}" for n in range(LAYERS)), shapes, torch.float32)
        loss, clients = nn.functional.cross_entropy, RemoteClients(self.clients, {})
        task = Task(nn.Module(), loss, clients, None, 64, 0, layout)
        self.engine = RemoteEngine(None, None, Result())
        self.federation = Deployment(task, self.algorithm, self.engine)
        first = self.federation.initial_snapshot_from(torch.zeros(D))
        # After round 1 the norms of honest updates are known, and none is held back.
        update = self.update(0)
        norms = self.federation.norm_bound(first).norms_of(update)
        self.before = replace(first, round=1, norms=first.norms.after(norms))
        self.sender = Sender(self.prepared_replies, 1)

    def update(self, seed: int) -> Update:
        draw = torch.Generator().manual_seed(seed)
        x = torch.randn(1, D, generator=draw) * 0.01
        vectors = {"w": x, "m": x * 0.1, "v": x.square()}
        chosen = {role: vectors[role] for role in self.roles}
        return Update(sparse(chosen, top_k(x, round(DENSITY * D))), (64.0,))

    def prepared_replies(self) -> Iterator[Objects]:
        base, updates = state_hash(self.before.state), [self.update(n) for n in range(DISTINCT)]
        spec = replace(self.federation.frame_spec(self.before.round + 1, base))
        for n in range(self.clients):
            frame = encode(updates[n % DISTINCT], replace(spec, client=n))
            yield objects_of(TrainReply(n, "update", 0.5, frame=frame).to_records(), n)

    def messages(self, limit: int, memory: list[int]) -> Iterator[Message]:
        for root, contents in self.sender.replies():
            yield decode_reply(ReplyDownload(root, [], contents), limit)
            memory.append(resident())

    def round(self) -> tuple[Snapshot, list[int]]:
        """Run the round; return the snapshot after it, and the memory after each reply."""
        requests = RoundRequests(
            self.federation, self.before, {}, 600.0, ConfigRecord(), memories=1
        )
        memory: list[int] = []
        self.engine.exchange = Exchange(NoGrid(), requests, None)  # type: ignore[arg-type]
        self.engine.exchange.recipients = {str(n): n + 1 for n in range(self.clients)}
        self.engine.replies = self.messages(requests.max_reply_bytes, memory)
        after, report = self.federation.run_round(self.before)
        if report.clients != self.clients:
            raise RuntimeError(f"{report.clients} of {self.clients} merged: {report.problems}")
        return after, memory


def serial_sum(server: Server) -> Snapshot:
    """The same round without C, threads and inbox: the definition of the result."""
    federation, job = server.federation, server.federation.job_after(server.before)
    inbox = federation.open_inbox(job, server.before)
    with patch("fedsift.native.Library.load", lambda self: None):
        for n, (root, contents) in enumerate(server.sender.replies()):
            message = decode_reply(ReplyDownload(root, [], contents), 1 << 40)
            frame = TrainReply.from_records(message.content).frame
            limits = federation.upload_limits(job, state_hash(server.before.state))
            reply = type("Reply", (), {"client": n, "frame": frame})
            (part,) = federation.decode_upload(reply, limits).parts  # type: ignore[arg-type]
            for role, coded in part.values.items():
                inbox.total.total[role].index_add_(0, part.indices[0], 64.0 * coded.restore()[0])
            inbox.total.weight += 64.0
            inbox.merged += 1
    return federation.broadcast(replace(server.before, round=job.round), job.phase, inbox)[0]


def dense_reply(number: int, roles: str) -> Objects:
    """One of Flower's own replies: the arrays of all layers, for each vector."""
    draw = np.random.default_rng(number)
    arrays = ArrayRecord({
        f"{role}.layer{n}": Array(draw.standard_normal(D // LAYERS, dtype=np.float32))
        for role in roles for n in range(LAYERS)
    })  # fmt: skip
    metrics = MetricRecord({"num-examples": 64.0, "train_loss": 0.5})
    return objects_of(RecordDict({"arrays": arrays, "metrics": metrics}), number)


def fedavg_round(sender: Sender, watch: Stopwatch) -> int:
    """Receive, inflate and average dense replies; return their number."""
    replies = []
    for root, contents in sender.replies():
        began = time.thread_time()
        replies.append(inflate_object_from_contents(root, contents))
        watch.seconds["inflate"] += time.thread_time() - began
    began = time.thread_time()
    arrays, _ = FedAvg().aggregate_train(1, replies)
    watch.seconds["average"] += time.thread_time() - began
    if arrays is None:
        raise RuntimeError("FedAvg did not average")
    return len(replies)


def resident() -> int:
    """This process's memory in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@dataclass
class Timed:
    """What one round took."""

    replies: int
    seconds: float
    cpu: float
    steps: dict[str, float]

    @classmethod
    def of(cls, work: Callable[[Stopwatch], int]) -> Timed:
        watch = Stopwatch(Counter())
        began, cpu = time.perf_counter(), time.process_time()
        replies = work(watch)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        each = {name: round(1e3 * x / replies, 3) for name, x in watch.seconds.items()}
        return cls(replies, seconds, cpu, each)


def compare(clients: int, dense_clients: int, repeats: int, case: str) -> dict[str, Any]:
    """Measure one case: rounds of both servers in turn."""
    make, roles = CASES[case]
    server = Server(clients, make(density=DENSITY), roles)
    distinct = 4
    prepared = [dense_reply(n, roles) for n in range(distinct)]
    dense = Sender(lambda: prepared, dense_clients // distinct)
    after, memories, sifted, averaged = None, [], [], []

    def sift_round(watch: Stopwatch) -> int:
        nonlocal after
        with watch.steps(**STEPS):
            after, memory = server.round()
        memories.append(memory)
        return clients

    def dense_round(watch: Stopwatch) -> int:
        with watch.steps(receive=STEPS["receive"]):
            return fedavg_round(dense, watch)

    try:
        server.round()  # touches the memory once
        for _ in range(repeats):
            sifted.append(Timed.of(sift_round))
            averaged.append(Timed.of(dense_round))
            print(case, sifted[-1], averaged[-1], sep="\n", flush=True)
        assert after is not None
        same = state_hash(after.state) == state_hash(serial_sum(server).state)
    finally:
        server.sender.close()
        dense.close()
    return summary(sifted, averaged, memories, same, prepared[0])


def summary(
    sifted: list[Timed], averaged: list[Timed], memories: list[list[int]], same: bool,
    dense: Objects,
) -> dict[str, Any]:  # fmt: skip
    """The medians of all rounds."""
    mib, memory = 2**20, memories[-1]
    quarter = len(memory) // 4
    return {
        "fedsift": described(sifted),
        "fedavg": {**described(averaged), "bytes_per_reply": sum(map(len, dense[1].values()))},
        "times_the_throughput": ratio(sifted, averaged, lambda t: t.seconds),
        "times_fewer_cpu_seconds": ratio(sifted, averaged, lambda t: t.cpu),
        "memory_mib_by_quarter": [round(max(memory[n * quarter:(n + 1) * quarter]) / mib)
                                  for n in range(4)],
        "same_bits_as_the_serial_sum": same,
    }  # fmt: skip


def described(rounds: list[Timed]) -> dict[str, Any]:
    steps = {name: median(each.steps[name] for each in rounds) for name in rounds[0].steps}
    return {
        "replies_per_round": rounds[0].replies,
        "frames_per_second": round(median(r.replies / r.seconds for r in rounds), 1),
        "wall_ms_per_reply": round(median(1e3 * r.seconds / r.replies for r in rounds), 3),
        "cpu_ms_per_reply": round(median(1e3 * r.cpu / r.replies for r in rounds), 3),
        "cpu_ms_per_reply_by_step": steps,
    }


def ratio(sifted: list[Timed], averaged: list[Timed], of: Callable[[Timed], float]) -> float:
    """The median over the repeats of the ratio of times per reply."""
    pairs = zip(sifted, averaged, strict=True)
    return round(median(of(b) / b.replies / (of(a) / a.replies) for a, b in pairs), 2)


def tables(cases: dict[str, dict[str, Any]]) -> Iterator[str]:
    """The rows of the two tables in the documentation."""
    for case, found in cases.items():
        rates = [found[name]["frames_per_second"] for name in ("fedsift", "fedavg")]
        ratios = [found[name] for name in ("times_the_throughput", "times_fewer_cpu_seconds")]
        yield " | ".join([case, *(f"{x:.1f}" for x in rates + ratios)])
    for case, found in cases.items():
        steps = found["fedsift"]["cpu_ms_per_reply_by_step"]
        yield " | ".join([case, *(f"{steps[name]:.2f}" for name in STEPS)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--dense-clients", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--name", default="load.json")
    options = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    busy = os.getloadavg()[0]
    found = {
        case: compare(options.clients, options.dense_clients, options.repeats, case)
        for case in CASES
    }
    write(options.name, {
        "parameters": D, "density": DENSITY, "layers": LAYERS, "repeats": options.repeats,
        "cores": usable_cores(), "load_average": [busy, os.getloadavg()[0]], "cases": found,
    })  # fmt: skip
    print(*tables(found), sep="\n")


if __name__ == "__main__":
    main()
