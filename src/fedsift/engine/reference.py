"""The obviously right engine: one client after another, one step after another.

The fast engines are tested against it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.func import functional_call

from fedsift.algorithms.method import Context
from fedsift.codec.errors import NotFiniteError
from fedsift.codec.update import Update
from fedsift.engine.task import ClientResult, Diverged, Job, Task, finite
from fedsift.seeding import torch_seed
from fedsift.vector import Moments


class Reference:
    """Runs the cohort in a plain loop on the CPU, or wherever the task's tensors are."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def train(self, job: Job) -> Iterator[ClientResult]:
        """Every cohort member's result, one after another."""
        return (self._client(job, client) for client in job.cohort)

    def _client(self, job: Job, client: int) -> ClientResult:
        task, phase = self.task, job.phase
        memory = job.memory[client]
        start = phase.begin(Moments(*(x[None] for x in job.state)), memory)
        end, loss = self._local_training(job, client, start)
        if not finite(*end):
            raise Diverged(f"client {client}'s training left the finite numbers")
        context = Context(task.layout, job.round, task.seed, (client,))
        try:
            parts, kept = phase.send(context, start, end, memory)
        except NotFiniteError:
            raise Diverged(f"client {client}'s update left the finite numbers") from None
        return ClientResult(client, Update(parts, (float(task.weight(client)),)), kept, loss)

    def _local_training(self, job: Job, client: int, x: Moments) -> tuple[Moments, float]:
        """L steps from x, each on its own mini-batch."""
        steps = job.phase.local_steps
        data, labels = self.task.clients[client]
        batches = self.task.batches(job.round, client, steps)
        total = 0.0
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(torch_seed(self.task.seed, "layers", job.round, client))
            for step in range(steps):
                rows = slice(None) if batches is None else torch.from_numpy(batches[step])
                gradient, loss = self._gradient(x.w[0], data[rows], labels[rows])
                x = job.phase.step(x, gradient[None])
                total += float(loss)
        return x, total / steps

    def _gradient(self, w: Tensor, data: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """∇f(w, batch) as a flat vector, and f itself."""
        model, layout = self.task.model, self.task.layout
        parameters = {n: p.requires_grad_() for n, p in layout.unflatten(w.detach()).items()}
        model.train()
        loss = self.task.loss(functional_call(model, parameters, (data,)), labels)
        gradients = torch.autograd.grad(loss, tuple(parameters.values()))
        return layout.flatten(dict(zip(parameters, gradients, strict=True))), loss.detach()

    @torch.no_grad()
    def evaluate(self, w: Tensor) -> tuple[float | None, float | None]:
        """Accuracy (for class labels) and mean loss on the test set, in chunks."""
        task = self.task
        if task.test is None:
            return None, None
        data, labels = task.test
        task.model.eval()
        right, loss = 0, 0.0
        for x, y in zip(torch.split(data, CHUNK), torch.split(labels, CHUNK), strict=True):
            output = functional_call(task.model, task.layout.unflatten(w), (x,))
            loss += float(task.loss(output, y)) * len(x)
            if is_class_labels(labels):
                right += int((output.argmax(-1) == y).sum())
        accuracy = right / len(data) if is_class_labels(labels) else None
        return accuracy, loss / len(data)


CHUNK = 1000
"""Test samples at a time: bounds memory, and a fixed size keeps the result reproducible."""


def is_class_labels(labels: Tensor) -> bool:
    """Whether accuracy means anything: whole numbers, not regression targets."""
    return not labels.is_floating_point()
