"""Choosing how the gradients of a stack are computed: the fastest way that works on real data.

Each way is tried, from the fastest to the one that runs every model that trains in plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from fedsift.engine.gpu.gradients import (
    SingleGradients,
    StackGradients,
    StreamGradients,
    VmapGradients,
    layer_gradients,
)
from fedsift.engine.gpu.losses import LayerPointLosses, PointLosses, VmapPointLosses
from fedsift.engine.gpu.one_batch.gradients import OneBatchGradients
from fedsift.engine.gpu.stacked_task import StackedTask
from fedsift.engine.gpu.unsupported import reason_of

T = TypeVar("T")


@dataclass(frozen=True)
class Way:
    """A way to compute what a step observes: its name, and the function that prepares it.

    ``has_graph`` says whether the step is recorded as a CUDA graph where there is a GPU.
    """

    name: str
    prepare: Callable[[StackedTask, int], StackGradients | PointLosses]
    has_graph: bool = True


GRADIENTS = (
    Way("all clients at once, by layers", layer_gradients),
    Way("all clients in one batch", OneBatchGradients),
    Way("all clients at once, by torch.vmap", VmapGradients),
    Way("one stream per client", StreamGradients),
    Way("one client after another", SingleGradients, has_graph=False),
)
"""How gradients are computed, from the fastest way to the one that runs every model."""
LOSSES = (
    Way("all clients at once, by layers", LayerPointLosses),
    Way("all clients at once, by torch.vmap", VmapPointLosses),
    Way("one client after another", PointLosses),
    Way("one client after another, without a graph", PointLosses, has_graph=False),
)
"""The same for the losses of methods without gradients."""


@dataclass(frozen=True)
class Chosen(Generic[T]):
    """The way that works, what trying it returned, and why faster ones do not work."""

    way: Way
    result: T
    refused: tuple[tuple[str, str], ...] = ()

    @property
    def line(self) -> str:
        """What was chosen and why, in one line.

        >>> Chosen(GRADIENTS[3], None, (("by torch.vmap", "layer LSTM"),)).line
        'local training runs one stream per client; not by torch.vmap: layer LSTM'
        """
        reasons = [f"not {name}: {reason}" for name, reason in self.refused]
        return "; ".join([f"local training runs {self.way.name}", *reasons])


def first_that_works(ways: Iterable[Way], attempt: Callable[[Way], T]) -> Chosen[T]:
    """Try the ways in order. The last one is not expected to fail: its error is the model's own.

    >>> chosen = first_that_works(GRADIENTS, lambda way: 1 / int("stream" in way.name))
    >>> chosen.way.name, chosen.refused[0]
    ('one stream per client', ('all clients at once, by layers', 'ZeroDivisionError: ...'))
    """
    refused: list[tuple[str, str]] = []
    *faster, last = ways
    for way in faster:
        try:
            return Chosen(way, attempt(way), tuple(refused))
        except Exception as problem:  # a forward pass or a capture may raise anything
            refused.append((way.name, reason_of(problem)))
    return Chosen(last, attempt(last), tuple(refused))
