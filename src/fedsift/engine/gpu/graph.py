"""Recording a step as a CUDA graph: the only part of the engine that needs a GPU to be tried."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

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
                take()
            except Exception as problem:  # ending the capture may hide it behind another
                reasons.append(problem)
                raise
    except Exception as problem:
        replace_generator()
        raise (reasons or [problem])[0] from None
    return graph


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
