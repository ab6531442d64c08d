"""A client's local training, and the test of a model: what every CPU engine runs, in some order."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedsift.algorithms.method import Context, LocalUpdate, checked_message
from fedsift.codec.errors import NotFiniteError
from fedsift.codec.update import Update
from fedsift.engine.contract import ClientResult, Job
from fedsift.engine.cpu.batchlast import LANES, batch_last
from fedsift.engine.cpu.program import program_of, stages_of, takes
from fedsift.engine.fused import fused
from fedsift.errors import Diverged
from fedsift.seeding import torch_seed
from fedsift.task import (
    Data,
    Loss,
    Task,
    finite,
)
from fedsift.vector import Moments

LocalSteps = Callable[[Task, Job, int, Moments], tuple[Moments, float]]
"""A client's training: from the task, the job, the client and its start to its end and its loss."""

Score = tuple[int | None, float]
"""How many labels were found, and the sum of losses; None where accuracy means nothing: targets
that are not classes, one for each argmax."""

CHUNK = 1000
"""Test samples at a time: bounds memory, and a fixed size keeps the result reproducible."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside, torch uses one thread: faster for small operations, and always the same bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def train_client(task: Task, job: Job, client: int, steps: LocalSteps) -> ClientResult:
    """One client's round: begin, take the local steps, send."""
    phase, memory = job.phase, job.memory[client]
    start = phase.local_start(Moments(*(x[None] for x in job.state)), memory)
    end, loss = steps(task, job, client, start)
    if not finite(*end):
        raise Diverged(f"client {client}'s training left the finite numbers")
    context = Context(task.layout, job.round, task.seed, (client,))
    try:
        sent = phase.send(context, LocalUpdate(start, end), memory)
        parts, kept = checked_message(sent, memory, "send")
    except NotFiniteError:
        raise Diverged(f"client {client}'s update left the finite numbers") from None
    return ClientResult(client, Update(parts, (float(task.weight(client)),)), kept, loss)


def local_steps(task: Task, job: Job, client: int, x: Moments) -> tuple[Moments, float]:
    """L steps from x, each on its own mini-batch; and the mean loss."""
    return Trainer(task).local_steps(job, client, x)


