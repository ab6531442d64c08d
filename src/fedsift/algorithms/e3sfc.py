"""E-3SFC: each update travels as one synthetic sample whose gradient resembles it, both ways.

Y. Zhou, Y. Tian, M. Shi, Y. Li, Y. Sun, Q. Ye and J. Lv, "E-3SFC: Communication-Efficient Federated
Learning with Double-way Features Synthesizing", 2025 (arXiv 2502.03092).

A client searches for an input x and a label y, a number per output of the model, such that the
gradient of the loss at the global weights points where its update does. It sends x, y and a factor
s. Everyone who knows the model can compute s∇. Clients and the server keep what was not sent.

The search is gradient descent from a random sample. The authors' code uses L-BFGS. The paper's
schedule of how many samples are sent is left out: one sample is sent.
"""

from __future__ import annotations

import math
from typing import Annotated

import torch
from torch import Tensor

from fedsift.algorithms.fedsgd import SgdStep
from fedsift.algorithms.method import Algorithm, Context, LocalUpdate, Memory, Phase, always
from fedsift.algorithms.registry import method
from fedsift.algorithms.settings import COUNT, POSITIVE, LearningRate, LocalSteps, Setting
from fedsift.codec.update import Parts, dense
from fedsift.seeding import torch_seed
from fedsift.task.threads import one_thread
from fedsift.vector import Layout, SampleShapes, State

SampleSteps = Annotated[int, Setting("Steps of the search for a synthetic sample", COUNT)]
SampleLearningRate = Annotated[
    float, Setting("Learning rate of the search for a synthetic sample", POSITIVE)
]
SERVER = -1
"""The server's place among the clients, for its random numbers."""
TINY = 1e-30
"""Smaller squares count as zero."""


@method("e3sfc", label="E-3SFC", color="#b8860b")
def e3sfc(
    sample_steps: SampleSteps = 30,
    sample_lr: SampleLearningRate = 10.0,
    local_steps: LocalSteps = 5,
    lr: LearningRate = 0.05,
) -> Algorithm:
    """Local SGD; one synthetic sample, whose gradient resembles the update, is sent each way.

    Uplink per client and round: the sample, its label and a factor, whatever d is.

    The inputs must be tensors of floating-point numbers, and the loss must accept labels of the
    form of the model's output, as :func:`torch.nn.functional.cross_entropy` does.

    >>> e3sfc(lr=0.1).makes_samples
    True
    """

    def compress(context: Context, residual: Tensor, place: int) -> Tensor:
        x, y = random_sample(context, place)
        with one_thread():
            x, y = search_sample(context, residual, x, y, sample_steps, sample_lr)
            s = best_factor(sample_gradient(context, context.state.w, x, y), residual)
        return torch.cat([x.flatten(), y.flatten(), s[None]]).to(residual)

    def send(context: Context, update: LocalUpdate, memory: Memory) -> tuple[Parts, Memory]:
        residuals = memory["residual"] + update.delta_w
        places = zip(residuals, context.clients, strict=True)
        payload = torch.stack([compress(context, r, client) for r, client in places])
        sent = decompressed(context, context.state.w, payload)
        return dense({"p": payload}), {"residual": residuals - sent}

    def receive(context: Context, state: State, parts: Parts) -> Parts:
        (part,) = parts
        return dense({"w": decompressed(context, state.w, part.values["p"].restore())})

    def broadcast(context: Context, mean: State, memory: Memory) -> tuple[Parts, Memory]:
        residual = memory["residual"] + mean.w
        payload = compress(context, residual[0], SERVER)[None]
        sent = decompressed(context, context.state.w, payload)
        return dense({"p": payload}), {"residual": residual - sent}

    def apply(context: Context, state: State, received: State) -> State:
        return state.replace(w=state.w + decompressed(context, state.w, received.p[None])[0])

    phase = Phase(
        local_steps,
        SgdStep(lr),
        send,
        paper_bits=lambda d: 0,  # besides the sample
        broadcast=broadcast,
        apply=apply,
        receive=receive,
    )
    return Algorithm(
        always(phase),
        client_memory=("residual",),
        server_memory=("residual",),
        state=("w",),
        lengths={"p": payload_length},
        weights="equal",
        makes_samples=True,
    )


def shapes_in(layout: Layout) -> SampleShapes:
    """Return the shapes of an input and of its label; raise ValueError if they are not known."""
    if layout.sample_shapes is None:
        raise ValueError("a method that synthesizes samples needs layout.with_sample_shapes(...)")
    return layout.sample_shapes


def payload_length(layout: Layout) -> int:
    """Return how many numbers a message holds: the input, its label and the factor."""
    return sum(map(math.prod, shapes_in(layout))) + 1


def random_sample(context: Context, place: int) -> tuple[Tensor, Tensor]:
    """Return an input and a label of standard normal numbers, with which a search begins."""
    w = context.state.w
    seed = torch_seed(context.seed, "sample", context.round, place + 1)
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(s, generator=generator).to(w) for s in shapes_in(context.layout))
    return x, y


def search_sample(
    context: Context, target: Tensor, x: Tensor, y: Tensor, steps: int, lr: float
) -> tuple[Tensor, Tensor]:
    """Descend on 1 − |cos(∇f(W; x, y), target)| from the sample (x, y)."""
    for _ in range(steps):
        x, y = x.detach().requires_grad_(), y.detach().requires_grad_()
        with torch.enable_grad():
            distance = 1 - cosine(sample_gradient(context, context.state.w, x, y), target).abs()
            dx, dy = torch.autograd.grad(distance, (x, y))
        x, y = x - lr * dx, y - lr * dy
    return x.detach(), y.detach()


def sample_gradient(context: Context, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return ∇f(w; x, y) ``(d,)`` for one sample."""
    return context.gradient(w, x[None], y[None])


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Return the cosine of the angle between two vectors; 0 if one of them is zero.

    >>> cosine(torch.tensor([3.0, 4.0]), torch.tensor([1.0, 0.0]))
    tensor(0.6000)
    """
    lengths = torch.linalg.vector_norm(a) * torch.linalg.vector_norm(b)
    cosine: Tensor = a.dot(b) / lengths.clamp(min=TINY)
    return cosine


def best_factor(gradient: Tensor, target: Tensor) -> Tensor:
    """Return s = cos ‖target‖ / ‖gradient‖, for which s∇ is closest to the target.

    >>> best_factor(torch.tensor([3.0, 0.0]), torch.tensor([1.0, 1.0]))
    tensor(0.3333)
    """
    return gradient.dot(target) / gradient.dot(gradient).clamp(min=TINY)


def decompressed(context: Context, w: Tensor, payload: Tensor) -> Tensor:
    """Return s∇f(w; x, y) for each row of a payload ``(n, length)``, as ``(n, d)``."""
    shapes = shapes_in(context.layout)
    sizes = [*map(math.prod, shapes), 1]
    rows = []
    for row in payload:
        x, y, s = row.split(sizes)
        x, y = (each.view(shape) for each, shape in zip((x, y), shapes, strict=True))
        rows.append(s * sample_gradient(context, w, x, y))
    return torch.stack(rows)
