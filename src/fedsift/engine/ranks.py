"""The CPU engine: one process a core, one thread each, clients in sequence on each.

The processes are forked once, with the data in memory that all of them share. What they send back
are frames, as on a network, so that nothing is pickled. Frames arrive in any order and are handed
on in the cohort's, which makes the result that of the reference engine, bit for bit.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import count
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from fedsift.algorithms.method import Algorithm
from fedsift.codec.frame import Spec, decode, encode
from fedsift.codec.limits import Limits
from fedsift.engine.local import Trainer, chunks_of, total_score
from fedsift.engine.message import Message, WorkerDied, checked
from fedsift.engine.reference import Reference
from fedsift.engine.task import ClientResult, Diverged, Job, Task
from fedsift.vector import Moments

WORTHWHILE = 0.25
"""Seconds of work in a round from which on other processes are worth their start."""


class Ranks:
    """Spreads a cohort over processes; work that is small stays in this one."""

    def __init__(self, task: Task, algorithm: Algorithm, processes: int | None = None) -> None:
        self.task, self.algorithm = task, algorithm
        self.processes = cores() if processes is None else processes
        self.here = Reference(task)
        self.pipes: list[Connection] = []

    def train(self, job: Job) -> Iterator[ClientResult]:
        """Every cohort member's result, in the cohort's order."""
        waiting = deque(job.cohort)
        if torch.cuda.is_available() and not self.pipes and len(waiting) > 1:
            self.start()  # now or never: beside a GPU, a process that trained cannot be forked
        while waiting and not self.pipes:
            began = time.perf_counter()
            yield from self.here.train(replace(job, cohort=(waiting.popleft(),)))
            if (time.perf_counter() - began) * len(waiting) > WORTHWHILE:
                self.start()
        if not waiting:
            return
        self._tell_all(Message({"do": "begin", "round": job.round}, job.state._asdict()))
        requests = (Message({"do": "train", "client": n}, job.memory[n]) for n in waiting)
        for client, reply in zip(waiting, self._in_order(requests), strict=True):
            update = decode(reply.frame, self.task.layout, Limits(max_abs=float("inf")))
            yield ClientResult(
                client, update, reply.tensors, reply.words["loss"], size=len(reply.frame)
            )

    def evaluate(self, w: Tensor) -> tuple[float | None, float | None]:
        """Accuracy (for class labels) and mean loss on the test set, a chunk a request."""
        if not self.pipes:
            return self.here.evaluate(w)
        self._tell_all(Message({"do": "weights"}, {"w": w}))
        requests = (Message({"do": "score", "chunk": chunk}) for chunk in chunks_of(self.task))
        replies = [reply.words for reply in self._in_order(requests)]
        return total_score(self.task, [(words["right"], words["loss"]) for words in replies])

    def start(self) -> None:
        """Fork the processes; they end with this one, or when the engine is thrown away.

        If they cannot train, or there is but one core, all work stays here.
        """
        if self.processes < 2:
            return
        context = get_context("fork")
        for _ in range(self.processes):
            ours, theirs = context.Pipe()
            arguments = (theirs, [*self.pipes, ours], self.task, self.algorithm)
            context.Process(target=serve, args=arguments, daemon=True).start()
            theirs.close()
            self.pipes.append(ours)
        weakref.finalize(self, close_all, self.pipes)
        if not all(_receive(pipe).words["ready"] for pipe in self.pipes):
            close_all(self.pipes)
            self.pipes.clear()
            self.processes = 1

    def _tell_all(self, message: Message) -> None:
        for pipe in self.pipes:
            message.send(pipe)

    def _in_order(self, requests: Iterator[Message]) -> Iterator[Message]:
        """Replies in the requests' order; each process gets a new request when it is free."""
        queue = enumerate(requests)
        busy: dict[Connection, int] = {}
        done: dict[int, Message] = {}

        def give(pipe: Connection) -> None:
            for number, request in queue:
                busy[pipe] = number
                request.send(pipe)
                break

        def take() -> None:
            for pipe in connection.wait(list(busy)):
                assert isinstance(pipe, Connection)
                done[busy.pop(pipe)] = _receive(pipe)
                give(pipe)

        for pipe in self.pipes:
            give(pipe)
        try:
            for number in count():
                while number not in done and busy:
                    take()
                if number not in done:
                    return
                yield checked(done.pop(number))
        finally:
            queue = enumerate(())
            while busy:
                take()


def _receive(pipe: Connection) -> Message:
    try:
        return Message.receive(pipe)
    except (EOFError, ConnectionError):
        raise WorkerDied("a process of the CPU engine died: was it out of memory?") from None


def serve(pipe: Connection, others: list[Connection], task: Task, algorithm: Algorithm) -> None:
    """A process's life: do what the pipe says until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that talks to people
    for other in others:
        other.close()  # or the pipe would not close with the process at its other end
    torch.set_num_threads(1)
    worker = Worker(task, algorithm)
    try:
        Message({"ready": can_train()}).send(pipe)
        while True:
            reply = worker.answer(Message.receive(pipe))
            if reply is not None:
                reply.send(pipe)
    except (EOFError, ConnectionError):
        os._exit(0)  # at once, without what the forked process would have done at its end


def can_train() -> bool:
    """Whether autograd works here: not in a fork of a process that has used it beside a GPU."""
    x = torch.ones(1, requires_grad=True)
    try:
        torch.autograd.grad(x.sum(), x)
    except RuntimeError:
        return False
    return True


class Worker:
    """What a process knows: the task, and where this round begins."""

    def __init__(self, task: Task, algorithm: Algorithm) -> None:
        self.task, self.algorithm = task, algorithm
        self.trainer = Trainer(task)
        self.round, self.tensors = 0, Message({}).tensors

    def answer(self, message: Message) -> Message | None:
        """Do what a message says; what goes wrong is an answer too."""
        match message.words:
            case {"do": "begin", "round": round}:
                self.round, self.tensors = round, message.tensors
                return None
            case {"do": "weights"}:
                self.tensors = message.tensors
                return None
        try:
            return self._work(message)
        except Diverged as problem:
            return Message({"diverged": str(problem)})
        except Exception:
            return Message({"failed": traceback.format_exc()})

    def _work(self, message: Message) -> Message:
        match message.words:
            case {"do": "train", "client": client}:
                return self._train(client, message.tensors)
            case {"do": "score", "chunk": chunk}:
                right, loss = self.trainer.score(self.tensors["w"], chunk)
                return Message({"right": right, "loss": loss})
        raise ValueError(f"unknown request {message.words}")

    def _train(self, client: int, memory: Mapping[str, Tensor]) -> Message:
        state = Moments(**self.tensors)
        phase = self.algorithm.phase(self.round)
        job = Job(self.round, phase, state, (client,), {client: memory})
        result = self.trainer.train(job, client)
        spec = Spec(self.task.layout, self.algorithm.name, self.round, client)
        return Message({"loss": result.loss}, result.memory, encode(result.update, spec))


def cores() -> int:
    """Cores that this process may use; 1 where processes cannot be forked safely.

    Processes that torchrun started on one machine share its cores.
    """
    if sys.platform != "linux":
        return 1
    beside = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return max(1, len(os.sched_getaffinity(0)) // beside)


def close_all(pipes: list[Connection]) -> None:
    """Let the processes at the other ends go."""
    for pipe in pipes:
        pipe.close()
