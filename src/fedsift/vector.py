"""A model's parameters as one flat vector, and the triple (W, M, V) that FedAdam moves around.

Every numeric function of fedsift works on tensors of shape ``(..., d)``: the last axis holds a
model's parameters end to end, the axes before it are clients.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn


class Moments(NamedTuple):
    """Weights ``w``, first moment ``m`` and second moment ``v``, each ``(..., d)``.

    >>> x = Moments.start(torch.ones(3))
    >>> (x - x).w.tolist(), x.v.tolist()
    ([0.0, 0.0, 0.0], [0.0, 0.0, 0.0])
    """

    w: Tensor
    m: Tensor
    v: Tensor

    @classmethod
    def start(cls, w: Tensor) -> Moments:
        """Where training begins: W^0 as given, M^0 = V^0 = 0."""
        return cls(w, torch.zeros_like(w), torch.zeros_like(w))

    def __sub__(self, other: Moments) -> Moments:
        return Moments(self.w - other.w, self.m - other.m, self.v - other.v)

    def plus(self, other: Moments) -> Moments:
        """Coordinatewise sum (``+`` on a tuple would concatenate)."""
        return Moments(self.w + other.w, self.m + other.m, self.v + other.v)


@dataclass(frozen=True)
class Layout:
    """Where each named parameter of a model lies in its flat vector.

    >>> layout = Layout.of(nn.Linear(3, 2))
    >>> layout.d, layout.names, layout.offsets
    (8, ('weight', 'bias'), (0, 6))
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, model: nn.Module) -> Layout:
        """The layout of a model's trainable parameters, in the model's own order."""
        named = _trainable(model)
        if not named:
            raise ValueError("the model has no trainable parameters")
        dtypes = {p.dtype for p in named.values()}
        if len(dtypes) > 1:
            raise ValueError(f"the model mixes parameter dtypes ({dtypes}): convert it to one")
        shapes = tuple(tuple(p.shape) for p in named.values())
        return cls(tuple(named), shapes, dtypes.pop())

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of coordinates of each parameter."""
        return tuple(math.prod(shape) for shape in self.shapes)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Index of each parameter's first coordinate."""
        return tuple(accumulate(self.sizes[:-1], initial=0))

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """The offsets as an array, for the index coders."""
        return np.array(self.offsets, np.int64)

    @cached_property
    def d(self) -> int:
        """Number of coordinates in all: the paper's d."""
        return sum(self.sizes)

    @cached_property
    def layers(self) -> dict[str, slice]:
        """The stretch of the flat vector that each parameter takes."""
        spans = zip(self.names, self.offsets, self.sizes, strict=True)
        return {name: slice(start, start + size) for name, start, size in spans}

    def flatten(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Named tensors ``(*clients, *shape)`` to one vector ``(*clients, d)``."""
        pieces = []
        for name, shape in zip(self.names, self.shapes, strict=True):
            tensor = parameters[name]
            clients = tensor.shape[: tensor.dim() - len(shape)]
            pieces.append(tensor.reshape(*clients, -1))
        return torch.cat(pieces, dim=-1)

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """One vector ``(*clients, d)`` to named views ``(*clients, *shape)``."""
        clients = vector.shape[:-1]
        parts = torch.split(vector, list(self.sizes), dim=-1)
        shaped = zip(self.names, self.shapes, parts, strict=True)
        return {name: part.view((*clients, *shape)) for name, shape, part in shaped}

    def read(self, model: nn.Module) -> Tensor:
        """A copy of the model's parameters as one vector."""
        return self.flatten({n: p.detach() for n, p in _trainable(model).items()})

    def write(self, vector: Tensor, model: nn.Module) -> None:
        """Set the model's parameters from a vector."""
        targets = _trainable(model)
        shapes = {name: tuple(p.shape) for name, p in targets.items()}
        if shapes != dict(zip(self.names, self.shapes, strict=True)):
            raise ValueError("the model has other parameters than the one that was trained")
        with torch.no_grad():
            for name, value in self.unflatten(vector).items():
                targets[name].copy_(value)

    def bind(self, model: nn.Module, w: Tensor, gradient: Tensor) -> None:
        """Make a model's parameters, and their gradients, views of two vectors ``(d,)``.

        >>> layer = nn.Linear(2, 1, bias=False)
        >>> w, gradient = torch.ones(2), torch.zeros(2)
        >>> Layout.of(layer).bind(layer, w, gradient)
        >>> layer(torch.tensor([3.0, 4.0])).backward()
        >>> gradient.tolist()
        [3.0, 4.0]
        """
        values, gradients = self.unflatten(w), self.unflatten(gradient)
        for name, parameter in _trainable(model).items():
            parameter.data, parameter.grad = values[name], gradients[name]

    def fingerprint(self) -> str:
        """A short hash of names, shapes and dtype: two sides that agree on it share a layout."""
        text = repr((self.names, self.shapes, str(self.dtype)))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def raw_bytes(x: Tensor) -> bytes:
    """A tensor's numbers as they lie in memory: little endian wherever torch runs.

    >>> raw_bytes(torch.tensor([1.0])).hex()
    '0000803f'
    """
    if not x.numel():
        return b""  # its stride may be 0, of which view makes no octets
    octets = x.detach().cpu().reshape(-1).contiguous().view(torch.uint8)
    return octets.numpy().tobytes()


def _trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}
