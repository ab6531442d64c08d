"""The local training of one client: shared by all CPU engines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedsift.algorithms.checks import DeclaredMemory, checked_message, checked_points, checked_start
from fedsift.algorithms.method import Context, LocalUpdate, Memory, Phase
from fedsift.algorithms.step_context import StepContext
from fedsift.codec.errors import NotFiniteError
from fedsift.codec.update import Update
from fedsift.codec.value_coder import at_least_float32
from fedsift.engine.batches import LiveBatches
from fedsift.engine.contract import ClientResult, Job
from fedsift.engine.cpu.batch_last import use_batch_last
from fedsift.engine.cpu.recorded import has_recorded_format, read_stages, record
from fedsift.engine.fused import fused
from fedsift.engine.memory_format import channels_last, is_callable_with
from fedsift.engine.scoring import Score, chunk_of_test_set, score_output
from fedsift.errors import Diverged
from fedsift.seeding import torch_seed
from fedsift.task import NumSteps, Task
from fedsift.task.samples import Pair, Tree, call_model, num_samples, pair_of, select_rows
from fedsift.vector import State, all_finite, copy_sharing_frozen


class Trained(NamedTuple):
    """The end of a client's local training: the state, its memory, and the mean loss."""

    end: State
    memory: Memory
    loss: float


LocalTraining = Callable[[Task, Job, int, State], Trained]
"""A client's local training: (task, job, client, start) to its end."""
Batch = tuple[Tree, Tree, Tensor | None]
"""Inputs, labels, and the rows of them to use; None uses all."""


def train_client(task: Task, job: Job, client: int, steps: LocalTraining) -> ClientResult:
    """Run one client's round: local start, local steps, send."""
    phase, memory = job.phase, DeclaredMemory(job.memory[client])
    state = job.state.map(lambda x: x[None])
    start = checked_start(phase.local_start(state, memory), state)
    trained = steps(task, replace(job, memory={client: memory}), client, start)
    context = Context.of(task, job.round, job.state, (client,))
    return client_result(job.phase, context, start, trained, task.weight(client, job.weights))


def client_result(
    phase: Phase, context: Context, start: State, trained: Trained, weight: float
) -> ClientResult:
    """Return what a client sends after its local training."""
    (client,) = context.clients
    if not all_finite(*trained.end):
        raise diverged_client(client)
    try:
        sent = phase.send(context, LocalUpdate(start, trained.end), trained.memory)
        parts, new_memory = checked_message(sent, trained.memory, "send")
    except NotFiniteError:
        raise Diverged(f"the update of client {client} contains NaN or infinity") from None
    return ClientResult(client, Update(parts, (weight,)), new_memory, trained.loss)


def step_context(task: Task, round: int, start: State, memory: Memory) -> StepContext:
    """Return the context of a client's steps. They may change a copy of its memory."""
    return StepContext(
        task.seed,
        lambda number: number_for(start.w, number),
        round,
        lambda: start,
        lambda: DeclaredMemory({name: x.clone() for name, x in memory.items()}),
    )


def number_for(w: Tensor, number: int) -> Tensor:
    """Return a number of a round or a step as a tensor, for computations with weights w.

    >>> number_for(torch.zeros(1, dtype=torch.bfloat16), 257)
    tensor(257.)
    """
    return torch.tensor(float(number), dtype=at_least_float32(w.dtype), device=w.device)


def selected(data: Tree, labels: Tree, rows: Tensor | None) -> Pair:
    """Return the given rows of a client's data; all if there are none given."""
    return (data, labels) if rows is None else (select_rows(data, rows), select_rows(labels, rows))


def diverged_client(client: int) -> Diverged:
    """Return the error for local training that produced non-finite values."""
    return Diverged(f"the local training of client {client} produced NaN or infinity")


def local_steps(task: Task, job: Job, client: int, x: State) -> Trained:
    """Take L steps from x, each on its own mini-batch."""
    return Trainer(task).local_steps(job, client, x)