class Trainer:
    """Trains clients one after another, the model's parameters laid end to end in one vector."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.w = task.layout.read(task.model)
        self.gradient = torch.zeros_like(self.w)
        self.model = self.bound_model()
        stages = stages_of(self.model, task.loss)
        self.program = lru_cache(maxsize=1)(partial(program_of, stages))
        self.is_batch_last = batch_last(self.model)
        self.is_channels_last = not self.is_batch_last
        self.is_settled = False

    def bound_model(self) -> nn.Module:
        """A copy of the model whose parameters and gradients are the two vectors."""
        model = copy.deepcopy(self.task.model)
        self.task.layout.bind(model, self.w, self.gradient)
        return model

    def train(self, job: Job, client: int) -> ClientResult:
        """One client's round."""
        return train_client(
            self.task, job, client, lambda task, job, client, x: self.local_steps(job, client, x)
        )

    def local_steps(self, job: Job, client: int, x: Moments) -> tuple[Moments, float]:
        """L steps from x, each on its own mini-batch; and the mean loss."""
        task, steps = self.task, job.phase.local_steps
        data, labels = task.clients[client]
        batches = task.batches(job.round, client, steps)
        chosen = None if batches is None else torch.from_numpy(batches).contiguous()
        x, step, total = Moments(*(t.clone() for t in x)), fused(job.phase.step, x.w), 0.0
        self.model.train()
        with torch.random.fork_rng(devices=[]):
            # Of the CPU's generator alone: the way for all devices takes a millisecond.
            seed = torch.manual_seed if data.is_cuda else torch.default_generator.manual_seed
            seed(torch_seed(task.seed, "layers", job.round, client))
            for number in range(steps):
                rows = None if chosen is None else chosen[number]
                total += self.differentiate(x.w[0], data, labels, rows)
                # A copy, as a method may keep it, and the next step would write over it.
                step(x, self.gradient[None].clone(), x.w)
        return x, total / steps

    def differentiate(
        self, w: Tensor, data: Tensor, labels: Tensor, rows: Tensor | None = None
    ) -> float:
        """Set the gradient to ∇f(w, batch), and give f. A batch is some rows, or all."""
        self.w.copy_(w)
        batch = len(data) if rows is None else len(rows)
        if takes(data, labels) and (program := self.program(data.shape[1:], batch)):
            loss = program(data, labels, torch.arange(batch) if rows is None else rows)
            if loss is not None:
                return loss
        if rows is not None:
            there = rows.to(data.device)
            data, labels = data.index_select(0, there), labels.index_select(0, there)
        return self.follow(data, labels)

    def follow(self, data: Tensor, labels: Tensor) -> float:
        """The same by autograd, for any network and loss."""
        self.gradient.zero_()
        loss = self.task.loss(self.forward(data), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    def forward(self, data: Tensor) -> Tensor:
        """The model's output, images in the memory order that runs fastest."""
        if not self.is_settled:
            self.settle(data)
        return self.call(data)

    def settle(self, data: Tensor) -> None:
        """Leave memory in its usual order for a model that takes no other."""
        self.is_settled = True
        if not runs(self.call, data):
            self.model = self.bound_model().train(self.model.training)
            self.is_batch_last = self.is_channels_last = False

    def call(self, data: Tensor) -> Tensor:
        """The model's output, images in the order that was settled."""
        is_moved = data.dim() == 4 and self.is_channels_last
        output: Tensor = self.model(channels_last(data) if is_moved else data)
        return output

    @torch.no_grad()
    def score(self, w: Tensor, chunk: int) -> Score:
        """How weights w do on a chunk of the test set."""
        self.w.copy_(w)
        self.model.eval()
        data, labels = test_chunk(self.task, chunk)
        with torch.random.fork_rng(devices=[]):  # for models that are random even now
            torch.default_generator.manual_seed(torch_seed(self.task.seed, "test", chunk))
            return score(self.task, self.forward(data), labels)


def channels_last(images: Tensor) -> Tensor:
    """Images with their channels innermost, and strides that say so even if there is but one.

    >>> channels_last(torch.zeros(2, 1, 4, 4)).stride()
    (16, 1, 4, 1)
    """
    _, channels, height, width = images.shape
    strides = (channels * height * width, 1, channels * width, channels)
    return images.contiguous(memory_format=torch.channels_last).as_strided(images.shape, strides)


def runs(call: Callable[[Tensor], object], data: Tensor) -> bool:
    """Whether a model can be called so: in some orders of memory, its own ``view`` may fail.

    >>> runs(lambda x: x.view(len(x), -1), torch.zeros(1, 2, 2))
    True
    >>> runs(lambda x: x.transpose(1, 2).view(len(x), -1), torch.zeros(1, 2, 2))
    False
    """
    few = data[:1].expand(LANES, *data.shape[1:]).contiguous()
    try:
        with torch.no_grad(), torch.random.fork_rng([data.device] if data.is_cuda else []):
            call(few)
    except RuntimeError:
        return False
    return True


def test_chunk(task: Task, chunk: int) -> Data:
    """A chunk of the test set."""
    assert task.test is not None
    x, y = task.test
    rows = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
    return x[rows], y[rows]


def score(task: Task, output: Any, labels: Tensor) -> Score:
    """How many labels are found, and the sum of losses."""
    loss = float(task.loss(output, labels)) * len(labels)
    is_found = labels_found(output, labels, axis_of_classes(task.loss))
    return (None if is_found is None else int(is_found.sum())), loss


def axis_of_classes(loss: Loss) -> int:
    """Where the classes are in what a loss takes: the second axis of PyTorch's own, or the last."""
    return 1 if loss is cross_entropy else -1


def labels_found(output: Any, labels: Tensor, axis: int = -1) -> Tensor | None:
    """Which labels are found; None where they are not classes, one for each argmax.

    >>> labels_found(torch.tensor([[0.1, 0.9]]), torch.tensor([1])), labels_found((), torch.ones(1))
    (tensor([True]), None)
    """
    if not isinstance(output, Tensor) or labels.is_floating_point() or output.dim() <= max(axis, 0):
        return None
    found = output.argmax(axis)
    return found == labels if found.shape == labels.shape else None


def chunks_of(task: Task) -> range:
    """The chunks of the test set."""
    return range(0 if task.test is None else -(-len(task.test[0]) // CHUNK))


def total_score(task: Task, scores: list[Score]) -> tuple[float | None, float | None]:
    """Accuracy (for class labels) and mean loss from all chunks' scores."""
    if task.test is None:
        return None, None
    right = [found for found, _ in scores if found is not None]
    accuracy = sum(right) / task.test[1].numel() if len(right) == len(scores) else None
    return accuracy, sum(loss for _, loss in scores) / len(task.test[0])
