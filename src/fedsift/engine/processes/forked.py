"""The CPU engine: one process a core, one thread each, clients in sequence on each.

The processes are forked once, with the data in memory that all of them share. What they send back
are frames, as on a network, so that nothing is pickled. Frames arrive in any order and are handed
on in the cohort's, which makes the result that of the reference engine, bit for bit.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import torch
from torch import Tensor

from fedsift.algorithms.method import Algorithm
from fedsift.engine.client import Trainer, chunks_of, total_score
from fedsift.engine.contract import ClientResult, Job
from fedsift.engine.processes.messages import (
    Message,
    checked,
    failure,
    message_of,
    result_of,
)
from fedsift.engine.reference import Reference
from fedsift.errors import WorkerDied
from fedsift.task import Task
from fedsift.vector import Moments

WORTHWHILE = 0.25
"""Seconds of work in a round from which on other processes are worth their start."""


class Forked:
    """Spreads a cohort over processes; work that is small stays in this one."""

    def __init__(self, task: Task, algorithm: Algorithm, processes: int | None = None) -> None:
        self.task, self.algorithm = task, algorithm
        self.processes = cores() if processes is None else processes
        self.here = Reference(task)
        self.crew: Crew | None = None

    def train(self, job: Job) -> Iterator[ClientResult]:
        """Every cohort member's result, in the cohort's order."""
        waiting, crew = deque(job.cohort), self.idle()
        if torch.cuda.is_available() and not crew and len(waiting) > 1:
            crew = self.start()  # now or never: beside a GPU, whoever trained cannot be forked
        while waiting and not crew:
            began = time.perf_counter()
            yield from self.here.train(replace(job, cohort=(waiting.popleft(),)))
            if (time.perf_counter() - began) * len(waiting) > WORTHWHILE:
                crew = self.start()
        if not waiting or not crew:
            return
        begin = Message({"do": "begin", "round": job.round}, job.state._asdict())
        requests = (Message({"do": "train", "client": n}, job.memory[n]) for n in waiting)
        for client, reply in zip(waiting, crew.ask(begin, requests), strict=True):
            yield result_of(reply, client, self.task)

    def evaluate(self, w: Tensor) -> tuple[float | None, float | None]:
        """Accuracy (for class labels) and mean loss on the test set, a chunk a request."""
        if not (crew := self.idle()):
            return self.here.evaluate(w)
        requests = (Message({"do": "score", "chunk": chunk}) for chunk in chunks_of(self.task))
        replies = [m.words for m in crew.ask(Message({"do": "weights"}, {"w": w}), requests)]
        return total_score(self.task, [(words["right"], words["loss"]) for words in replies])

    def idle(self) -> Crew | None:
        """The processes, if there are any and all of them wait for work."""
        return self.crew if self.crew and self.crew.is_idle else None

    def start(self) -> Crew | None:
        """Fork the processes; they end with this one, or when the engine is thrown away.

        If they cannot train, or there is but one core, all work stays here.
        """
        if self.processes < 2:
            return None
        if self.crew:
            self.crew.end()
        self.crew = Crew(self.processes, self.task, self.algorithm)
        if not self.crew.can_train:
            self.crew, self.processes = None, 1
        return self.crew


class Crew:
    """Forked processes, the pipes to them, and which of them owe a reply to what."""

    def __init__(self, size: int, task: Task, algorithm: Algorithm) -> None:
        self.processes: dict[Connection, BaseProcess] = {}
        self.busy: dict[Connection, int] = {}
        weakref.finalize(self, close_all, self.processes)
        context = get_context("fork")
        # The system goes by the thread that forked: one that ends early must not end the others.
        parent = os.getpid() if threading.current_thread() is threading.main_thread() else None
        for _ in range(size):
            ours, theirs = context.Pipe()
            arguments = (theirs, [*self.processes, ours], parent, task, algorithm)
            self.processes[ours] = context.Process(target=serve, args=arguments, daemon=True)
            self.processes[ours].start()
            theirs.close()
        self.can_train = all(_receive(pipe).words["ready"] for pipe in self.processes)

    @property
    def is_idle(self) -> bool:
        """Whether all wait for work: nobody was ended, or left alone with a request."""
        return bool(self.processes) and not self.busy

    def ask(self, news: Message, requests: Iterator[Message]) -> Iterator[Message]:
        """Tell everyone the news; then replies in the requests' order, each by who is free.

        Whoever still owes a reply when this ends, by Ctrl-C or otherwise, works for nobody: then
        all are ended.
        """
        queue, done = enumerate(requests), dict[int, Message]()
        busy = self.busy = dict.fromkeys(self.processes, -1)

        def give(pipe: Connection) -> None:
            for number, request in queue:
                busy[pipe] = number
                _send(pipe, request)
                return
            del busy[pipe]

        try:
            for pipe in self.processes:
                _send(pipe, news)
                give(pipe)
            for number in count():
                while number not in done and busy:
                    for pipe in ready(busy):
                        done[busy[pipe]] = _receive(pipe)
                        give(pipe)
                if number not in done:
                    return
                yield checked(done.pop(number))
        finally:
            if busy:
                self.end()

    def end(self) -> None:
        """End the processes at once, whatever they are at."""
        for process in self.processes.values():
            process.kill()
            process.join()
        close_all(self.processes)
        self.processes.clear()


def ready(pipes: Iterable[Connection]) -> list[Connection]:
    """Wait until there is something to read, and say where."""
    return [pipe for pipe in connection.wait(list(pipes)) if isinstance(pipe, Connection)]


@contextmanager
def _alive() -> Iterator[None]:
    """Inside, a process that cannot be reached is told of in one line."""
    try:
        yield
    except (EOFError, ConnectionError):
        raise WorkerDied("a process of the CPU engine died: was it out of memory?") from None


def _send(pipe: Connection, message: Message) -> None:
    with _alive():
        message.send(pipe)


def _receive(pipe: Connection) -> Message:
    with _alive():
        return Message.receive(pipe)


PR_SET_PDEATHSIG = 1
"""Linux's name for: a signal when the parent ends."""


def end_with(parent: int) -> None:
    """End when the parent does, also when that is killed in the middle of a client's training."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)  # it has ended before it could be noticed


def serve(
    pipe: Connection,
    others: list[Connection],
    parent: int | None,
    task: Task,
    algorithm: Algorithm,
) -> None:
    """A process's life: do what the pipe says until it closes."""
    if parent is not None:
        end_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that talks to people
    gc.freeze()  # what was left to collect at the fork is not for this process to end
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
        except Exception as problem:
            return failure(problem)

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
        return message_of(result, self.task.layout, self.algorithm.name, self.round)


def cores() -> int:
    """Cores that this process may use; 1 where processes cannot be forked safely.

    Processes that torchrun started on one machine share its cores.
    """
    if sys.platform != "linux":
        return 1
    beside = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return max(1, len(os.sched_getaffinity(0)) // beside)


def close_all(pipes: Iterable[Connection]) -> None:
    """Let the processes at the other ends go."""
    for pipe in pipes:
        pipe.close()
