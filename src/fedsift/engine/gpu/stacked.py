"""The GPU engine: a cohort's clients stacked in one tensor and stepped together.

Data stays on the device, and one local step of a whole stack is a CUDA graph. Within a round
nothing is copied to the host until its end. On a CPU the same code runs without a graph, which is
how it is tested where there is no GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack

import numpy as np
import torch
from torch import Tensor

from fedsift.algorithms.method import (
    Algorithm,
    Context,
    LocalUpdate,
    Memory,
    Phase,
    Step,
    checked_message,
)
from fedsift.codec.errors import NotFiniteError
from fedsift.codec.frame import Spec, encoded_sizes
from fedsift.codec.update import Update
from fedsift.engine.client import axis_of_classes, labels_found
from fedsift.engine.contract import Job, Results
from fedsift.engine.gpu.steps import StackedStep, Work
from fedsift.errors import Diverged
from fedsift.seeding import torch_seed
from fedsift.task import (
    Task,
    distinct,
)
from fedsift.vector import Moments

PRECISIONS = ("fp32", "tf32", "bf16")
TESTED, MOST_TESTED = 6_000_000, 8000
"""Numbers in the test samples that are scored at a time, and the most samples."""
MOST_CLIENTS = 1000
"""Clients in one stack; a larger one would be no faster."""


class Stacked:
    """Trains clients in stacks as large as the device's memory allows."""

    def __init__(self, task: Task, algorithm: Algorithm, precision: str = "fp32") -> None:
        self.task, self.algorithm, self.precision = task, algorithm, precision
        if len({x.shape[1:] for x, _ in task.clients}) > 1:
            raise ValueError("on a GPU samples must be of one shape: pad them, or choose the CPU")
        self.data = torch.cat([x for x, _ in task.clients])
        labels = torch.cat([y for _, y in task.clients])
        self.work = Work(task, self.data, labels, precision)
        sizes = [len(x) for x, _ in task.clients]
        self.offsets = np.cumsum([0, *sizes[:-1]])
        self.ahead: dict[tuple[int, tuple[int, ...], int], Tensor] = {}
        """Rows for the next round, drawn while the device is at work on this one's."""
        self.staging: dict[torch.Size, Staging] = {}
        self.captured: dict[tuple[Step, int, int], StackedStep] = {}

    def train(self, job: Job) -> Iterator[Results]:
        """Every cohort member's result, stack by stack."""
        self.ahead = {key: rows for key, rows in self.ahead.items() if key[0] == job.round}
        for stack in self.stacks(job.cohort):
            yield self._train_stack(job, stack)

    def stacks(self, cohort: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Clients that train together: of one batch size, and as many as fit."""
        by_batch: dict[int, list[int]] = {}
        for client in cohort:
            by_batch.setdefault(self.task.weight(client), []).append(client)
        for batch, clients in by_batch.items():
            most = self._most_clients(batch)
            for start in range(0, len(clients), most):
                yield tuple(clients[start : start + most])

    def _train_stack(self, job: Job, clients: tuple[int, ...]) -> Results:
        memory = stack_memory([job.memory[n] for n in clients])
        start = job.phase.local_start(stack_state(job.state, len(clients)), memory)
        end, losses = self._local_steps(job, clients, start)
        sound = torch.stack([torch.isfinite(x).all(-1) for x in end]).all(0)
        if not self.data.is_cuda:
            refuse_unsound(clients, sound)
        context = Context(self.task.layout, job.round, self.task.seed, clients)
        weights = tuple(float(self.task.weight(n)) for n in clients)
        try:
            sent = job.phase.send(context, LocalUpdate(start, end), memory)
        except NotFiniteError:
            raise Diverged("an update left the finite numbers") from None
        parts, kept = checked_message(sent, memory, "send")
        update = Update(parts, weights)
        name = self.algorithm.name
        sizes = encoded_sizes(update, [Spec(self.task.layout, name, job.round, n) for n in clients])
        if self.data.is_cuda:  # the sizes have synchronized it: this check is free here
            refuse_unsound(clients, sound)
        return Results(clients, update, kept, tuple(losses.tolist()), tuple(sizes))

    def _local_steps(
        self, job: Job, clients: tuple[int, ...], start: Moments
    ) -> tuple[Moments, Tensor]:
        """L steps of every client of the stack; and each one's mean loss."""
        steps, batch = job.phase.local_steps, self.task.weight(clients[0])
        rows = self.ahead.pop((job.round, clients, steps), None)
        rows = self._rows(job.round, clients, steps) if rows is None else rows
        devices = [self.data.device] if self.data.is_cuda else []
        with self._arithmetic(), torch.random.fork_rng(devices):
            step = self._step_of(job.phase, len(clients), batch)
            torch.manual_seed(torch_seed(self.task.seed, "layers", job.round, clients[0]))
            step.begin(start)
            for each in rows:
                step.take(each)
            end, loss = step.end(), step.loss / steps
        if len(job.cohort) == len(self.task.clients):  # who trains in the next round is known
            following = job.round + 1, clients, steps
            self.ahead[following] = self._rows(*following)
        return end, loss

    def _rows(self, round: int, clients: tuple[int, ...], steps: int) -> Tensor:
        """Rows of the joined data set ``(steps, clients, batch)``: those the reference draws."""
        sizes = np.array([len(self.task.clients[n][0]) for n in clients])
        whole = np.arange(self.task.weight(clients[0]))
        drawn = np.broadcast_to(whole, (len(clients), steps, len(whole)))
        if (sizes > len(whole)).any():
            chances = np.stack([self.task.chances(round, n, steps) for n in clients])
            partly = (sizes > len(whole))[:, None, None]
            drawn = np.where(partly, distinct(chances, sizes[:, None]), drawn)
        rows = torch.from_numpy(drawn + self.offsets[list(clients), None, None]).transpose(0, 1)
        if not self.data.is_cuda:
            return rows
        if rows.shape not in self.staging:
            self.staging[rows.shape] = Staging(rows)
        return self.staging[rows.shape].send(rows, self.data.device)

    def _step_of(self, phase: Phase, clients: int, batch: int) -> StackedStep:
        key = phase.step, clients, batch
        if key not in self.captured:
            self.captured = {k: v for k, v in self.captured.items() if k[0] == phase.step}
            self.captured[key] = StackedStep(self.work, *key)
        return self.captured[key]

    def _most_clients(self, batch: int) -> int:
        """How many clients' states, gradients and activations fit into half of what is free."""
        if not self.data.is_cuda:
            return MOST_CLIENTS
        sample = self.data[0].numel() * self.data.element_size()
        state = 16 * self.task.layout.d * self.task.layout.dtype.itemsize
        gpu = self.data.device
        free, _ = torch.cuda.mem_get_info(gpu)
        unused = torch.cuda.memory_reserved(gpu) - torch.cuda.memory_allocated(gpu)
        each = state + 400 * sample * batch
        return max(1, min(MOST_CLIENTS, (free + unused) // (2 * each)))

    def _arithmetic(self) -> ExitStack:
        """The precision that was asked for, and kernels that give the same bits every time."""
        stack = ExitStack()
        tf32 = self.precision != "fp32"
        matmul = torch.backends.cuda.matmul
        stack.callback(setattr, matmul, "allow_tf32", matmul.allow_tf32)
        matmul.allow_tf32 = tf32
        flags: AbstractContextManager[None] = torch.backends.cudnn.flags(
            enabled=True, benchmark=False, deterministic=True, allow_tf32=tf32
        )
        stack.enter_context(flags)
        if self.precision == "bf16":
            stack.enter_context(
                torch.autocast(self.data.device.type, torch.bfloat16, cache_enabled=False)
            )
        return stack

    @torch.no_grad()
    def evaluate(self, w: Tensor) -> tuple[float | None, float | None]:
        """Accuracy (for class labels) and mean loss on the test set; a GPU synchronizes once."""
        if self.task.test is None:
            return None, None
        devices = [self.data.device] if self.data.is_cuda else []
        with self._arithmetic(), torch.random.fork_rng(devices):
            torch.manual_seed(torch_seed(self.task.seed, "test", 0))
            rows = min(MOST_TESTED, max(1, TESTED // self.task.test[0][0].numel()))
            pieces = zip(*(torch.split(x, rows) for x in self.task.test), strict=True)
            scores = [self._score(w, data, labels) for data, labels in pieces]
        right, loss = torch.stack(scores).sum(0).tolist()
        data, labels = self.task.test
        return None if math.isnan(right) else right / labels.numel(), loss / len(data)

    def _score(self, w: Tensor, data: Tensor, labels: Tensor) -> Tensor:
        """How many labels are found, NaN where they are not classes, and the sum of losses."""
        output = self.work.output(w, data)
        loss = self.task.loss(output, labels).double() * len(data)
        found = labels_found(output, labels, axis_of_classes(self.task.loss))
        right = torch.full_like(loss, torch.nan) if found is None else found.sum().double()
        return torch.stack([right, loss])


class Staging:
    """Pages of the host that a GPU reads by itself, while the host goes on."""

    def __init__(self, like: Tensor) -> None:
        self.pages = torch.empty(like.shape, dtype=like.dtype, pin_memory=True)
        self.read = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def send(self, x: Tensor, device: torch.device) -> Tensor:
        """A copy on the device, once that gets to it."""
        self.read.synchronize()
        self.pages.numpy()[:] = x.numpy()
        there = self.pages.to(device, non_blocking=True)
        self.read.record()
        return there


def refuse_unsound(clients: Sequence[int], sound: Tensor) -> None:
    """Stop if the training of a client left the finite numbers."""
    for client, is_sound in zip(clients, sound.tolist(), strict=True):
        if not is_sound:
            raise Diverged(f"client {client}'s training left the finite numbers")


def stack_state(state: Moments, clients: int) -> Moments:
    """The global state once for each client, without copying it."""
    return Moments(*(x.expand(clients, -1) for x in state))


def stack_memory(memories: Sequence[Memory]) -> Memory:
    """The clients' memories as one."""
    return {name: torch.cat([memory[name] for memory in memories]) for name in memories[0]}
