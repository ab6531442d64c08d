"""The local training of one client: shared by all CPU engines."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from fedsift.algorithms.method import Context, LocalUpdate, checked_message
from fedsift.codec.errors import NotFiniteError
from fedsift.codec.update import Update
from fedsift.engine.batches import LiveBatches
from fedsift.engine.contract import ClientResult, Job
from fedsift.engine.cpu.batch_last import use_batch_last
from fedsift.engine.cpu.recorded import has_recorded_format, read_stages, record
from fedsift.engine.fused import fused
from fedsift.engine.memory_format import channels_last, is_callable_with
from fedsift.engine.scoring import Score, chunk_of_test_set, score_output
from fedsift.errors import Diverged
from fedsift.seeding import torch_seed
from fedsift.task import Task, all_finite
from fedsift.task.samples import Tree, call_model, num_samples, pair_of, select_rows
from fedsift.vector import Moments

LocalSteps = Callable[[Task, Job, int, Moments], tuple[Moments, float]]
"""A client's local training: (task, job, client, start) to (end, mean loss)."""
Batch = tuple[Tree, Tree, Tensor | None]
"""Inputs, labels, and the rows of them to use; None uses all."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread, which is faster for small operations and gives reproducible bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def train_client(task: Task, job: Job, client: int, steps: LocalSteps) -> ClientResult:
    """Run one client's round: local start, local steps, send."""
    phase, memory = job.phase, job.memory[client]
    start = phase.local_start(Moments(*(x[None] for x in job.state)), memory)
    end, loss = steps(task, job, client, start)
    if not all_finite(*end):
        raise diverged_client(client)
    context = Context(task.layout, job.round, task.seed, (client,))
    try:
        sent = phase.send(context, LocalUpdate(start, end), memory)
        parts, new_memory = checked_message(sent, memory, "send")
    except NotFiniteError:
        raise Diverged(f"the update of client {client} contains NaN or infinity") from None
    return ClientResult(client, Update(parts, (float(task.weight(client)),)), new_memory, loss)


def diverged_client(client: int) -> Diverged:
    """Return the error for local training that produced non-finite values."""
    return Diverged(f"the local training of client {client} produced NaN or infinity")


def local_steps(task: Task, job: Job, client: int, x: Moments) -> tuple[Moments, float]:
    """Take L steps from x, each on its own mini-batch; return the end and the mean loss."""
    return Trainer(task).local_steps(job, client, x)


class Trainer:
    """Trains clients one after another, with the model's parameters as views of one vector."""

    def __init__(self, task: Task) -> None:
        self.task, self.live = task, LiveBatches(task)
        self.w = task.layout.read(task.model)
        self.gradient = torch.zeros_like(self.w)
        self.model = self.bound_model()
        stages = read_stages(self.model, task.loss)
        self.recorded = lru_cache(maxsize=1)(partial(record, stages))
        self.is_batch_last = use_batch_last(self.model)
        self.is_channels_last = not self.is_batch_last
        self.is_format_checked = False

    def bound_model(self) -> nn.Module:
        """Return a copy of the model whose parameters and gradients are views of the vectors."""
        model = copy.deepcopy(self.task.model)
        self.task.layout.bind(model, self.w, self.gradient)
        return model

    def train(self, job: Job, client: int) -> ClientResult:
        """Run one client's round."""
        return train_client(
            self.task, job, client, lambda task, job, client, x: self.local_steps(job, client, x)
        )

    def local_steps(self, job: Job, client: int, x: Moments) -> tuple[Moments, float]:
        """Take L steps from x, each on its own mini-batch; return the end and the mean loss."""
        task, steps = self.task, job.phase.local_steps
        x, step, total = Moments(*(t.clone() for t in x)), fused(job.phase.step, x.w), 0.0
        self.model.train()
        with torch.random.fork_rng(devices=[]):
            # Without a GPU, seed only the CPU's generator: seeding all devices takes a millisecond.
            seed = torch.manual_seed if self.w.is_cuda else torch.default_generator.manual_seed
            seed(torch_seed(task.seed, "layers", job.round, client))
            for data, labels, rows in self.batches(job.round, client, steps):
                total += self.differentiate(x.w[0], data, labels, rows)
                # A copy, because a method may keep it and the next step overwrites the buffer.
                step(x, self.gradient[None].clone(), x.w)
        return x, total / steps

    def batches(self, round: int, client: int, steps: int) -> Iterator[Batch]:
        """Yield the batch of each step, as samples with the rows to use, or all if None."""
        task = self.task
        if task.is_live(client):
            for x, y in self.live.of_clients(round, (client,), steps):
                yield x, y, None
            return
        x, y = pair_of(task.clients[client])
        drawn = task.batches(round, client, steps)
        all_rows = None if drawn is None else torch.from_numpy(drawn).contiguous()
        for number in range(steps):
            yield x, y, None if all_rows is None else all_rows[number]

    def differentiate(
        self, w: Tensor, data: Tree, labels: Tree, rows: Tensor | None = None
    ) -> float:
        """Set the gradient to ∇f(w, batch) and return f. The batch is the given rows, or all."""
        self.w.copy_(w)
        batch = num_samples(data) if rows is None else len(rows)
        if has_recorded_format(data, labels) and (network := self.recorded(data.shape[1:], batch)):
            loss = network(data, labels, torch.arange(batch) if rows is None else rows)
            if loss is not None:
                return loss
        if rows is not None:
            data, labels = select_rows(data, rows), select_rows(labels, rows)
        return self.backpropagate(data, labels)

    def backpropagate(self, data: Tree, labels: Tree) -> float:
        """Set the gradient and return the loss by autograd, for any model and loss."""
        self.gradient.zero_()
        loss = self.task.loss(self.output(data), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    def output(self, data: Tree) -> Any:
        """Return the model's output, with images in the fastest memory format that it accepts."""
        if not self.is_format_checked:
            self._check_format(data)
        return self._call(data)

    def _check_format(self, data: Tree) -> None:
        """Return to the default memory format if the model accepts no other."""
        self.is_format_checked = True
        if not is_callable_with(self._call, data):
            self.model = self.bound_model().train(self.model.training)
            self.is_batch_last = self.is_channels_last = False

    def _call(self, data: Tree) -> Any:
        """Return the model's output, with images in the current memory format."""
        is_image = isinstance(data, Tensor) and data.dim() == 4
        is_converted = is_image and self.is_channels_last
        return call_model(self.model, channels_last(data) if is_converted else data)

    @torch.no_grad()
    def score(self, w: Tensor, chunk: int) -> Score:
        """Return the score of weights w on a chunk of the test set."""
        self.w.copy_(w)
        self.model.eval()
        data, labels = chunk_of_test_set(self.task, chunk)
        with torch.random.fork_rng(devices=[]):  # for models that are random in evaluation mode
            torch.default_generator.manual_seed(torch_seed(self.task.seed, "test", chunk))
            return score_output(self.task, self.output(data), labels)
