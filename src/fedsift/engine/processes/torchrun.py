"""The engine over processes that torchrun started, on one machine or on several.

Rank 0 runs the rounds and writes the run folder. The clients of a cohort are dealt to the ranks
round-robin. Each rank trains its share with its device's engine and sends frames. Rank 0 takes them
in the cohort's order, so the result does not depend on the number of ranks. Bytes travel as tensors
over gloo, which needs no GPU.
"""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fedsift.algorithms.method import Algorithm, Memory
from fedsift.engine.client import Trainer
from fedsift.engine.contract import ClientResult, Engine, Job, Results
from fedsift.engine.processes.messages import (
    FAILURES,
    Message,
    checked,
    failure_message,
    result_from_message,
    result_to_message,
)
from fedsift.engine.scoring import Score, num_chunks, total_score
from fedsift.errors import Diverged, WorkerDied
from fedsift.task import Task
from fedsift.task.threads import one_thread
from fedsift.vector import State

TIMEOUT = timedelta(minutes=15)
"""A rank that is silent for this long counts as lost. A rank that ends is noticed immediately."""
MAX_PENDING_RESULTS = 2
"""Results that may be in transit while a rank trains the next client."""


def rank() -> int:
    """Return the rank of this process; 0 if torchrun did not start it."""
    return int(os.environ.get("RANK", 0)) if ranks() > 1 else 0


def ranks() -> int:
    """Return the number of processes that torchrun started; 1 if it did not start this one."""
    return int(os.environ.get("WORLD_SIZE", 1)) if "TORCHELASTIC_RUN_ID" in os.environ else 1


@contextmanager
def process_group() -> Iterator[None]:
    """Connect the ranks that torchrun started."""
    if ranks() == 1:
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    if rank() == 0:
        signal.signal(signal.SIGTERM, raise_worker_died)
    else:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 handles Ctrl-C
    try:
        dist.init_process_group("gloo", timeout=TIMEOUT)
    except dist.DistError as problem:
        raise WorkerDied(f"the ranks could not connect to each other: {problem}") from None
    try:
        yield
    finally:
        dist.destroy_process_group()


def raise_worker_died(number: int, frame: FrameType | None) -> None:
    """Handle SIGTERM, which torchrun sends to every rank when one of them has ended."""
    signal.signal(number, signal.SIG_IGN)
    raise WorkerDied("torchrun stopped this run, on request or because another rank ended")


class RankChannel:
    """The channel to another rank."""

    def __init__(self, other: int) -> None:
        self.other, self.name = other, f"rank {other}"
        self.pending_replies = 0
        """Replies still to come, unless one of them reports a failure."""
        self.sent: deque[tuple[Any, ...]] = deque()

    def send_bytes(self, content: bytes) -> None:
        """Send bytes without waiting until they have arrived."""
        size = torch.tensor([len(content)])
        body = torch.frombuffer(bytearray(content or b"\0"), dtype=torch.uint8)
        with rank_errors(self.name):
            works = [dist.isend(x, self.other) for x in (size, body)]
            self.sent.append((works, size, body))  # keeps the memory in transit alive
            while len(self.sent) > 3 * MAX_PENDING_RESULTS:
                for work in self.sent.popleft()[0]:
                    work.wait()

    def recv_bytes(self) -> bytes:
        """Wait for the next bytes and return them."""
        size = torch.zeros(1, dtype=torch.int64)
        with rank_errors(self.name):
            dist.recv(size, self.other)
            body = torch.empty(max(1, int(size)), dtype=torch.uint8)
            dist.recv(body, self.other)
        return body.numpy().tobytes()[: int(size)]

    def next_reply(self) -> Message:
        """Return the next of the pending replies."""
        message = Message.receive(self)
        self.pending_replies = 0 if message.fields.keys() & FAILURES else self.pending_replies - 1
        return message

    def flush(self) -> None:
        """Wait until everything that was sent has arrived."""
        with rank_errors(self.name):
            while self.sent:
                for work in self.sent.popleft()[0]:
                    work.wait()


@contextmanager
def rank_errors(name: str) -> Iterator[None]:
    """Raise WorkerDied if a rank cannot be reached."""
    try:
        yield
    except RuntimeError as problem:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the finished rounds must still be saved
        reason = "does not answer" if "imed out" in str(problem) else "ended unexpectedly"
        raise WorkerDied(f"{name} {reason}") from None


