"""One local step of a stack of clients, as a CUDA graph where there is a GPU.

There are three ways to the clients' gradients. A model of known layers runs all clients at once, a
batched product a layer (:class:`ByLayers`). Any other without convolutions, say a Transformer, has
its operations batched by PyTorch (:class:`ByVmap`), if it can. For the rest, each client's forward
and backward pass runs on a stream of its own (:class:`ByStreams`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value
from torch.nn.functional import cross_entropy

from fedsift.algorithms.method import Step
from fedsift.engine.client import runs
from fedsift.engine.fused import fused
from fedsift.selection.backend import can_use_triton
from fedsift.task import Loss, Task
from fedsift.vector import Moments

if TYPE_CHECKING:
    from fedsift.engine.gpu.network import Network

MOST_SCORES = 1 << 14
"""Scores of a client's batch up to which one block of the GPU finds their cross-entropy."""
STREAMS = 20
"""Clients whose passes run side by side; more brings no more speed on one GPU."""


@dataclass(frozen=True)
class Work:
    """What a stack's steps work on: the task, all clients' data end to end, and how to compute."""

    task: Task
    data: Tensor
    labels: Tensor
    precision: str

    @cached_property
    def network(self) -> Network | None:
        """The model for all clients at once, if its layers are known and there is a GPU."""
        if not can_use_triton(self.data) or self.task.layout.dtype != torch.float32:
            return None
        from fedsift.engine.gpu.network import Network, Unknown  # these need Triton

        products = {"fp32": "tf32x3", "tf32": "tf32", "bf16": "tf32"}
        try:
            return Network(self.task.model, self.task.layout, products[self.precision])
        except Unknown:
            return None

    @cached_property
    def images(self) -> Tensor:
        """The clients' data as :class:`Network` takes it."""
        return self.channels_last(self.data)

    def channels_last(self, data: Tensor) -> Tensor:
        """The data with channels last, in the format of the activations."""
        last = data.permute(0, 2, 3, 1) if data.dim() == 4 else data
        return last.to(self.format).contiguous()

    def output(self, w: Tensor, data: Tensor) -> Any:
        """What the model says of the data with weights w; nothing is kept for a backward pass."""
        if self.network is not None:
            from fedsift.engine.gpu.network import Unknown

            try:
                return self.output_by_layers(self.network, w, data)
            except Unknown:
                pass
        self.task.model.eval()
        return self.call(self.parameters(w), data)

    def output_by_layers(self, network: Network, w: Tensor, data: Tensor) -> Tensor:
        """A stack of one client."""
        from fedsift.engine.gpu.network import Order

        order = Order(self.task.layout)
        stack = w.new_zeros(1, order.length)
        order.enter(w[None], stack)
        weights = order.weights(stack, stack.to(self.format), stack)
        return network(self.channels_last(data)[None], weights)[0].float()

    def call(self, own: dict[str, Tensor], data: Tensor) -> Any:
        """What the model says with the given parameters, in the number format of the weights."""
        output = functional_call(self.task.model, own, (data,))
        return output.to(self.task.layout.dtype) if isinstance(output, Tensor) else output

    def parameters(self, w: Tensor) -> dict[str, Tensor]:
        """The model's parameters by name; those of convolutions in the order that runs fastest."""
        named = self.task.layout.unflatten(w)
        return channels_last(named) if self.takes_channels_last else named

    @cached_property
    def takes_channels_last(self) -> bool:
        """Whether the model can be called with its convolutions in that order of memory."""
        own = channels_last(self.task.layout.unflatten(self.task.layout.read(self.task.model)))
        return runs(partial(self.call, own), self.data)

    @cached_property
    def has_classes(self) -> bool:
        """Whether the loss is the cross-entropy of class labels, none of which is left out."""
        whole = self.labels.dtype == torch.int64 and self.labels.dim() == 1
        return self.task.loss is cross_entropy and whole and bool((self.labels >= 0).all())

    @property
    def format(self) -> torch.dtype:
        """The number format of activations and products."""
        return torch.bfloat16 if self.precision == "bf16" else torch.float32


