"""Counts the CUDA graphs of a stack's steps, and stands in for them where there is no GPU."""

from dataclasses import dataclass, field

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fedsift.engine import Stacked
from fedsift.engine.gpu import graph
from fedsift.engine.gpu.graph_step import GraphStep

aten = torch.ops.aten
DEPENDS_ON_VALUES = {
    aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default,
    aten.equal.default, aten._unique2.default, aten.repeat_interleave.Tensor,
}  # fmt: skip
"""Operations of which the host would have to wait for the result, or for its size."""
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}


class Recording(TorchDispatchMode):
    """Refuses what a CUDA graph cannot record."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_mask = func in INDEXING and any(x is not None and x.dtype == torch.bool for x in args[1])
        is_copied = func is aten.lift_fresh.default and args[0].dim() > 0
        if func in DEPENDS_ON_VALUES or is_mask or is_copied:
            raise RuntimeError(f"{func} cannot be recorded")
        return func(*args, **(kwargs or {}))


@dataclass
class Replayed:
    """A graph that calls a function."""

    replay: object


def pretended(take):
    """Warm up and record as a GPU does, and return a graph that takes the step again."""
    for _ in range(graph.WARM_UP_STEPS):
        take()
    with Recording():
        graph.record(take)
    return Replayed(take)


@dataclass
class Graphs:
    """The graphs that were captured, for how many kinds of steps, and how often they replayed."""

    captured: int = 0
    replayed: int = 0
    steps: int = 0
    kinds: set = field(default_factory=set)

    def assert_one_per_step(self):
        assert 0 < self.captured == len(self.kinds)
        assert 0 < self.replayed == self.steps

    def captured_by(self, capture):
        """Count the captures of a function, and the replays of what it captured."""

        def counted(take):
            made = capture(take)
            self.captured += 1

            def replay():
                self.replayed += 1
                made.replay()

            return Replayed(replay)

        return counted


def count_graphs(monkeypatch, is_pretended=False):
    """Count from now on; pretend that this machine has a GPU if asked to."""
    graphs, take, step_of = Graphs(), GraphStep.take, Stacked._step_of
    capture = pretended if is_pretended else graph.capture

    def counted_take(step, *inputs):
        graphs.steps += 1
        take(step, *inputs)

    def noted_step_of(engine, *arguments):
        found = step_of(engine, *arguments)
        graphs.kinds.update(engine.steps)
        return found

    if is_pretended:
        monkeypatch.setattr(graph, "can_capture", lambda device: True)
    monkeypatch.setattr(graph, "capture", graphs.captured_by(capture))
    monkeypatch.setattr(GraphStep, "take", counted_take)
    monkeypatch.setattr(Stacked, "_step_of", noted_step_of)
    return graphs
