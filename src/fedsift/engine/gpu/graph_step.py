"""One local step of all clients in a stack, recorded as a CUDA graph where there is a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from fedsift.algorithms.method import Step
from fedsift.engine.fused import fused
from fedsift.engine.gpu.gradients import (
    LayerGradients,
    StackGradients,
    StreamGradients,
    VmapGradients,
    can_vmap,
    new_stream,
)
from fedsift.engine.gpu.stacked_task import StackedTask
from fedsift.task.samples import Tree
from fedsift.vector import Moments

WARM_UP_STEPS = 3
"""Steps before the graph is captured: libraries initialize themselves in their first calls."""


class GraphStep:
    """A method's local step for a fixed number of clients and batch size."""

    def __init__(self, task: StackedTask, step: Step, clients: int, batch: int) -> None:
        self.rows = torch.zeros(clients, batch, dtype=torch.int64, device=task.device)
        self.task, self.step = task, step
        self.gradients, self.graph = self._prepare(task)

    @property
    def loss(self) -> Tensor:
        """The sum of each client's losses since :meth:`begin`."""
        return self.gradients.buffers.loss

    def begin(self, start: Moments) -> None:
        """Set the state from which the clients start."""
        buffers = self.gradients.buffers
        for buffer, x in zip(buffers.x, start, strict=True):
            self.gradients.pack(x, buffer)
        if buffers.low_precision is not buffers.x.w:
            buffers.low_precision.copy_(buffers.x.w)
        buffers.loss.zero_()

    def take(self, rows: Tensor) -> None:
        """Take one step on the given rows of the data."""
        self.rows.copy_(rows)
        if self.graph is None:
            self._take(self.gradients)
        else:
            self.graph.replay()

    def take_batch(self, x: Tree, y: Tree) -> None:
        """Take one step on the clients' batches, given end to end, of a task of such batches."""
        self.task.load(x, y)
        self.take(torch.arange(self.rows.numel(), device=self.rows.device).view_as(self.rows))

    def end(self) -> Moments:
        """Return a copy of the clients' state. The next stack overwrites the buffers."""
        return Moments(*(self.gradients.unpack(x) for x in self.gradients.buffers.x))

    def _take(self, gradients: StackGradients) -> None:
        gradients.compute(self.rows)
        buffers = gradients.buffers
        fused(self.step, buffers.gradient)(buffers.x, buffers.gradient, buffers.low_precision)

    def _prepare(self, task: StackedTask) -> tuple[StackGradients, torch.cuda.CUDAGraph | None]:
        """Return the fastest gradient computation that the model allows, and its graph."""
        clients = len(self.rows)
        if task.network is not None:
            from fedsift.engine.gpu.network import UnsupportedModel

            try:
                by_layer = LayerGradients(task, task.network, clients)
                return by_layer, self._capture(by_layer)
            except UnsupportedModel:
                pass
        kind = VmapGradients if can_vmap(task, self.rows) else StreamGradients
        gradients: StackGradients = kind(task, clients)
        return gradients, self._capture(gradients) if self.rows.is_cuda else None

    def _capture(self, gradients: StackGradients) -> torch.cuda.CUDAGraph:
        stream = new_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_STEPS):
                self._take(gradients)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._take(gradients)
        return graph