def channels_last(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """Parameters by name, those of convolutions with their channels last in memory."""
    fast = torch.channels_last
    return {n: p.contiguous(memory_format=fast) if p.dim() == 4 else p for n, p in named.items()}


class Stack:
    """The tensors of some clients in training: all are overwritten again and again.

    ``short`` holds the weights in the format of the products; it may be the weights themselves.
    """

    def __init__(self, like: Tensor, clients: int, length: int, format: torch.dtype) -> None:
        self.x = Moments.start(like.new_zeros(clients, length))
        self.short = self.x.w if format == like.dtype else self.x.w.to(format)
        self.gradient = torch.zeros_like(self.x.w)
        self.loss = like.new_zeros(clients)


class StackedStep:
    """A step of some method for so many clients and so large a batch; on a GPU, a graph."""

    def __init__(self, work: Work, step: Step, clients: int, batch: int) -> None:
        self.rows = torch.zeros(clients, batch, dtype=torch.int64, device=work.data.device)
        self.method = step
        self.way, self.graph = self._prepare(work)

    @property
    def loss(self) -> Tensor:
        """The sum of each client's losses so far."""
        return self.way.stack.loss

    def begin(self, start: Moments) -> None:
        """Set where the stack starts."""
        stack = self.way.stack
        for mine, x in zip(stack.x, start, strict=True):
            self.way.enter(x, mine)
        if stack.short is not stack.x.w:
            stack.short.copy_(stack.x.w)
        stack.loss.zero_()

    def take(self, rows: Tensor) -> None:
        """One step on the given rows of the data."""
        self.rows.copy_(rows)
        if self.graph is None:
            self._work(self.way)
        else:
            self.graph.replay()

    def end(self) -> Moments:
        """Where the stack is now, copied: the step's own tensors are used by the next stack."""
        return Moments(*(self.way.leave(x) for x in self.way.stack.x))

    def _work(self, way: Way) -> None:
        way.gradients(self.rows)
        fused(self.method, way.stack.gradient)(way.stack.x, way.stack.gradient, way.stack.short)

    def _prepare(self, work: Work) -> tuple[Way, torch.cuda.CUDAGraph | None]:
        """The faster way that the model allows, and its graph."""
        clients = len(self.rows)
        if work.network is not None:
            from fedsift.engine.gpu.network import Unknown

            try:
                layered = ByLayers(work, work.network, clients)
                return layered, self._capture(layered)
            except Unknown:
                pass
        way: Way = ByVmap(work, clients) if can_vmap(work, self.rows) else ByStreams(work, clients)
        return way, self._capture(way) if self.rows.is_cuda else None

    def _capture(self, way: Way) -> torch.cuda.CUDAGraph:
        side = new_stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):  # libraries set themselves up in their first calls
                self._work(way)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._work(way)
        return graph


class Way(Protocol):
    """A way to all clients' gradients."""

    stack: Stack

    def enter(self, stack: Tensor, into: Tensor) -> None:
        """Copy a stack ``(clients, d)`` to the order in which this way keeps it."""

    def leave(self, stack: Tensor) -> Tensor:
        """A copy of a stack in the layout's own order."""

    def gradients(self, rows: Tensor) -> None:
        """Find the gradients on the given rows of the data, and add the losses up."""


class ByLayers:
    """All clients at once, layer by layer."""

    def __init__(self, work: Work, network: Network, clients: int) -> None:
        from fedsift.engine.gpu.network import Order

        order = Order(work.task.layout)
        like = torch.empty(0, dtype=work.task.layout.dtype, device=work.data.device)
        self.stack = Stack(like, clients, order.length, work.format)
        self.work, self.network = work, network
        self.enter, self.leave = order.enter, order.leave
        self.weights = order.weights(self.stack.x.w, self.stack.short, self.stack.gradient)

    def gradients(self, rows: Tensor) -> None:
        """Find the gradients on the given rows of the data, and add the losses up."""
        flat = rows.view(-1)
        data = self.work.images.index_select(0, flat)
        labels = self.work.labels.index_select(0, flat)
        data, labels = (x.view(*rows.shape, *x.shape[1:]) for x in (data, labels))
        output = self.network(data, self.weights).contiguous()
        if self.work.has_classes and output.dim() == 3 and output[0].numel() <= MOST_SCORES:
            from fedsift.engine.gpu.layers import cross_entropy as slope_of

            output.backward(slope_of(output.detach(), labels, self.stack.loss))  # type: ignore[no-untyped-call]
            return
        losses = losses_of(self.work.task.loss, output.float(), labels)
        losses.sum().backward()  # type: ignore[no-untyped-call]
        self.stack.loss += losses.detach()


