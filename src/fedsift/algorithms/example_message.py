"""What a method's clients send for example, which shows the form of its messages."""

from __future__ import annotations

import torch
from torch import Tensor

from fedsift.algorithms.method import Algorithm, Context, LocalUpdate, Memory, zero_memory
from fedsift.codec.update import Parts
from fedsift.vector import Layout


def example_message(algorithm: Algorithm, context: Context, seed: int = 0) -> Parts:
    """Return what a client sends for random changes of all vectors, and a random memory.

    All random numbers are between 0 and 1, so that a method may divide by them.
    """
    draw = torch.Generator().manual_seed(seed)

    def plus_random(x: Tensor) -> Tensor:
        return x + torch.rand(x.shape, generator=draw).to(x)

    phase = algorithm.phase(context.round)
    zeros = zero_memory(algorithm.client_memory, context.layout, context.state.w)
    memory: Memory = {name: plus_random(x) for name, x in zeros.items()}
    start = phase.local_start(context.state.map(lambda x: x[None]), memory)
    parts, _ = phase.send(context, LocalUpdate(start, start.map(plus_random)), memory)
    return parts


def small_context(algorithm: Algorithm, layout: Layout, round: int = 1, client: int = 0) -> Context:
    """Return the context of a round of a small model without a task, whose weights are zero."""
    layout = algorithm.layout_for(layout)
    state = algorithm.initial_state(layout, torch.zeros(layout.d))
    return Context(layout, round, 0, (client,), state)


def smallest_message(algorithm: Algorithm) -> Parts:
    """Return what a client sends in round 1, for a model with two parameters.

    It is empty for methods that send more than differences, and so need a real model.

    >>> from fedsift.algorithms import fedadam
    >>> [tuple(part.values) for part in smallest_message(fedadam())]
    [('w', 'm', 'v')]
    """
    try:
        return example_message(algorithm, small_context(algorithm, SMALLEST))
    except ValueError:
        return ()


SMALLEST = Layout(("w",), ((2,),), torch.float32)
"""The layout of a model with two parameters."""