class Trainer:
    """Trains clients one after another, with the model's parameters as views of one vector."""

    def __init__(self, task: Task) -> None:
        self.task, self.live = task, LiveBatches(task)
        self.w, _ = task.layout.split(task.layout.read(task.model))
        self.gradient = torch.zeros_like(self.w)
        self.model = self.bound_model()
        stages = read_stages(self.model, task.loss)
        self.recorded = lru_cache(maxsize=1)(partial(record, stages))
        self.is_batch_last = use_batch_last(self.model)
        self.is_channels_last = not self.is_batch_last
        self.is_format_checked = False

    def bound_model(self) -> nn.Module:
        """Return a copy of the model whose parameters and gradients are views of the vectors."""
        model = copy_sharing_frozen(self.task.model)
        self.task.layout.bind(model, self.w, self.gradient)
        return model

    def train(self, job: Job, client: int) -> ClientResult:
        """Run one client's round."""
        return train_client(
            self.task, job, client, lambda task, job, client, x: self.local_steps(job, client, x)
        )

    def local_steps(self, job: Job, client: int, start: State) -> Trained:
        """Take L steps from the start, each on its own mini-batch."""
        task, phase, memory = self.task, job.phase, job.memory[client]
        x, step, losses = start.map(torch.clone), fused(phase.step, start.w), []
        context = step_context(task, job.round, start, memory)
        task.train_mode(self.model)
        if task.layout.buffers:
            task.layout.write_buffers(x.b[0], self.model)
        with torch.random.fork_rng(devices=[]):
            self.seed_layers(torch_seed(task.seed, "layers", job.round, client))
            batches = self.batches(job.round, client, phase.local_steps)
            for number, batch in enumerate(batches, 1):
                context.advance()
                if phase.points is None:
                    losses.append(self.differentiate(x.w[0], *batch))
                    # A copy, because a method may keep it and the next step overwrites the buffer.
                    observed = self.gradient[None].clone()
                else:
                    seed = torch_seed(task.seed, "points", job.round, client, number)
                    points = checked_points(phase.points(x, context), x.w)
                    observed = self.losses_at(points, seed, *batch)
                    losses.append(float(observed.mean()))
                step(x, observed, x.w, context)
        if task.layout.buffers:
            x.b.copy_(task.layout.read_buffers(self.model))
        memory = context.memory if context.was_read("memory") else memory
        return Trained(x, memory, sum(losses) / len(losses))

    def seed_layers(self, seed: int) -> None:
        """Seed the generators from which random layers, such as dropout, draw."""
        # Without a GPU, seed only the CPU's generator: seeding all devices takes a millisecond.
        manual_seed = torch.manual_seed if self.w.is_cuda else torch.default_generator.manual_seed
        manual_seed(seed)

    @torch.no_grad()
    def losses_at(
        self, points: Iterable[Tensor], seed: int, data: Tree, labels: Tree, rows: Tensor | None
    ) -> Tensor:
        """Return the losses ``(1, points)`` of a mini-batch at the given weights.

        Random layers draw the same numbers at every point. The points have a generator of their
        own, so that they may also be random.
        """
        data, labels = selected(data, labels, rows)
        losses = []
        for point in points:
            self.w.copy_(point[0])
            with torch.random.fork_rng([self.w.device] if self.w.is_cuda else []):
                self.seed_layers(seed)
                losses.append(self.task.loss(self.output(data), labels).to(self.w))
        return torch.stack(losses)[None]

    def batches(self, round: int, client: int, steps: NumSteps) -> Iterator[Batch]:
        """Yield the batch of each step, as samples with the rows to use, or all if None."""
        task = self.task
        if task.is_live(client):
            for x, y in self.live.of_clients(round, (client,), steps):
                yield x, y, None
            return
        x, y = pair_of(task.clients[client])
        drawn = task.batches(round, client, steps)
        all_rows = None if drawn is None else torch.from_numpy(drawn).contiguous()
        for number in range(task.num_steps(client, steps)):
            yield x, y, None if all_rows is None else all_rows[number]

    def differentiate(
        self, w: Tensor, data: Tree, labels: Tree, rows: Tensor | None = None
    ) -> float:
        """Set the gradient to ∇f(w, batch) and return f. The batch is the given rows, or all."""
        self.w.copy_(w)
        batch = num_samples(data) if rows is None else len(rows)
        if has_recorded_format(data, labels) and (network := self.recorded(data.shape[1:], batch)):
            loss = network(data, labels, rows)
            if loss is not None:
                return loss
        return self.backpropagate(*selected(data, labels, rows))

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
        layout, is_training = self.task.layout, self.model.training
        buffers = layout.read_buffers(self.model)
        if not is_callable_with(self._call, data):
            self.model = self.bound_model()
            self.model = self.task.train_mode(self.model) if is_training else self.model.eval()
            self.is_batch_last = self.is_channels_last = False
        layout.write_buffers(buffers, self.model)

    def _call(self, data: Tree) -> Any:
        """Return the model's output, with images in the current memory format."""
        is_image = isinstance(data, Tensor) and data.dim() == 4
        is_converted = is_image and self.is_channels_last
        return call_model(self.model, channels_last(data) if is_converted else data)

    @torch.no_grad()
    def score(self, values: Tensor, chunk: int) -> Score:
        """Return the score of the model's values on a chunk of the test set."""
        w, b = self.task.layout.split(values)
        self.w.copy_(w)
        if b.numel():
            self.task.layout.write_buffers(b, self.model)
        self.model.eval()
        data, labels = chunk_of_test_set(self.task, chunk)
        with torch.random.fork_rng(devices=[]):  # for models that are random in evaluation mode
            torch.default_generator.manual_seed(torch_seed(self.task.seed, "test", chunk))
            return score_output(self.task, self.output(data), labels)
