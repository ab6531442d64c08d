"""The CPU engine: one forked process per core, one thread each, clients in sequence on each.

The processes are forked once and share the memory of the data. They return encoded frames, as on a
network, so nothing is pickled. Results are yielded in the cohort's order, regardless of
when they arrive, so they are bit-identical to those of the reference engine.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from fedsift.algorithms.method import Algorithm
from fedsift.engine.contract import ClientResult, Job
from fedsift.engine.processes.messages import Message, result_from_message
from fedsift.engine.processes.pool import WorkerPool
from fedsift.engine.reference import Reference
from fedsift.engine.scoring import num_chunks, total_score
from fedsift.task import Task

MIN_PARALLEL_SECONDS = 0.25
"""The expected work of a round from which the engine starts worker processes."""


class Forked:
    """Spread a cohort over processes. Small cohorts are trained in this process."""

    def __init__(self, task: Task, algorithm: Algorithm, processes: int | None = None) -> None:
        self.task, self.algorithm = task, algorithm
        self.processes = num_cores() if processes is None else processes
        self.reference = Reference(task)
        self.pool: WorkerPool | None = None

    def train(self, job: Job) -> Iterator[ClientResult]:
        """Yield the result of each client in the cohort, in order."""
        waiting, pool = deque(job.cohort), self.idle_pool()
        if torch.cuda.is_available() and not pool and len(waiting) > 1:
            pool = self.start_pool()  # next to a GPU, a process cannot be forked after training
        while waiting and not pool:
            began = time.perf_counter()
            yield from self.reference.train(replace(job, cohort=(waiting.popleft(),)))
            if (time.perf_counter() - began) * len(waiting) > MIN_PARALLEL_SECONDS:
                pool = self.start_pool()
        if not waiting or not pool:
            return
        fields = {"do": "begin", "round": job.round, "weights": job.weights}
        begin = Message(fields, dict(job.state.items()))
        requests = (Message({"do": "train", "client": n}, job.memory[n]) for n in waiting)
        for client, reply in zip(waiting, pool.ask(begin, requests), strict=True):
            yield result_from_message(reply, client, self.task)

    def evaluate(self, w: Tensor) -> tuple[float | None, float | None]:
        """Return accuracy (for class labels) and mean loss on the test set."""
        waiting, pool, scores = deque(range(num_chunks(self.task))), self.idle_pool(), []
        while waiting and not pool:
            began = time.perf_counter()
            scores.append(self.reference.score(w, waiting.popleft()))
            if (time.perf_counter() - began) * len(waiting) > MIN_PARALLEL_SECONDS:
                pool = self.start_pool()
        if pool:
            requests = (Message({"do": "score", "chunk": chunk}) for chunk in waiting)
            replies = pool.ask(Message({"do": "weights"}, {"w": w}), requests)
            scores += [(reply.fields["correct"], reply.fields["loss"]) for reply in replies]
        return total_score(self.task, scores)

    def idle_pool(self) -> WorkerPool | None:
        """Return the worker processes if there are any and none of them is busy."""
        return self.pool if self.pool and self.pool.is_idle else None

    def start_pool(self) -> WorkerPool | None:
        """Fork the worker processes, which end with this process or with the engine.

        Returns None if there is one core or if forks cannot train; this process then does all work.
        """
        if self.processes < 2:
            return None
        if self.pool:
            self.pool.kill()
        self.pool = WorkerPool(self.processes, self.task, self.algorithm)
        if not self.pool.can_train:
            self.pool, self.processes = None, 1
        return self.pool


def num_cores() -> int:
    """Return the number of cores for this process; 1 where forking is not safe.

    Processes that torchrun started on one machine share its cores.
    """
    if sys.platform != "linux":
        return 1
    local_processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return max(1, len(os.sched_getaffinity(0)) // local_processes)
