"""The parts of a model that compute with each client's own parameters.

The samples of all clients lie end to end on the first axis, so a layer without parameters, or with
the same parameters for all clients, runs as it is. A *unit* is a smallest module that has trainable
parameters of its own. Known units are batched matrix products; ``torch.vmap`` computes any other.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_unflatten

from fedsift.engine.gpu.one_batch.adapters import is_lora, lora
from fedsift.engine.gpu.one_batch.attention import attention
from fedsift.engine.gpu.one_batch.layers import (
    Parameters,
    embedding_of_clients,
    layer_norm_of_clients,
    linear_of_clients,
    rms_norm_of_clients,
)
from fedsift.engine.gpu.one_batch.norms import rms_eps
from fedsift.engine.gpu.unsupported import UnsupportedModel
from fedsift.task import has_statistics

Compute = Callable[..., Any]
Rule = Callable[[Any, Parameters, Tensor], Tensor]
RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: linear_of_clients,
    nn.Embedding: embedding_of_clients,
    nn.LayerNorm: layer_norm_of_clients,
}
"""How known layers compute with each client's own parameters."""


def rule_for(module: nn.Module) -> Rule | None:
    """Return how a known unit computes with each client's own parameters; None for others."""
    if is_lora(module):
        return lora
    if (eps := rms_eps(module)) is not None:
        return partial(rms_norm_of_clients, eps)
    return RULES.get(type(module))


@dataclass(frozen=True)
class Unit:
    """A module, the model's names of its trainable parameters by its own names, and its rule."""

    module: nn.Module
    parameters: dict[str, str]
    rule: Rule | None


def units_of(model: nn.Module, other: Sequence[nn.Module] = ()) -> list[Unit]:
    """Return the units of a model, which hold all trainable parameters but those of ``other``.

    >>> model = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.LayerNorm(2))
    >>> [sorted(unit.parameters.values()) for unit in units_of(model)]
    [['0.bias', '0.weight'], ['2.bias', '2.weight']]
    """
    names = {p: name for name, p in model.named_parameters()}
    return list(_units_in(model, names, other))


def _units_in(
    module: nn.Module, names: dict[nn.Parameter, str], other: Sequence[nn.Module]
) -> Iterator[Unit]:
    if any(module is found for found in other):
        return
    own = any(p.requires_grad for p in module.parameters(recurse=False))
    if own or is_lora(module):
        parameters = module.named_parameters()
        trained = {name: names[p] for name, p in parameters if p.requires_grad}
        yield Unit(module, trained, rule_for(module))
        return
    for child in module.children():
        yield from _units_in(child, names, other)


@dataclass(frozen=True)
class Stack:
    """The number of clients in a stack, and of samples in each one's batch."""

    clients: int
    batch: int

    def split(self, x: Any) -> Any:
        """Return a tensor of all clients' samples as ``(clients, batch, ...)``.

        A first axis of length 1 holds what is the same for all samples.

        >>> Stack(clients=2, batch=3).split(torch.zeros(6, 4)).shape
        torch.Size([2, 3, 4])
        """
        if not isinstance(x, Tensor):
            return x
        if x.dim() and len(x) == 1 and self.clients * self.batch > 1:
            return x.expand(self.clients, *x.shape)
        if not x.dim() or len(x) % self.clients:
            raise UnsupportedModel(f"a layer gets {tuple(x.shape)}, not one row per sample")
        return x.view(self.clients, -1, *x.shape[1:])

    def join(self, y: Any) -> Any:
        """Return a tensor ``(clients, rows, ...)`` with its first two axes as one.

        A single row is repeated for each of a client's samples.

        >>> Stack(clients=2, batch=3).join(torch.zeros(2, 1, 4)).shape
        torch.Size([6, 4])
        """
        if not isinstance(y, Tensor):
            return y
        if y.dim() < 2:
            raise UnsupportedModel("a layer returns no axis of samples")
        return (y.expand(-1, self.batch, *y.shape[2:]) if y.shape[1] == 1 else y).flatten(0, 1)


def replacement(unit: Unit, parameters: Parameters, stack: Stack) -> Compute:
    """Return what replaces a unit's ``forward``, given each client's own parameters."""
    if (rule := unit.rule) is not None:
        return lambda x: stack.join(rule(unit.module, parameters, stack.split(x)))
    own = any_module(unit.module, parameters, stack)
    if type(unit.module) is nn.MultiheadAttention:
        return attention(unit.module, parameters, stack.clients, own)
    return own


def any_module(module: nn.Module, parameters: Parameters, stack: Stack) -> Compute:
    """Return what any module computes with each client's own parameters, by ``torch.vmap``."""
    if any(map(has_statistics, module.modules())):
        raise UnsupportedModel("running statistics")
    if any(map(is_overlapping_convolution, module.modules())):
        raise UnsupportedModel("convolutions are slow when batched")
    plain = copy.copy(module)  # shares everything, but keeps its own forward

    def compute(*arguments: Any, **keywords: Any) -> Any:
        plain.training = module.training
        given, structure = tree_flatten((arguments, keywords))
        tensors = [stack.split(x) for x in given if isinstance(x, Tensor)]
        outputs = Outputs()

        def of_client(own: Parameters, tensors: list[Tensor]) -> list[Tensor]:
            rest = iter(tensors)
            leaves = [next(rest) if isinstance(x, Tensor) else x for x in given]
            arguments, keywords = tree_unflatten(leaves, structure)
            return outputs.take(functional_call(plain, own, arguments, keywords))

        found = torch.vmap(of_client, randomness="different")(parameters, tensors)
        return outputs.restore([stack.join(y) for y in found])

    return compute


def is_overlapping_convolution(module: nn.Module) -> bool:
    """Whether a module is a convolution that is no matrix product of separate patches.

    >>> is_overlapping_convolution(nn.Conv2d(3, 8, 3)), is_overlapping_convolution(nn.Linear(3, 8))
    (True, False)
    >>> is_overlapping_convolution(nn.Conv2d(3, 8, 4, stride=4))  # the patches of an image
    False
    """
    if not isinstance(module, nn.modules.conv._ConvNd):
        return False
    return module.kernel_size != module.stride or module.transposed


class Outputs:
    """The outputs of a module apart from their structure, because vmap returns only tensors.

    >>> outputs = Outputs()
    >>> outputs.take((torch.ones(1), None))
    [tensor([1.])]
    >>> outputs.restore([torch.zeros(1)])
    (tensor([0.]), None)
    """

    def take(self, found: Any) -> list[Tensor]:
        """Return the tensors among the outputs."""
        self.leaves, self.structure = tree_flatten(found)
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    def restore(self, tensors: list[Tensor]) -> Any:
        """Return the outputs with other tensors."""
        rest = iter(tensors)
        leaves = [next(rest) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        return tree_unflatten(leaves, self.structure)
