"""Gradients of all clients in a stack from one forward and backward pass over all their samples.

Only the layers with trainable parameters know that there are several clients. A frozen base model
exists once and sees one large batch, which is how a GPU trains many adapters of a language model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map  # keeps the classes of a model's outputs

from fedsift.engine.gpu.gradients import FlatBuffers, SingleGradients, StackBuffers, client_losses
from fedsift.engine.gpu.graph import random_state
from fedsift.engine.gpu.one_batch.blocks import fused_block, fusible_blocks
from fedsift.engine.gpu.one_batch.losses import is_fused, losses_and_slope
from fedsift.engine.gpu.one_batch.rewrites import rewrites
from fedsift.engine.gpu.one_batch.units import (
    Compute,
    Stack,
    replacement,
    units_of,
)
from fedsift.engine.gpu.stacked_task import StackedTask
from fedsift.engine.gpu.unsupported import UnsupportedModel, reason_of
from fedsift.engine.gpu.weight import Weight
from fedsift.task.samples import Tree, call_model, select_rows

TOLERANCE = {"fp32": 0.01, "tf32": 0.1, "bf16": 0.1}
"""How far the gradient of a parameter may be from that of a client alone, relative to its norm:
more than rounding in a number format, less than what samples of another client change."""
SMALL = 0.1
"""The part of the tolerance by which it may differ relative to the norm of all gradients."""


class OneBatchGradients(FlatBuffers):
    """All clients' samples in one batch, with each client's own parameters in its layers.

    It is used only if it gives the last client the gradient that it has alone: a layer that mixes
    samples, or that uses parameters of another layer, would not.
    """

    def __init__(self, task: StackedTask, clients: int) -> None:
        layout = task.task.layout
        if layout.buffers is not None:
            raise UnsupportedModel("training changes its buffers")
        self.task, self.dtype = task, torch.bfloat16 if task.precision == "bf16" else layout.dtype
        self.buffers = StackBuffers(task, clients, layout.d, self.dtype)
        model, like = task.task.model, self.buffers.low_precision
        self.names = {p: name for name, p in model.named_parameters() if p.requires_grad}
        self.blocks = list(fusible_blocks(model, like))
        self.units = units_of(model, self.blocks)
        self.rewritten = list(rewrites(model))

    def check(self, rows: Tensor) -> None:
        """Compare with the gradient of one client alone; drop faster forms that do not fit."""
        try:
            self._compare(rows)
        except Exception as problem:  # a form that does not fit may raise anything
            if not (self.rewritten or self.blocks):
                raise
            self.remark = f"without faster forms of its layers: {reason_of(problem)}"
            self.rewritten, self.blocks = [], []
            self.units = units_of(self.task.task.model)
            self._compare(rows)

    def _compare(self, rows: Tensor) -> None:
        """Raise UnsupportedModel unless the last client has the gradient that it has alone.

        A model that draws random numbers is compared in evaluation mode, where they do not differ.
        """
        place, before = len(rows) - 1, random_state(rows.device)
        self._gradients(rows, is_training=True)
        if random_state(rows.device) != before:
            self._gradients(rows, is_training=False)
        alone = SingleGradients(self.task, 1)
        alone.buffers.x.w.copy_(self.buffers.x.w[place:])
        alone.compute_client(0, rows[place])  # in the mode in which the model is now
        layers, tolerance = self.task.task.layout.layers, TOLERANCE[self.task.precision]
        ours, theirs = self.buffers.gradient[place], alone.buffers.gradient[0]
        check_close(layers, ours.float(), theirs.float(), tolerance)

    def compute(self, rows: Tensor) -> None:
        """Set the gradients to those of the given rows of the data, and add up the losses."""
        self.buffers.loss += self._gradients(rows, is_training=True)

    def _gradients(self, rows: Tensor, is_training: bool) -> Tensor:
        """Overwrite the gradients ``(clients, d)`` and return the losses."""
        model, stack = self.task.task.model, Stack(*rows.shape)
        x, y = (select_rows(tree, rows.view(-1)) for tree in (self.task.data, self.task.labels))
        self.task.task.train_mode(model) if is_training else model.eval()
        own, written = self._parameters(), self._written()
        anchor = torch.empty((), device=rows.device, requires_grad=True)
        with self._installed(own, written, anchor, stack):
            output = tree_map(stack.split, call_model(model, x))
            rest = {name: p for name, p in own.items() if name not in written}
            leaves = [*rest.values(), *([anchor] if written else [])]
            losses, gradients = self._derive(output, tree_map(stack.split, y), leaves)
        self._write(dict(zip(rest, gradients, strict=False)))
        return losses.detach()

    def _write(self, gradients: dict[str, Tensor]) -> None:
        """Copy the gradients of named parameters to the buffer."""
        if len(gradients) == len(self.names):
            pieces = [gradients[name].flatten(1) for name in self.task.task.layout.names]
            torch.cat(pieces, 1, out=self.buffers.gradient)
            return
        places = self.task.task.layout.unflatten(self.buffers.gradient)
        for name, gradient in gradients.items():
            places[name].copy_(gradient)

    def _written(self) -> dict[str, Weight]:
        """Return the parameters of fused blocks, which write their own gradients."""
        buffers, unflatten = self.buffers, self.task.task.layout.unflatten
        whole = (buffers.x.w, buffers.low_precision, buffers.gradient)
        values, products, gradients = (unflatten(x) for x in whole)
        names = [self.names[p] for block in self.blocks for p in block.parameters()]
        return {name: Weight(values[name], products[name], gradients[name]) for name in names}

    def _parameters(self) -> dict[str, Tensor]:
        """Return each client's parameters by name: matrices in the format of their products."""
        unflatten, buffers = self.task.task.layout.unflatten, self.buffers
        whole, products = unflatten(buffers.x.w), unflatten(buffers.low_precision)
        chosen = {name: products[name] if p.dim() > 2 else p for name, p in whole.items()}
        return {name: p.detach().requires_grad_() for name, p in chosen.items()}

    def _derive(
        self, output: Any, labels: Tree, own: list[Tensor]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the losses, and the gradients of the clients' parameters."""
        loss, slope = self.task.task.loss, None
        if is_fused(loss, output, labels):
            losses, slope = losses_and_slope(output.detach(), labels)
            start = output
        else:
            losses = client_losses(loss, output, labels)
            start = losses.sum()
        return losses, torch.autograd.grad(
            start, own, slope, allow_unused=True, materialize_grads=True
        )

    @contextmanager
    def _installed(
        self, own: dict[str, Tensor], written: dict[str, Weight], anchor: Tensor, stack: Stack
    ) -> Iterator[None]:
        """Let the blocks and units compute with the clients' parameters."""
        found: dict[nn.Module, Compute] = dict(self.rewritten)
        for block in self.blocks:
            weights = {name: written[self.names[p]] for name, p in block.named_parameters()}
            found[block] = fused_block(block, weights, stack.clients, anchor)
        for unit in self.units:
            parameters = {name: own[of_model] for name, of_model in unit.parameters.items()}
            if unit.rule is None:  # any operations may follow, which must not mix formats
                parameters = {name: p.to(self.dtype) for name, p in parameters.items()}
            found[unit.module] = replacement(unit, parameters, stack)
        before = {module: module.__dict__.get("forward") for module in found}
        try:
            for module, compute in found.items():
                module.__dict__["forward"] = compute
            yield
        finally:
            for module, forward in before.items():
                module.__dict__.pop("forward")
                if forward is not None:
                    module.__dict__["forward"] = forward


def check_close(layers: dict[str, slice], ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    """Raise UnsupportedModel unless two gradients are equal but for rounding.

    >>> layers = {"weight": slice(0, 2), "bias": slice(2, 3)}
    >>> check_close(layers, torch.tensor([1.0, 2.0, 0.0]), torch.tensor([1.0, 2.0, 0.1]), 0.01)
    Traceback (most recent call last):
    ...
    fedsift.engine.gpu.unsupported.UnsupportedModel: bias gets no gradient
    """
    small = SMALL * tolerance * float(theirs.norm())
    for name, place in layers.items():
        difference, norm = float((ours - theirs)[place].norm()), float(theirs[place].norm())
        if norm > 0 and not bool(ours[place].any()):
            raise UnsupportedModel(f"{name} gets no gradient")
        if not difference <= tolerance * norm + small:
            raise UnsupportedModel(f"{name} gets another gradient than with one client")
