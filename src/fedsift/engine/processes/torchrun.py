"""The engine across processes that torchrun started, on one machine or on several.

Rank 0 plays the rounds and owns the run's folder; the others train what it asks them to. A cohort
is dealt to the ranks in turn. Each trains its share with the engine of its own device and sends
frames, which rank 0 takes in the cohort's order: the result does not depend on the number of ranks.
Bytes travel as tensors over gloo, which needs no GPU.
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
from fedsift.engine.client import Score, Trainer, chunks_of, one_thread, total_score
from fedsift.engine.contract import ClientResult, Engine, Job, Results
from fedsift.engine.processes.messages import (
    Message,
    checked,
    failure,
    message_of,
    result_of,
)
from fedsift.errors import Diverged, WorkerDied
from fedsift.task import (
    Task,
)
from fedsift.vector import Moments

PATIENCE = timedelta(minutes=15)
"""A rank that says nothing for so long is given up. One that ends is noticed at once."""
AHEAD = 2
"""Results that a rank has on their way while it trains on."""


def rank() -> int:
    """The rank of this process; 0 if torchrun did not start it."""
    return int(os.environ.get("RANK", 0)) if ranks() > 1 else 0


def ranks() -> int:
    """How many processes torchrun started; 1 if it did not start this one."""
    return int(os.environ.get("WORLD_SIZE", 1)) if "TORCHELASTIC_RUN_ID" in os.environ else 1


@contextmanager
def joined() -> Iterator[None]:
    """Inside, the ranks that torchrun started can talk to each other."""
    if ranks() == 1:
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    if rank() == 0:
        signal.signal(signal.SIGTERM, told_to_stop)
    else:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the rank that talks to people
    try:
        dist.init_process_group("gloo", timeout=PATIENCE)
    except dist.DistError as problem:
        raise WorkerDied(f"the ranks did not find each other: {problem}") from None
    try:
        yield
    finally:
        dist.destroy_process_group()


def told_to_stop(number: int, frame: FrameType | None) -> None:
    """Torchrun ends every rank when one of them ended."""
    signal.signal(number, signal.SIG_IGN)
    raise WorkerDied("torchrun stopped this run: another rank ended, or it was told to")


class Far:
    """The line to another rank."""

    def __init__(self, other: int) -> None:
        self.other, self.name = other, f"rank {other}"
        self.owes = 0
        """Answers that are to come, unless one of them says that there will be no more."""
        self.sent: deque[tuple[Any, ...]] = deque()

    def send_bytes(self, content: bytes) -> None:
        """Send some bytes, and go on before they have arrived."""
        size = torch.tensor([len(content)])
        body = torch.frombuffer(bytearray(content or b"\0"), dtype=torch.uint8)
        with heard(self.name):
            works = [dist.isend(x, self.other) for x in (size, body)]
            self.sent.append((works, size, body))  # what is under way must stay in memory
            while len(self.sent) > 3 * AHEAD:
                for work in self.sent.popleft()[0]:
                    work.wait()

    def recv_bytes(self) -> bytes:
        """Wait for the next bytes."""
        size = torch.zeros(1, dtype=torch.int64)
        with heard(self.name):
            dist.recv(size, self.other)
            body = torch.empty(max(1, int(size)), dtype=torch.uint8)
            dist.recv(body, self.other)
        return body.numpy().tobytes()[: int(size)]

    def answer(self) -> Message:
        """The next of the answers that it owes."""
        message = Message.receive(self)
        self.owes = 0 if message.words.keys() & {"diverged", "failed"} else self.owes - 1
        return message

    def flush(self) -> None:
        """Wait until everything that was sent has arrived."""
        with heard(self.name):
            while self.sent:
                for work in self.sent.popleft()[0]:
                    work.wait()


@contextmanager
def heard(who: str) -> Iterator[None]:
    """Inside, a rank that cannot be reached is told of in one line."""
    try:
        yield
    except RuntimeError as problem:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # what is done so far is still to be saved
        why = "does not answer" if "imed out" in str(problem) else "ended"
        raise WorkerDied(f"{who} {why}") from None


class Torchrun:
    """Rank 0's engine: deals the cohort and the test set to all ranks."""

    def __init__(self, here: Engine, task: Task) -> None:
        self.here, self.task = here, task
        self.trainer = Trainer(task)
        self.others = [Far(other) for other in range(1, ranks())]

    def train(self, job: Job) -> Iterator[ClientResult]:
        """Every cohort member's result, in the cohort's order."""
        for far in self.others:
            share = job.cohort[far.other :: ranks()]
            words = {"do": "train", "round": job.round, "clients": share}
            Message(words, joined_memory(job, share)).send(far)
            far.owes = len(share)
        broadcast(*job.state)
        own = one_by_one(self.here, replace(job, cohort=job.cohort[:: ranks()]))
        try:
            for place, client in enumerate(job.cohort):
                turn = place % ranks()
                if turn == 0:
                    yield next(own)
                else:
                    yield result_of(checked(self.others[turn - 1].answer()), client, self.task)
        except Diverged:
            for far in self.others:
                while far.owes:
                    far.answer()
            raise

    def evaluate(self, w: Tensor) -> tuple[float | None, float | None]:
        """Accuracy (for class labels) and mean loss on the test set."""
        if w.is_cuda:
            return self.here.evaluate(w)
        for far in self.others:
            Message({"do": "score"}).send(far)
        broadcast(w)
        by_rank = [score_share(self.trainer, w)]
        by_rank += [checked(Message.receive(far)).words["scores"] for far in self.others]
        in_order = [by_rank[n % ranks()][n // ranks()] for n in chunks_of(self.task)]
        return total_score(self.task, [(right, loss) for right, loss in in_order])

    def end(self) -> None:
        """Let the other ranks go."""
        for far in self.others:
            Message({"do": "end"}).send(far)
            far.flush()


def one_by_one(engine: Engine, job: Job) -> Iterator[ClientResult]:
    """An engine's results, one a client and in the cohort's order."""
    replies = engine.train(job)
    ready: dict[int, ClientResult] = {}
    for client in job.cohort:
        while client not in ready:
            reply = next(replies)
            assert isinstance(reply, ClientResult | Results)
            some = [reply] if isinstance(reply, ClientResult) else reply
            ready.update((each.client, each) for each in some)
        yield ready.pop(client)


def broadcast(*tensors: Tensor) -> list[Tensor]:
    """Rank 0's tensors, on every rank."""
    there = [x.detach().cpu().contiguous() for x in tensors]
    with heard("another rank"):
        for x in there:
            dist.broadcast(x, 0)
    return [x.to(old.device) for x, old in zip(there, tensors, strict=True)]


def joined_memory(job: Job, clients: tuple[int, ...]) -> Memory:
    """What the given clients keep, under names that say whose it is."""
    return {f"{n}/{name}": x for n in clients for name, x in job.memory[n].items()}


def score_share(trainer: Trainer, w: Tensor) -> list[Score]:
    """The scores of this rank's chunks of the test set."""
    with one_thread():
        return [trainer.score(w, n) for n in chunks_of(trainer.task)[rank() :: ranks()]]


class Follower:
    """Another rank's life: do what rank 0 says until it says no more."""

    def __init__(self, here: Engine, task: Task, algorithm: Algorithm) -> None:
        self.here, self.task, self.algorithm = here, task, algorithm
        self.trainer, self.far = Trainer(task), Far(0)

    def serve(self) -> None:
        """Answer message after message; what goes wrong is an answer, too."""
        while (message := Message.receive(self.far)).words["do"] != "end":
            try:
                self.answer(message)
            except WorkerDied:
                raise
            except Exception as problem:
                failure(problem).send(self.far)
            self.far.flush()

    def answer(self, message: Message) -> None:
        """Train or test, and send what comes of it."""
        if message.words["do"] == "score":
            (w,) = broadcast(self.like())
            Message({"scores": score_share(self.trainer, w)}).send(self.far)
            return
        job = self.job_of(message)
        for result in one_by_one(self.here, job):
            message_of(result, self.task.layout, self.algorithm.name, job.round).send(self.far)

    def job_of(self, message: Message) -> Job:
        """The job that a message of rank 0 begins."""
        round, clients = message.words["round"], tuple(message.words["clients"])
        state = Moments(*broadcast(self.like(), self.like(), self.like()))
        memory: dict[int, dict[str, Tensor]] = {n: {} for n in clients}
        for key, x in message.tensors.items():
            n, name = key.split("/")
            memory[int(n)][name] = x.to(state.w.device)
        return Job(round, self.algorithm.phase(round), state, clients, memory)

    def like(self) -> Tensor:
        """Room for one of W, M and V."""
        device = self.task.clients[0][0].device
        return torch.empty(self.task.layout.d, dtype=self.task.layout.dtype, device=device)
