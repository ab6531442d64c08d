"""What a forked worker process does: train clients and score the model on request."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
from collections.abc import Iterable, Mapping
from multiprocessing import current_process
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from fedsift.algorithms.method import Algorithm
from fedsift.engine.client import Trainer
from fedsift.engine.contract import Job
from fedsift.engine.processes.messages import Message, failure_message, result_to_message
from fedsift.task import Task
from fedsift.vector import State

PR_SET_PDEATHSIG = 1
"""The Linux option that sends a signal to a process when its parent ends."""


def run_worker(
    pipe: Connection,
    other_pipes: list[Connection],
    parent: int | None,
    task: Task,
    algorithm: Algorithm,
) -> None:
    """Answer requests until the pipe is closed."""
    if parent is not None:
        end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    gc.freeze()  # never collect the parent's objects here, which could run their finalizers
    close_all(other_pipes)  # an open copy would keep a pipe alive after its process has ended
    torch.set_num_threads(1)
    if task.num_workers:
        current_process().daemon = False  # a daemon may not have child processes
    worker = Worker(task, algorithm)
    try:
        Message({"can_train": can_train()}).send(pipe)
        while True:
            reply = worker.answer(Message.receive(pipe))
            if reply is not None:
                reply.send(pipe)
    except (EOFError, ConnectionError):
        os._exit(0)  # skip the exit handlers that were inherited from the parent


def end_with_parent(parent: int) -> None:
    """Let the system kill this process when its parent ends, even in the middle of training."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)  # the parent ended before the call


def can_train() -> bool:
    """Whether autograd works; it fails in a fork of a process that has used it on a GPU machine."""
    x = torch.ones(1, requires_grad=True)
    try:
        torch.autograd.grad(x.sum(), x)
    except RuntimeError:
        return False
    return True


class Worker:
    """The task, and the state from which the clients of this round start."""

    def __init__(self, task: Task, algorithm: Algorithm) -> None:
        self.task, self.algorithm = task, algorithm
        self.trainer = Trainer(task)
        self.round, self.weights, self.tensors = 0, algorithm.weights, Message({}).tensors

    def answer(self, message: Message) -> Message | None:
        """Return the reply to a message. Exceptions become replies."""
        match message.fields:
            case {"do": "begin", "round": round, "weights": weights}:
                self.round, self.weights, self.tensors = round, weights, message.tensors
                return None
            case {"do": "weights"}:
                self.tensors = message.tensors
                return None
        try:
            return self._answer_request(message)
        except Exception as problem:
            return failure_message(problem)

    def _answer_request(self, message: Message) -> Message:
        match message.fields:
            case {"do": "train", "client": client}:
                return self._train(client, message.tensors)
            case {"do": "score", "chunk": chunk}:
                correct, loss = self.trainer.score(self.tensors["w"], chunk)
                return Message({"correct": correct, "loss": loss})
        raise ValueError(f"unknown request {message.fields}")

    def _train(self, client: int, memory: Mapping[str, Tensor]) -> Message:
        state = State(**self.tensors)
        phase = self.algorithm.phase(self.round)
        job = Job(self.round, phase, state, (client,), {client: memory}, self.weights)
        result = self.trainer.train(job, client)
        return result_to_message(result, self.task.layout, self.algorithm.name, self.round)


def close_all(pipes: Iterable[Connection]) -> None:
    """Close pipes, which ends the worker processes at their other ends."""
    for pipe in pipes:
        pipe.close()
