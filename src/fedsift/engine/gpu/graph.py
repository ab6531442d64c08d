"""Recording a step as a CUDA graph: the only part of the engine that needs a GPU to be tried."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from fedsift.engine.gpu.unsupported import UnsupportedModel

WARM_UP_STEPS = 3
"""Steps before the graph is captured: libraries initialize themselves in their first calls."""


class Graph(Protocol):
    """A recorded step."""

    def replay(self) -> None:
        """Take the step again, on what is in its memory now."""


def can_capture(device: torch.device) -> bool:
    """Whether steps on a device can be recorded as graphs.

    >>> can_capture(torch.device("cpu"))
    False
    """
    return device.type == "cuda"


def capture(take: Callable[[], None]) -> Graph:
    """Take some steps, and record one more. Raises whatever a step raises while it is recorded."""
    stream = new_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP_STEPS):
            take()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    reasons: list[Exception] = []
    try:
        with torch.cuda.graph(graph, stream=new_stream()):  # a failed capture spoils its stream
            try:
                record(take)
            except Exception as problem:  # ending the capture may hide it behind another
                reasons.append(problem)
                raise
    except Exception as problem:
        replace_generator()
        raise (reasons or [problem])[0] from None
    return graph


def record(take: Callable[[], None]) -> None:
    """Take the step that a graph records. The numbers that it draws on the host would not change.

    >>> record(lambda: None)
    >>> record(random.random)
    Traceback (most recent call last):
    ...
    fedsift.engine.gpu.unsupported.UnsupportedModel: it draws random numbers on the CPU
    """
    before = random_state()
    take()
    if random_state() != before:
        raise UnsupportedModel("it draws random numbers on the CPU")


def random_state(device: torch.device | None = None) -> tuple[object, ...]:
    """Return the states of all random generators of the host, and of a GPU if one is given.

    >>> before = random_state()
    >>> random_state() == before
    True
    >>> _ = torch.rand(1)
    >>> random_state() == before
    False
    """
    states = [torch.get_rng_state()]
    if device is not None and device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    _, numbers, *place = np.random.get_state()  # noqa: NPY002  (a model may use it)
    drawn = (x.numpy().tobytes() for x in states)
    return (*drawn, np.asarray(numbers).tobytes(), *place, random.getstate())


def replace_generator() -> None:
    """Give the GPU's random generator a new state, after a capture that failed.

    The old state may believe that it is still being captured, and would refuse to draw numbers.
    """
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    fresh = torch.Generator(generator.device)
    generator.graphsafe_set_state(fresh.graphsafe_get_state())


def new_stream() -> torch.cuda.Stream:
    """Return a new stream of the current device."""
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]
