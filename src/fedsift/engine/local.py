"""A client's local training, and the test of a model: what every CPU engine runs, in some order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.func import functional_call

from fedsift.algorithms.method import Context
from fedsift.codec.errors import NotFiniteError
from fedsift.codec.update import Update
from fedsift.engine.task import ClientResult, Diverged, Job, Task, finite
from fedsift.seeding import torch_seed
from fedsift.vector import Moments

LocalSteps = Callable[[Task, Job, int, Moments], tuple[Moments, float]]
"""A client's training: from the task, the job, the client and its start to its end and its loss."""

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


def train_client(
    task: Task, job: Job, client: int, steps: LocalSteps | None = None
) -> ClientResult:
    """One client's round: begin, step L times (or as ``steps`` does it), send."""
    phase, memory = job.phase, job.memory[client]
    start = phase.begin(Moments(*(x[None] for x in job.state)), memory)
    end, loss = (steps or local_steps)(task, job, client, start)
    if not finite(*end):
        raise Diverged(f"client {client}'s training left the finite numbers")
    context = Context(task.layout, job.round, task.seed, (client,))
    try:
        parts, kept = phase.send(context, start, end, memory)
    except NotFiniteError:
        raise Diverged(f"client {client}'s update left the finite numbers") from None
    return ClientResult(client, Update(parts, (float(task.weight(client)),)), kept, loss)


def local_steps(task: Task, job: Job, client: int, x: Moments) -> tuple[Moments, float]:
    """L steps from x, each on its own mini-batch; and the mean loss."""
    steps = job.phase.local_steps
    data, labels = task.clients[client]
    batches = task.batches(job.round, client, steps)
    total = 0.0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch_seed(task.seed, "layers", job.round, client))
        for step in range(steps):
            rows = slice(None) if batches is None else torch.from_numpy(batches[step])
            gradient, loss = gradient_of(task, x.w[0], data[rows], labels[rows])
            x = job.phase.step(x, gradient[None])
            total += float(loss)
    return x, total / steps


def gradient_of(task: Task, w: Tensor, data: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """∇f(w, batch) as a flat vector, and f itself."""
    flat = w.detach().requires_grad_()
    task.model.train()
    loss = task.loss(functional_call(task.model, parameters_of(task, flat), (data,)), labels)
    (gradient,) = torch.autograd.grad(loss, flat)
    return gradient, loss.detach()


def parameters_of(task: Task, w: Tensor) -> dict[str, Tensor]:
    """The model's named parameters; those of convolutions in the order that runs fastest."""
    named = task.layout.unflatten(w)
    fast = torch.channels_last
    return {n: p.contiguous(memory_format=fast) if p.dim() == 4 else p for n, p in named.items()}


@torch.no_grad()
def score_chunk(task: Task, w: Tensor, chunk: int) -> tuple[int | None, float]:
    """How many labels of a chunk of the test set are found, and the sum of losses.

    None where accuracy means nothing: targets that are not classes, one for each argmax.
    """
    assert task.test is not None
    data, labels = (x[chunk * CHUNK : (chunk + 1) * CHUNK] for x in task.test)
    task.model.eval()
    output = functional_call(task.model, parameters_of(task, w), (data,))
    loss = float(task.loss(output, labels)) * len(data)
    found = output.argmax(-1)
    is_classes = not labels.is_floating_point() and found.shape == labels.shape
    return (int((found == labels).sum()) if is_classes else None), loss


def chunks_of(task: Task) -> range:
    """The chunks of the test set."""
    return range(0 if task.test is None else -(-len(task.test[0]) // CHUNK))


def total_score(
    task: Task, scores: list[tuple[int | None, float]]
) -> tuple[float | None, float | None]:
    """Accuracy (for class labels) and mean loss from all chunks' scores."""
    if task.test is None:
        return None, None
    right = [found for found, _ in scores if found is not None]
    accuracy = sum(right) / task.test[1].numel() if len(right) == len(scores) else None
    return accuracy, sum(loss for _, loss in scores) / len(task.test[0])
