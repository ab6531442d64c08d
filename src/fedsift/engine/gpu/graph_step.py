"""One local step of all clients in a stack, recorded as a CUDA graph where there is a GPU."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import fields

import torch
from torch import Tensor

from fedsift.algorithms.checks import DeclaredMemory, checked_points
from fedsift.algorithms.method import Memory, Phase, Step
from fedsift.algorithms.step_context import StepContext
from fedsift.engine.client import number_for
from fedsift.engine.fused import fused, is_frozen, number_names, numbers_of, with_numbers
from fedsift.engine.gpu import graph
from fedsift.engine.gpu.gradients import StackGradients
from fedsift.engine.gpu.graph import Graph
from fedsift.engine.gpu.losses import PointLosses
from fedsift.engine.gpu.stacked_task import StackedTask
from fedsift.engine.gpu.ways import GRADIENTS, LOSSES, Way, first_that_works
from fedsift.task.samples import Tree
from fedsift.vector import State


def graph_key(step: Step) -> Hashable:
    """Return what two steps have in common if one graph can serve both.

    The finite floating-point numbers of a frozen dataclass may differ: the graph reads them from
    memory. A function is the same step only as itself.

    >>> from fedsift.algorithms.fedsgd import SgdStep
    >>> graph_key(SgdStep(0.1)) == graph_key(SgdStep(0.2))
    True
    """
    if not is_frozen(step):
        return step
    names = number_names(step)
    others = {f.name: getattr(step, f.name) for f in fields(step) if f.name not in names}  # type: ignore[arg-type]
    return type(step), names, tuple(others.items())


def consecutive_rows(clients: int, batch: int, device: torch.device) -> Tensor:
    """Return the rows ``(clients, batch)`` of batches that lie end to end.

    >>> consecutive_rows(2, 3, torch.device("cpu")).tolist()
    [[0, 1, 2], [3, 4, 5]]
    """
    return torch.arange(clients * batch, device=device).view(clients, batch)


class GraphStep:
    """A method's local step for a fixed number of clients and batch size.

    ``rows`` ``(clients, batch)`` are the first batches, on which it is tried. ``is_masked`` steps
    leave some clients as they are.
    """

    def __init__(
        self,
        task: StackedTask,
        phase: Phase,
        start: State,
        memory: Memory,
        rows: Tensor,
        is_masked: bool = False,
    ) -> None:
        device, self.rows = task.device, rows.clone(memory_format=torch.contiguous_format)
        self.is_active = torch.ones_like(rows[:, 0], dtype=torch.bool) if is_masked else None
        self.values = numbers_of(phase.step)
        self.numbers = torch.tensor(self.values, dtype=torch.float64, device=device)
        self.step, self.points = with_numbers(phase.step, self.numbers), phase.points
        self.task, self.given = task, (start, memory)
        self.context = StepContext(
            task.task.seed,
            lambda number: number_for(start.w, number),
            0,
            lambda: self._pack_state(self.gradients.buffers.x.map(torch.zeros_like)),
            lambda: self._pack_memory(self._memory_buffers()),
        )
        self.gradients: StackGradients | PointLosses
        self.chosen = first_that_works(LOSSES if self.points else GRADIENTS, self._attempt)
        self.graph = self.chosen.result
        if device.type == "cuda":
            torch.cuda.empty_cache()  # of the trials, for which the graph has no use

    @property
    def line(self) -> str:
        """How the step is computed and why, in one line."""
        remark = "" if isinstance(self.gradients, PointLosses) else self.gradients.remark
        return "; ".join(filter(None, [self.chosen.line, remark]))

    @property
    def loss(self) -> Tensor:
        """The sum of each client's losses since :meth:`begin`."""
        return self.gradients.buffers.loss

    def begin(self, phase: Phase, round: int, start: State, memory: Memory) -> None:
        """Set the numbers of the step, and the state and memory from which the clients start."""
        if (values := numbers_of(phase.step)) != self.values:
            self.numbers.copy_(torch.tensor(values, dtype=torch.float64))
            self.values = values
        self.given, context = (start, memory), self.context
        self._load_start()
        self.gradients.buffers.loss.zero_()
        context.restart(round)
        if context.was_read("start"):
            self._pack_state(context.start)
        if context.was_read("memory"):
            self._pack_memory(context.memory)

    def _load_start(self) -> None:
        """Copy the given state to the buffers."""
        buffers = self.gradients.buffers
        self._pack_state(buffers.x)
        if buffers.low_precision is not buffers.x.w:
            buffers.low_precision.copy_(buffers.x.w)

    def take(self, rows: Tensor, is_active: Tensor | None = None) -> None:
        """Take one step on the given rows of the data, with the active clients only."""
        self.rows.copy_(rows)
        if self.is_active is not None and is_active is not None:
            self.is_active.copy_(is_active)
        if self.graph is None:
            self._take()
        else:
            self.graph.replay()

    def take_batch(self, x: Tree, y: Tree, is_active: Tensor | None = None) -> None:
        """Take one step on the clients' batches, given end to end, of a task of such batches."""
        self.task.load(x, y)
        clients, batch = self.rows.shape
        self.take(consecutive_rows(clients, batch, self.rows.device), is_active)

    def end(self) -> tuple[State, Memory]:
        """Return copies of the clients' state and memory. The next stack overwrites the buffers."""
        x, context = self.gradients.buffers.x, self.context
        state = State(**{name: self._unpacked(name, vector) for name, vector in x.items()})
        if not context.was_read("memory"):
            return state, self.given[1]
        return state, {name: self._unpacked(name, x) for name, x in context.memory.items()}

    def _take(self) -> None:
        if self.is_active is None:
            self._take_all()
            return
        kept = self._changing()
        before = [x.clone() for x in kept]
        self._take_all()
        for x, old in zip(kept, before, strict=True):
            is_active = self.is_active.view(-1, *[1] * (x.dim() - 1))
            x.copy_(torch.where(is_active, x, old))

    def _changing(self) -> list[Tensor]:
        """Return everything that a step overwrites and that inactive clients must keep."""
        buffers = self.gradients.buffers
        memory = self.context.memory.values() if self.given[1] else ()
        extra = [] if buffers.low_precision is buffers.x.w else [buffers.low_precision]
        return [*buffers.x, buffers.loss, *extra, *memory]

    def _take_all(self) -> None:
        buffers, context = self.gradients.buffers, self.context
        context.advance()
        observed = self._observe()
        step = fused(self.step, buffers.gradient)
        step(buffers.x, observed, buffers.low_precision, context)

    def _observe(self) -> Tensor:
        """Return the gradients or, for a method without them, the losses."""
        gradients = self.gradients
        if isinstance(gradients, PointLosses):
            assert self.points is not None
            x = gradients.buffers.x
            return gradients.losses(checked_points(self.points(x, self.context), x.w), self.rows)
        gradients.compute(self.rows)
        return gradients.buffers.gradient

    def _attempt(self, way: Way) -> Graph | None:
        """Prepare a way to compute gradients, and try it on the first batches."""
        self.context.forget()
        self.__dict__.pop("gradients", None)  # frees the memory of a way that has failed
        self.gradients = way.prepare(self.task, len(self.rows))
        self._load_start()
        if not isinstance(self.gradients, PointLosses):
            self.gradients.check(self.rows)
        if not way.has_graph:
            return None
        if graph.can_capture(self.rows.device):
            return graph.capture(self._take)
        self._observe()
        return None

    def _pack_state(self, buffers: State) -> State:
        for name, x in self.given[0].items():
            self._pack(name, x, buffers[name])
        return buffers

    def _pack_memory(self, buffers: Memory) -> Memory:
        for name, x in self.given[1].items():
            self._pack(name, x, buffers[name])
        return buffers

    def _memory_buffers(self) -> Memory:
        like, memory = self.gradients.buffers.x.w, self.given[1]
        lengths = {k: x if self._has_own_length(k) else like for k, x in memory.items()}
        return DeclaredMemory({name: torch.zeros_like(x) for name, x in lengths.items()})

    def _has_own_length(self, name: str) -> bool:
        """Whether a vector does not have one number per parameter, whose order matters."""
        return name in dict(self.task.task.layout.lengths)

    def _pack(self, name: str, x: Tensor, buffer: Tensor) -> None:
        if self._has_own_length(name):
            buffer.copy_(x)
        else:
            self.gradients.pack(x, buffer)

    def _unpacked(self, name: str, buffer: Tensor) -> Tensor:
        return buffer.clone() if self._has_own_length(name) else self.gradients.unpack(buffer)
