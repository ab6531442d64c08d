"""A model's parameters as one flat vector (Layout), and FedAdam's state (W, M, V) (Moments).

Every numeric function of fedsift works on tensors of shape ``(..., d)``: the last axis holds a
model's parameters one after another, and the axes before it are clients.
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
        """Return the initial state: W^0 as given, M^0 = V^0 = 0."""
        return cls(w, torch.zeros_like(w), torch.zeros_like(w))

    def __sub__(self, other: Moments) -> Moments:
        return Moments(self.w - other.w, self.m - other.m, self.v - other.v)

    def plus(self, other: Moments) -> Moments:
        """Return the elementwise sum (``+`` on tuples concatenates)."""
        return Moments(self.w + other.w, self.m + other.m, self.v + other.v)


@dataclass(frozen=True)
class Layout:
    """The position of each named parameter of a model in its flat vector.

    >>> layout = Layout.of(nn.Linear(3, 2))
    >>> layout.d, layout.names, layout.offsets
    (8, ('weight', 'bias'), (0, 6))
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, model: nn.Module) -> Layout:
        """Return the layout of a model's trainable parameters, in the model's order."""
        named = _trainable(model)
        if not named:
            raise ValueError("the model has no trainable parameters")
        dtypes = {p.dtype for p in named.values()}
        if len(dtypes) > 1:
            raise ValueError(
                f"the model has parameters of several dtypes ({dtypes}): convert it to one"
            )
        shapes = tuple(tuple(p.shape) for p in named.values())
        return cls(tuple(named), shapes, dtypes.pop())

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of coordinates of each parameter."""
        return tuple(math.prod(shape) for shape in self.shapes)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The index of each parameter's first coordinate."""
        return tuple(accumulate(self.sizes[:-1], initial=0))

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """The offsets as an array."""
        return np.array(self.offsets, np.int64)

    @cached_property
    def d(self) -> int:
        """The total number of coordinates, the paper's d."""
        return sum(self.sizes)

    @cached_property
    def layers(self) -> dict[str, slice]:
        """The slice of the flat vector that each parameter occupies."""
        spans = zip(self.names, self.offsets, self.sizes, strict=True)
        return {name: slice(start, start + size) for name, start, size in spans}

    def flatten(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Concatenate named tensors ``(*clients, *shape)`` to one vector ``(*clients, d)``."""
        pieces = []
        for name, shape in zip(self.names, self.shapes, strict=True):
            tensor = parameters[name]
            clients = tensor.shape[: tensor.dim() - len(shape)]
            pieces.append(tensor.reshape(*clients, -1))
        return torch.cat(pieces, dim=-1)

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """Split one vector ``(*clients, d)`` into named views ``(*clients, *shape)``."""
        clients = vector.shape[:-1]
        parts = torch.split(vector, list(self.sizes), dim=-1)
        shaped = zip(self.names, self.shapes, parts, strict=True)
        return {name: part.view((*clients, *shape)) for name, shape, part in shaped}

    def read(self, model: nn.Module) -> Tensor:
        """Return a copy of the model's parameters as one vector."""
        return self.flatten({n: p.detach() for n, p in _trainable(model).items()})

    def write(self, vector: Tensor, model: nn.Module) -> None:
        """Set the model's parameters from a vector."""
        targets = _trainable(model)
        shapes = {name: tuple(p.shape) for name, p in targets.items()}
        if shapes != dict(zip(self.names, self.shapes, strict=True)):
            raise ValueError("the parameter names or shapes differ from those of the trained model")
        with torch.no_grad():
            for name, value in self.unflatten(vector).items():
                targets[name].copy_(value)

    def bind(self, model: nn.Module, w: Tensor, gradient: Tensor) -> None:
        """Make a model's parameters and their gradients views of two vectors ``(d,)``.

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
        """Return a short hash of names, shapes and dtype."""
        text = repr((self.names, self.shapes, str(self.dtype)))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def raw_bytes(x: Tensor) -> bytes:
    """Return a tensor's numbers as they are in memory: little endian wherever PyTorch runs.

    >>> raw_bytes(torch.tensor([1.0])).hex()
    '0000803f'
    """
    if not x.numel():
        return b""  # its stride may be 0, which view does not accept
    flat = x.detach().cpu().reshape(-1).contiguous()
    return flat.view(torch.uint8).numpy().tobytes()


def _trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}
