"""The GPU engine: clients are stacked in one tensor and take their local steps together.

The data stays on the device, one local step of the whole stack is a CUDA graph, and nothing is
copied to the host until the local training is finished. On a CPU the same code runs without a
graph, so it can be tested without a GPU.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsift.algorithms.checks import DeclaredMemory, checked_message, checked_start
from fedsift.algorithms.method import Algorithm, Context, LocalUpdate, Memory
from fedsift.codec.errors import NotFiniteError
from fedsift.codec.frame import Spec, encoded_sizes
from fedsift.codec.update import Update
from fedsift.engine.batches import LiveBatches, joined
from fedsift.engine.client import diverged_client
from fedsift.engine.contract import Job, Results
from fedsift.engine.gpu.arithmetic import arithmetic
from fedsift.engine.gpu.gradients import SingleGradients
from fedsift.engine.gpu.graph_step import GraphStep, consecutive_rows, graph_key
from fedsift.engine.gpu.memory import PinnedBuffer, memory_advice
from fedsift.engine.gpu.stacked_task import StackedTask
from fedsift.engine.scoring import (
    chunk_of_test_set,
    chunk_size,
    class_axis,
    correct_labels,
    num_labels,
)
from fedsift.errors import Diverged
from fedsift.seeding import torch_seed
from fedsift.task import NumSteps, Task, sample_without_replacement
from fedsift.task.losses import has_perplexity
from fedsift.task.samples import (
    Pair,
    Tree,
    first_samples,
    leaves_of,
    map_tree,
    num_samples,
    pair_of,
    sample_shapes,
    size_of,
)
from fedsift.vector import State

LOGGER = logging.getLogger("fedsift")
IntArray = NDArray[np.int64]
MAX_TEST_NUMBERS, MAX_TEST_SAMPLES = 6_000_000, 8000
"""The most input numbers, and the most samples, that are scored at a time."""
MAX_CLIENTS = 1000
"""The most clients in one stack. A larger stack would be no faster."""


class Stacked:
    """Train clients in stacks as large as the device's memory allows."""

    def __init__(self, task: Task, algorithm: Algorithm, precision: str = "fp32") -> None:
        self.task, self.algorithm, self.precision = task, algorithm, precision
        if len({sample_shapes(data) for data in task.clients if isinstance(data, tuple)}) > 1:
            raise ValueError(
                "on a GPU, all samples must have the same shape: pad them, or train on the CPU"
            )
        self.device, self.live = task.device, LiveBatches(task)
        self.is_live = any(map(task.is_live, range(len(task.clients))))
        """Whether batches are fetched or transformed, and not selected from one joined set."""
        used = [first_samples(task.clients[0])] if self.is_live else map(pair_of, task.clients)
        data, labels = joined(list(used))
        self.stacked_task = StackedTask(task, data, labels, precision, algorithm.state)
        sizes = [size_of(data) for data in task.clients]
        self.offsets = np.cumsum([0, *sizes[:-1]])
        self.next_rows: dict[tuple[int, tuple[int, ...], NumSteps], Tensor] = {}
        """Batches of the next round, drawn while the device trains this one."""
        self.staging: dict[torch.Size, PinnedBuffer] = {}
        self.steps: dict[tuple[Hashable, ...], GraphStep] = {}
        """The local step for each kind of step, number of clients and batch size."""
        self.reported: set[str] = set()
        self.activation_bytes: dict[int, int] = {}
        """The memory of one client's forward and backward pass, by batch size."""

    def train(self, job: Job) -> Iterator[Results]:
        """Yield the results of the cohort, stack by stack."""
        self.next_rows = {key: rows for key, rows in self.next_rows.items() if key[0] == job.round}
        for stack in self.stacks(job.cohort):
            with memory_advice():
                results = self._train_stack(job, stack)
            yield results

    def stacks(self, cohort: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Split a cohort into stacks of clients with the same batch size that fit in memory."""
        by_batch: dict[int, list[int]] = {}
        for client in cohort:
            by_batch.setdefault(self.task.batch_of(client), []).append(client)
        for batch, clients in by_batch.items():
            size = self._max_clients(batch)
            for start in range(0, len(clients), size):
                yield tuple(clients[start : start + size])

    def _train_stack(self, job: Job, clients: tuple[int, ...]) -> Results:
        memory = stack_memory([job.memory[n] for n in clients])
        state = stack_state(job.state, len(clients))
        start = checked_start(job.phase.local_start(state, memory), state)
        end, memory, losses = self._local_steps(job, clients, start, memory)
        is_finite = torch.stack([torch.isfinite(x).all(-1) for x in end]).all(0)
        if self.device.type != "cuda":
            check_finite(clients, is_finite)
        context = Context.of(self.task, job.round, job.state, clients)
        weights = tuple(self.task.weight(n, job.weights) for n in clients)
        try:
            sent = job.phase.send(context, LocalUpdate(start, end), memory)
        except NotFiniteError:
            raise Diverged("an update contains NaN or infinity") from None
        parts, new_memory = checked_message(sent, memory, "send")
        update = Update(parts, weights)
        name = self.algorithm.name
        sizes = encoded_sizes(update, [Spec(self.task.layout, name, job.round, n) for n in clients])
        if self.device.type == "cuda":  # free: computing the sizes has synchronized the GPU
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
        numbers = numbers.to(self.device) if is_masked else numbers[0]
        inputs = self._inputs(job.round, clients, steps)
        first = next(inputs)
        with arithmetic(self.precision, self.device), torch.random.fork_rng(self._gpus):
            step = self._step_of(job, clients, start, memory, is_masked, first)
            torch.manual_seed(torch_seed(self.task.seed, "layers", job.round, clients[0]))
            step.begin(job.phase, job.round, start, memory)
            for number, each in enumerate(chain([first], inputs)):
                is_active = number < numbers if is_masked else None
                step.take_batch(*each, is_active) if isinstance(each, tuple) else step.take(
                    each, is_active
                )
            end, memory = step.end()
            loss = step.loss / numbers
        if len(job.cohort) == len(self.task.clients) and not self.is_live:
            # The next round's cohort is the same.
            key = job.round + 1, clients, steps
            self.next_rows[key] = self._rows(*key)
        return end, memory, loss

    @property
    def _gpus(self) -> list[torch.device]:
        return [self.device] if self.device.type == "cuda" else []

    def _inputs(
        self, round: int, clients: tuple[int, ...], steps: NumSteps
    ) -> Iterator[Tensor | Pair]:
        """Yield the rows of each step's batches or, if they are live, the batches end to end."""
        if self.is_live:
            pairs = self.live.of_clients(round, clients, steps)
            while batch := list(islice(pairs, len(clients))):
                yield joined(batch)
            return
        rows = self.next_rows.pop((round, clients, steps), None)
        yield from self._rows(round, clients, steps) if rows is None else rows

    def _rows(self, round: int, clients: tuple[int, ...], steps: NumSteps) -> Tensor:
        """Return the batches ``(steps, clients, batch)`` as rows of the joined data.

        They are the batches that the reference engine draws.
        """
        if isinstance(steps, int):
            drawn = self._drawn_together(round, clients, steps)
        else:
            drawn = self._drawn_one_by_one(round, clients, steps)
        rows = torch.from_numpy(drawn + self.offsets[list(clients), None, None]).transpose(0, 1)
        if self.device.type != "cuda":
            return rows
        if rows.shape not in self.staging:
            self.staging[rows.shape] = PinnedBuffer(rows)
        return self.staging[rows.shape].send(rows, self.device)

    def _drawn_together(self, round: int, clients: tuple[int, ...], steps: int) -> IntArray:
        """Draw the batches ``(clients, steps, batch)`` of clients that take equally many steps."""
        sizes = np.array([size_of(self.task.clients[n]) for n in clients])
        whole_set = np.arange(self.task.batch_of(clients[0]))
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
        whole_set = np.arange(self.task.batch_of(clients[0]))
        drawn = np.empty((len(clients), max(numbers), len(whole_set)), np.int64)
        for row, (client, number) in enumerate(zip(clients, numbers, strict=True)):
            batches = self.task.batches(round, client, steps)
            drawn[row, :number] = whole_set if batches is None else batches
            drawn[row, number:] = drawn[row, number - 1]
        return drawn

    def _step_of(
        self,
        job: Job,
        clients: tuple[int, ...],
        start: State,
        memory: Memory,
        is_masked: bool,
        first: Tensor | Pair,
    ) -> GraphStep:
        """Return the local step of a stack, whose first input is ``first``."""
        phase, batch = job.phase, self.task.batch_of(clients[0])
        kind = graph_key(phase.step), phase.points
        if start.names != self.stacked_task.names:  # a local start may add vectors
            self.stacked_task = replace(self.stacked_task, names=start.names)
        key = kind, len(clients), batch, is_masked
        if key not in self.steps:
            self.steps = {k: v for k, v in self.steps.items() if k[0] == kind}
            task, rows = self.stacked_task, first
            if isinstance(rows, tuple):
                x, y = map_tree(torch.clone, rows)
                task = replace(task, data=x, labels=y, is_live=True)
                rows = consecutive_rows(len(clients), batch, self.device)
            self.steps[key] = GraphStep(task, phase, start, memory, rows, is_masked)
            self._report(self.steps[key].line)
        return self.steps[key]

    def _report(self, line: str) -> None:
        """Log how the clients are trained, unless that is known."""
        if line not in self.reported:
            self.reported.add(line)
            LOGGER.info(line)

    def _max_clients(self, batch: int) -> int:
        """Return how many clients' states and activations fit into the GPU's free memory."""
        if self.device.type != "cuda":
            return MAX_CLIENTS
        state = 16 * self.task.layout.d * self.task.layout.dtype.itemsize
        per_client = 2 * (state + self._activation_bytes(batch))
        gpu = self.device
        free, _ = torch.cuda.mem_get_info(gpu)
        unused = torch.cuda.memory_reserved(gpu) - torch.cuda.memory_allocated(gpu)
        return max(1, min(MAX_CLIENTS, (free + unused) // per_client))

    def _activation_bytes(self, batch: int) -> int:
        """Return the memory that one client's forward and backward pass needs.

        It is estimated for models that run layer by layer, and measured for all others.
        """
        if self.stacked_task.network is not None:
            sample: int = sum(leaf[0].nbytes for leaf in leaves_of(self.stacked_task.data))
            return 400 * sample * batch
        if batch not in self.activation_bytes:
            rows = torch.arange(batch, device=self.device) % num_samples(self.stacked_task.labels)
            alone = SingleGradients(self.stacked_task, 1)
            before = torch.cuda.memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            with arithmetic(self.precision, self.device), torch.random.fork_rng(self._gpus):
                alone.compute(rows[None])
            peak = torch.cuda.max_memory_allocated(self.device)
            self.activation_bytes[batch] = peak - before
        return self.activation_bytes[batch]

    @memory_advice()
    @torch.no_grad()
    def evaluate(self, w: Tensor) -> tuple[float | None, float | None]:
        """Return accuracy (for class labels) and mean loss on the test set.

        A GPU synchronizes once.
        """
        if self.task.test is None:
            return None, None
        test = self.task.test
        x, _ = first_samples(test, 1)
        per_sample: int = sum(leaf.numel() for leaf in leaves_of(x))
        rows = min(MAX_TEST_SAMPLES, max(1, MAX_TEST_NUMBERS // per_sample))
        if has_perplexity(self.task.loss):
            rows = chunk_size(self.task)
        chunks = (chunk_of_test_set(self.task, n, rows) for n in range(-(-size_of(test) // rows)))
        with arithmetic(self.precision, self.device), torch.random.fork_rng(self._gpus):
            torch.manual_seed(torch_seed(self.task.seed, "test", 0))
            scores = [self._score(w, data, labels) for data, labels in chunks]
        correct, loss = torch.stack(scores).sum(0).tolist()
        accuracy = None if math.isnan(correct) else correct / num_labels(test)
        return accuracy, loss / size_of(test)

    def _score(self, w: Tensor, data: Tree, labels: Tree) -> Tensor:
        """Return the number of correct labels (NaN without classes) and the sum of losses."""
        output = self.stacked_task.output(w, data)
        loss = self.task.loss(output, labels).double() * num_samples(labels)
        is_correct = None
        if not has_perplexity(self.task.loss):
            is_correct = correct_labels(output, labels, class_axis(self.task.loss))
        if is_correct is None:
            return torch.stack([torch.full_like(loss, torch.nan), loss])
        return torch.stack([is_correct.sum().double(), loss])


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
    return DeclaredMemory({k: torch.cat([memory[k] for memory in memories]) for k in memories[0]})