def losses_of(loss: Loss, output: Tensor, labels: Tensor) -> Tensor:
    """Each client's loss.

    >>> output, labels = torch.randn(2, 3, 4), torch.tensor([[0, 1, 2], [3, 0, 1]])
    >>> each = [cross_entropy(o, y) for o, y in zip(output, labels)]
    >>> torch.allclose(losses_of(cross_entropy, output, labels), torch.stack(each))
    True
    """
    if loss is cross_entropy and output.dim() == 3 and labels.dim() == 2:
        every = cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="none")
        return every.view(labels.shape).mean(1)
    result: Tensor = torch.vmap(loss)(output, labels)
    return result


class InLayoutsOrder:
    """A way that keeps a stack as it comes."""

    def __init__(self, work: Work, clients: int) -> None:
        layout = work.task.layout
        like = torch.empty(0, dtype=layout.dtype, device=work.data.device)
        self.work, self.stack = work, Stack(like, clients, layout.d, layout.dtype)

    def enter(self, stack: Tensor, into: Tensor) -> None:
        """Copy a stack ``(clients, d)``."""
        into.copy_(stack)

    def leave(self, stack: Tensor) -> Tensor:
        """A copy of a stack."""
        return stack.clone()


class ByVmap(InLayoutsOrder):
    """All clients at once: a linear layer becomes a batch of products, and so on."""

    def gradients(self, rows: Tensor) -> None:
        """Find the gradients on the given rows of the data, and add the losses up."""
        task, flat = self.work.task, rows.view(-1)
        task.model.train()
        picked = (x.index_select(0, flat) for x in (self.work.data, self.work.labels))
        data, labels = (x.view(*rows.shape, *x.shape[1:]) for x in picked)
        own = task.layout.unflatten(self.stack.x.w)
        found, losses = torch.vmap(grad_and_value(self._loss))(own, data, labels)
        pieces = [found[name].flatten(1) for name in task.layout.names]
        torch.cat(pieces, 1, out=self.stack.gradient)
        self.stack.loss += losses

    def _loss(self, own: dict[str, Tensor], data: Tensor, labels: Tensor) -> Tensor:
        """One client's loss."""
        return self.work.task.loss(self.work.call(own, data), labels)


def can_vmap(work: Work, rows: Tensor) -> bool:
    """Whether a model's operations can be batched over clients: it is tried with two of them.

    Convolutions could, but are slow then. Nothing random can, as it must differ between clients.
    """
    if any(isinstance(each, nn.modules.conv._ConvNd) for each in work.task.model.modules()):
        return False
    try:
        ByVmap(work, 2).gradients(rows[:1].expand(2, -1).contiguous())
    except Exception:  # a model may do anything in its forward pass
        return False
    return True


class ByStreams(InLayoutsOrder):
    """Each client's pass on a stream of its own, for any model."""

    def __init__(self, work: Work, clients: int) -> None:
        super().__init__(work, clients)
        self.streams = [new_stream() for _ in range(STREAMS)] if work.data.is_cuda else []

    def gradients(self, rows: Tensor) -> None:
        """Find the gradients on the given rows of the data, and add the losses up."""
        for place in range(len(rows)):
            with self._own_stream(place):
                self._client(place, rows[place])
        for stream in self.streams:
            torch.cuda.current_stream().wait_stream(stream)

    def _own_stream(self, place: int) -> AbstractContextManager[object]:
        if not self.streams:
            return ExitStack()
        stream = self.streams[place % len(self.streams)]
        stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(stream)

    def _client(self, place: int, rows: Tensor) -> None:
        """One client's gradient and loss, written to its row."""
        task, w = self.work.task, self.stack.x.w[place]
        data = self.work.data.index_select(0, rows)
        labels = self.work.labels.index_select(0, rows)
        own = {n: p.detach().requires_grad_() for n, p in self.work.parameters(w).items()}
        task.model.train()
        loss = task.loss(self.work.call(own, data), labels)
        gradients = torch.autograd.grad(
            loss, tuple(own.values()), allow_unused=True, materialize_grads=True
        )
        flat = [g.to_dense().reshape(-1) if g.is_sparse else g.reshape(-1) for g in gradients]
        torch.cat(flat, out=self.stack.gradient[place])
        self.stack.loss[place] += loss.detach()


def new_stream() -> torch.cuda.Stream:
    """A stream of the current device."""
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]