class Torchrun:
    """Rank 0's engine: deals the cohort and the test set to all ranks."""

    def __init__(self, local: Engine, task: Task) -> None:
        self.local, self.task = local, task
        self.trainer = Trainer(task)
        self.others = [RankChannel(other) for other in range(1, ranks())]

    def train(self, job: Job) -> Iterator[ClientResult]:
        """Yield the result of each client in the cohort, in order."""
        for channel in self.others:
            share = job.cohort[channel.other :: ranks()]
            about = {"round": job.round, "weights": job.weights, "clients": share}
            Message({"do": "train", **about}, joined_memory(job, share)).send(channel)
            channel.pending_replies = len(share)
        broadcast(*job.state)
        local = in_cohort_order(self.local, replace(job, cohort=job.cohort[:: ranks()]))
        try:
            for place, client in enumerate(job.cohort):
                turn = place % ranks()
                if turn == 0:
                    yield next(local)
                else:
                    reply = checked(self.others[turn - 1].next_reply())
                    yield result_from_message(reply, client, self.task)
        except Diverged:
            for channel in self.others:
                while channel.pending_replies:
                    channel.next_reply()
            raise

    def evaluate(self, w: Tensor) -> tuple[float | None, float | None]:
        """Return accuracy (for class labels) and mean loss on the test set."""
        if w.is_cuda:
            return self.local.evaluate(w)
        for channel in self.others:
            Message({"do": "score"}).send(channel)
        broadcast(w)
        by_rank = [score_share(self.trainer, w)]
        by_rank += [checked(Message.receive(other)).fields["scores"] for other in self.others]
        chunks = range(num_chunks(self.task))
        in_order = [by_rank[chunk % ranks()][chunk // ranks()] for chunk in chunks]
        return total_score(self.task, [(correct, loss) for correct, loss in in_order])

    def end(self) -> None:
        """End the service of the other ranks."""
        for channel in self.others:
            Message({"do": "end"}).send(channel)
            channel.flush()


def in_cohort_order(engine: Engine, job: Job) -> Iterator[ClientResult]:
    """Yield an engine's results one by one in the cohort's order."""
    replies = engine.train(job)
    ready: dict[int, ClientResult] = {}
    for client in job.cohort:
        while client not in ready:
            reply = next(replies)
            assert isinstance(reply, ClientResult | Results)
            results = [reply] if isinstance(reply, ClientResult) else reply
            ready.update((result.client, result) for result in results)
        yield ready.pop(client)


def broadcast(*tensors: Tensor) -> list[Tensor]:
    """Return rank 0's tensors on every rank."""
    on_cpu = [x.detach().cpu().contiguous() for x in tensors]
    with rank_errors("another rank"):
        for x in on_cpu:
            dist.broadcast(x, 0)
    return [x.to(old.device) for x, old in zip(on_cpu, tensors, strict=True)]


def joined_memory(job: Job, clients: tuple[int, ...]) -> Memory:
    """Return the memories of the given clients as one dict; names start with the client."""
    return {f"{n}/{name}": x for n in clients for name, x in job.memory[n].items()}


def score_share(trainer: Trainer, w: Tensor) -> list[Score]:
    """Return the scores of this rank's chunks of the test set."""
    with one_thread():
        chunks = range(num_chunks(trainer.task))[rank() :: ranks()]
        return [trainer.score(w, chunk) for chunk in chunks]


class Follower:
    """Any other rank: does what rank 0 requests until rank 0 ends the service."""

    def __init__(self, local: Engine, task: Task, algorithm: Algorithm) -> None:
        self.local, self.task, self.algorithm = local, task, algorithm
        self.trainer, self.channel = Trainer(task), RankChannel(0)

    def serve(self) -> None:
        """Answer messages. Exceptions are sent as replies."""
        while (message := Message.receive(self.channel)).fields["do"] != "end":
            try:
                self.answer(message)
            except WorkerDied:
                raise
            except Exception as problem:
                failure_message(problem).send(self.channel)
            self.channel.flush()

    def answer(self, message: Message) -> None:
        """Train or score, and send the results."""
        if message.fields["do"] == "score":
            (w,) = broadcast(self.task.layout.read(self.task.model))
            Message({"scores": score_share(self.trainer, w)}).send(self.channel)
            return
        job, layout, name = self.receive_job(message), self.task.layout, self.algorithm.name
        for result in in_cohort_order(self.local, job):
            result_to_message(result, layout, name, job.round).send(self.channel)

    def receive_job(self, message: Message) -> Job:
        """Return the job that a message of rank 0 begins."""
        round, clients = message.fields["round"], tuple(message.fields["clients"])
        names = self.algorithm.state
        state = State.of(names, broadcast(*(self.empty_vector(name) for name in names)))
        memory: dict[int, dict[str, Tensor]] = {n: {} for n in clients}
        for key, x in message.tensors.items():
            n, name = key.split("/")
            memory[int(n)][name] = x.to(state.w.device)
        weights = message.fields["weights"]
        return Job(round, self.algorithm.phase(round), state, clients, memory, weights)

    def empty_vector(self, name: str) -> Tensor:
        """Return memory for one vector of the state."""
        layout = self.task.layout
        return torch.empty(layout.length(name), dtype=layout.dtype, device=self.task.device)
