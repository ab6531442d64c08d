"""The GPU engine: clients are stacked in one tensor and take their local steps together.

The data stays on the device, one local step of the whole stack is a CUDA graph, and nothing is
copied to the host until the local training is finished. On a CPU the same code runs without a
graph, so it can be tested without a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack

import numpy as np
from numpy.typing import NDArray
import torch
from torch import Tensor

from fedsift.algorithms.method import (
    Algorithm,
    Context,
    LocalUpdate,
    Memory,
    checked_message,
)
from fedsift.codec.errors import NotFiniteError
from fedsift.codec.frame import Spec, encoded_sizes
from fedsift.codec.update import Update
from fedsift.engine.client import diverged_client
from fedsift.engine.contract import Job, Results
from fedsift.engine.gpu.graph_step import GraphStep, graph_key
from fedsift.engine.gpu.stacked_task import StackedTask
from fedsift.engine.scoring import class_axis, correct_labels
from fedsift.errors import Diverged
from fedsift.seeding import torch_seed
from fedsift.task import NumSteps, Task, sample_without_replacement
from fedsift.vector import State

IntArray = NDArray[np.int64]
PRECISIONS = ("fp32", "tf32", "bf16")
MAX_TEST_NUMBERS, MAX_TEST_SAMPLES = 6_000_000, 8000
"""The most input numbers, and the most samples, that are scored at a time."""
MAX_CLIENTS = 1000
"""The most clients in one stack. A larger stack would be no faster."""


class Stacked:
    """Train clients in stacks as large as the device's memory allows."""

    def __init__(self, task: Task, algorithm: Algorithm, precision: str = "fp32") -> None:
        self.task, self.algorithm, self.precision = task, algorithm, precision
        if len({x.shape[1:] for x, _ in task.clients}) > 1:
            raise ValueError(
                "on a GPU, all samples must have the same shape: pad them, or train on the CPU"
            )
        self.data = torch.cat([x for x, _ in task.clients])
        labels = torch.cat([y for _, y in task.clients])
        self.stacked_task = StackedTask(task, self.data, labels, precision, algorithm.state)
        sizes = [len(x) for x, _ in task.clients]
        self.offsets = np.cumsum([0, *sizes[:-1]])
        self.next_rows: dict[tuple[int, tuple[int, ...], NumSteps], Tensor] = {}
        """Batches of the next round, drawn while the device trains this one."""
        self.staging: dict[torch.Size, PinnedBuffer] = {}
        self.steps: dict[tuple[Hashable, ...], GraphStep] = {}

    def train(self, job: Job) -> Iterator[Results]:
        """Yield the results of the cohort, stack by stack."""
        self.next_rows = {key: rows for key, rows in self.next_rows.items() if key[0] == job.round}
        for stack in self.stacks(job.cohort):
            yield self._train_stack(job, stack)

    def stacks(self, cohort: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Split a cohort into stacks of clients with the same batch size that fit in memory."""
        by_batch: dict[int, list[int]] = {}
        for client in cohort:
            by_batch.setdefault(self.task.weight(client), []).append(client)
        for batch, clients in by_batch.items():
            size = self._max_clients(batch)
            for start in range(0, len(clients), size):
                yield tuple(clients[start : start + size])

    def _train_stack(self, job: Job, clients: tuple[int, ...]) -> Results:
        memory = stack_memory([job.memory[n] for n in clients])
        start = job.phase.local_start(stack_state(job.state, len(clients)), memory)
        end, memory, losses = self._local_steps(job, clients, start, memory)
        is_finite = torch.stack([torch.isfinite(x).all(-1) for x in end]).all(0)
        if not self.data.is_cuda:
            check_finite(clients, is_finite)
        context = Context.of(self.task, job.round, clients)
        weights = tuple(float(self.task.weight(n)) for n in clients)
        try:
            sent = job.phase.send(context, LocalUpdate(start, end), memory)
        except NotFiniteError:
            raise Diverged("an update contains NaN or infinity") from None
        parts, new_memory = checked_message(sent, memory, "send")
        update = Update(parts, weights)
        name = self.algorithm.name
        sizes = encoded_sizes(update, [Spec(self.task.layout, name, job.round, n) for n in clients])
        if self.data.is_cuda:  # computing the sizes has synchronized the GPU, so the check is free
            check_finite(clients, is_finite)
        return Results(clients, update, new_memory, tuple(losses.tolist()), tuple(sizes))

    def _local_steps(
        self, job: Job, clients: tuple[int, ...], start: State, memory: Memory
    ) -> tuple[State, Memory, Tensor]:
        """Take the steps of every client of the stack; return states, memory and mean losses.

        All take as many steps as the longest training needs. Clients that have finished are masked.
        """
        steps = job.phase.local_steps
        numbers = torch.tensor([self.task.num_steps(n, steps) for n in clients])
        is_masked = bool((numbers != numbers[0]).any())
        numbers = numbers.to(self.data.device) if is_masked else numbers[0]
        rows = self.next_rows.pop((job.round, clients, steps), None)
        rows = self._rows(job.round, clients, steps) if rows is None else rows
        devices = [self.data.device] if self.data.is_cuda else []
        with self._arithmetic(), torch.random.fork_rng(devices):
            step = self._step_of(job, start, memory, rows.shape[-1], is_masked)
            torch.manual_seed(torch_seed(self.task.seed, "layers", job.round, clients[0]))
            step.begin(job.phase, job.round, start, memory)
            for number, batch_rows in enumerate(rows):
                step.take(batch_rows, number < numbers if is_masked else None)
            end, memory = step.end()
            loss = step.loss / numbers
        if len(job.cohort) == len(self.task.clients):  # the next round's cohort is the same
            key = job.round + 1, clients, steps
            self.next_rows[key] = self._rows(*key)
        return end, memory, loss

    def _rows(self, round: int, clients: tuple[int, ...], steps: NumSteps) -> Tensor:
        """Return the batches ``(steps, clients, batch)`` as rows of the joined data.

        They are the batches that the reference engine draws.
        """
        if isinstance(steps, int):
            drawn = self._drawn_together(round, clients, steps)
        else:
            drawn = self._drawn_one_by_one(round, clients, steps)
        rows = torch.from_numpy(drawn + self.offsets[list(clients), None, None]).transpose(0, 1)
        if not self.data.is_cuda:
            return rows
        if rows.shape not in self.staging:
            self.staging[rows.shape] = PinnedBuffer(rows)
        return self.staging[rows.shape].send(rows, self.data.device)

    def _drawn_together(self, round: int, clients: tuple[int, ...], steps: int) -> IntArray:
        """Draw the batches ``(clients, steps, batch)`` of clients that take equally many steps."""
        sizes = np.array([len(self.task.clients[n][0]) for n in clients])
        whole_set = np.arange(self.task.weight(clients[0]))
        drawn = np.broadcast_to(whole_set, (len(clients), steps, len(whole_set)))
        is_sampled = sizes > len(whole_set)
        if is_sampled.any():
            uniforms = np.stack([self.task.batch_uniforms(round, n, steps) for n in clients])
            sampled = sample_without_replacement(uniforms, sizes[:, None])
            drawn = np.where(is_sampled[:, None, None], sampled, drawn)
        return drawn

    def _drawn_one_by_one(
        self, round: int, clients: tuple[int, ...], steps: Callable[[int, int], int]
    ) -> IntArray:
        """Draw batches for different numbers of steps; the last batch of each client repeats."""
        numbers = [self.task.num_steps(n, steps) for n in clients]
        whole_set = np.arange(self.task.weight(clients[0]))
        drawn = np.empty((len(clients), max(numbers), len(whole_set)), np.int64)
        for row, (client, number) in enumerate(zip(clients, numbers, strict=True)):
            batches = self.task.batches(round, client, steps)
            drawn[row, :number] = whole_set if batches is None else batches
            drawn[row, number:] = drawn[row, number - 1]
        return drawn

    def _step_of(
        self, job: Job, start: State, memory: Memory, batch: int, is_masked: bool
    ) -> GraphStep:
        phase = job.phase
        kind = graph_key(phase.step), phase.points
        key = kind, len(start.w), batch, is_masked
        if key not in self.steps:
            self.steps = {k: v for k, v in self.steps.items() if k[0] == kind}
            self.steps[key] = GraphStep(
                self.stacked_task, phase, start, memory, batch, is_masked
            )
        return self.steps[key]

    def _max_clients(self, batch: int) -> int:
        """Return how many clients' states and activations fit into half of the free memory."""
        if not self.data.is_cuda:
            return MAX_CLIENTS
        sample = self.data[0].numel() * self.data.element_size()
        state = 16 * self.task.layout.d * self.task.layout.dtype.itemsize
        gpu = self.data.device
        free, _ = torch.cuda.mem_get_info(gpu)
        unused = torch.cuda.memory_reserved(gpu) - torch.cuda.memory_allocated(gpu)
        per_client = state + 400 * sample * batch
        return max(1, min(MAX_CLIENTS, (free + unused) // (2 * per_client)))

    def _arithmetic(self) -> ExitStack:
        """Enable the chosen precision and deterministic kernels."""
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
        """Return accuracy (for class labels) and mean loss on the test set.

        A GPU synchronizes once.
        """
        if self.task.test is None:
            return None, None
        devices = [self.data.device] if self.data.is_cuda else []
        with self._arithmetic(), torch.random.fork_rng(devices):
            torch.manual_seed(torch_seed(self.task.seed, "test", 0))
            per_sample = self.task.test[0][0].numel()
            rows = min(MAX_TEST_SAMPLES, max(1, MAX_TEST_NUMBERS // per_sample))
            pieces = zip(*(torch.split(x, rows) for x in self.task.test), strict=True)
            scores = [self._score(w, data, labels) for data, labels in pieces]
        correct, loss = torch.stack(scores).sum(0).tolist()
        data, labels = self.task.test
        return None if math.isnan(correct) else correct / labels.numel(), loss / len(data)

    def _score(self, w: Tensor, data: Tensor, labels: Tensor) -> Tensor:
        """Return the number of correct labels (NaN without classes) and the sum of losses."""
        output = self.stacked_task.output(w, data)
        loss = self.task.loss(output, labels).double() * len(data)
        is_correct = correct_labels(output, labels, class_axis(self.task.loss))
        if is_correct is None:
            return torch.stack([torch.full_like(loss, torch.nan), loss])
        return torch.stack([is_correct.sum().double(), loss])


class PinnedBuffer:
    """Page-locked host memory, from which a GPU copies while the host continues."""

    def __init__(self, like: Tensor) -> None:
        self.pages = torch.empty(like.shape, dtype=like.dtype, pin_memory=True)
        self.is_copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def send(self, x: Tensor, device: torch.device) -> Tensor:
        """Return a copy on the device, which later work on the same stream can use."""
        self.is_copied.synchronize()
        self.pages.numpy()[:] = x.numpy()
        copy = self.pages.to(device, non_blocking=True)
        self.is_copied.record()
        return copy


def check_finite(clients: Sequence[int], is_finite: Tensor) -> None:
    """Raise Diverged for the first client whose local training did not stay finite."""
    for client, ok in zip(clients, is_finite.tolist(), strict=True):
        if not ok:
            raise diverged_client(client)


def stack_state(state: State, clients: int) -> State:
    """Return the global state repeated for each client, without copying it."""
    return state.map(lambda x: x.expand(clients, -1))


def stack_memory(memories: Sequence[Memory]) -> Memory:
    """Return the clients' memories with their tensors stacked."""
    return {name: torch.cat([memory[name] for memory in memories]) for name in memories[0]}
