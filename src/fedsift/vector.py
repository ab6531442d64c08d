"""A model's parameters as one flat vector (Layout), and named vectors of that form (State).

Every numeric function of fedsift works on tensors of shape ``(..., d)``: the last axis holds a
model's parameters one after another, and the axes before it are clients.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedsift.errors import explain_renamed

MOMENTS = ("w", "m", "v")
"""The vectors of the Adam methods: weights, first moment and second moment."""
SampleShapes = tuple[tuple[int, ...], tuple[int, ...]]
"""The shapes of one input and of its label."""


class State:
    """An immutable set of named vectors ``(..., d)``, of which ``w`` holds the weights.

    Iteration yields the vectors, in the order of ``names``.

    >>> x = State(w=torch.ones(2), c=torch.zeros(2))
    >>> x.names, x.w.tolist(), x["c"].tolist()
    (('w', 'c'), [1.0, 1.0], [0.0, 0.0])
    >>> (x - x.replace(w=torch.zeros(2))).w.tolist()
    [1.0, 1.0]
    >>> x.m
    Traceback (most recent call last):
    ...
    AttributeError: this state has the vectors w, c, but no 'm'
    """

    def __init__(self, **vectors: Tensor) -> None:
        self.__dict__.update(vectors)

    @classmethod
    def start(cls, w: Tensor, names: Sequence[str] = MOMENTS) -> State:
        """Return the state with the given weights in which all other vectors are zero.

        >>> State.start(torch.ones(1)).v.tolist()
        [0.0]
        """
        return cls(**{name: w if name == "w" else torch.zeros_like(w) for name in names})

    @classmethod
    def of(cls, names: Sequence[str], vectors: Iterable[Tensor]) -> State:
        """Return a state, given its names and its vectors in the same order."""
        return cls(**dict(zip(names, vectors, strict=True)))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the vectors."""
        return tuple(self.__dict__)

    def items(self) -> ItemsView[str, Tensor]:
        """Return the names and the vectors."""
        return self.__dict__.items()

    def replace(self, **changed: Tensor) -> State:
        """Return the state with some of its vectors replaced."""
        for name in changed:
            self[name]
        return State(**{**self.__dict__, **changed})

    def map(self, function: Callable[[Tensor], Tensor]) -> State:
        """Return the state with a function applied to each vector."""
        return State(**{name: function(x) for name, x in self.items()})

    def plus(self, other: State) -> State:
        """Return the elementwise sum."""
        return State(**{name: x + other[name] for name, x in self.items()})

    def __sub__(self, other: State) -> State:
        return State(**{name: x - other[name] for name, x in self.items()})

    def __getitem__(self, name: str) -> Tensor:
        found: Tensor = getattr(self, name)
        return found

    def __contains__(self, name: str) -> bool:
        return name in self.__dict__

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.__dict__.values())

    def __len__(self) -> int:
        return len(self.__dict__)

    def __getattr__(self, name: str) -> Tensor:
        if name in RENAMED_METHODS:
            raise AttributeError(f"a state is no longer a tuple: use {RENAMED_METHODS[name]}")
        names = ", ".join(self.__dict__)
        raise AttributeError(f"this state has the vectors {names}, but no {name!r}")

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a state cannot be changed: use state.replace({name}=...)")

    def __repr__(self) -> str:
        vectors = ", ".join(f"{name}={tuple(x.shape)}" for name, x in self.items())
        return f"State({vectors})"


RENAMED_METHODS = {"_replace": "state.replace(w=...)", "_asdict": "dict(state.items())"}
"""Methods of the named tuple (W, M, V) that states were before."""


@dataclass(frozen=True)
class Layout:
    """The position of each named parameter of a model in its flat vector.

    ``lengths`` are the lengths of vectors that do not have one number per parameter, by name.
    ``buffers`` is the layout of the buffers that training changes, such as the running statistics
    of batch normalization. A vector of *values* holds the parameters, then these buffers.
    ``sample_shapes`` are known if the method synthesizes samples.

    >>> layout = Layout.of(nn.Linear(3, 2))
    >>> layout.d, layout.names, layout.offsets
    (8, ('weight', 'bias'), (0, 6))
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    lengths: tuple[tuple[str, int], ...] = ()
    buffers: Layout | None = None
    sample_shapes: SampleShapes | None = None

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

    def length(self, name: str) -> int:
        """Return the length of a named vector: d, unless the layout says otherwise.

        >>> layout = Layout.of(nn.Linear(3, 2)).with_lengths({"p": 5})
        >>> layout.length("w"), layout.length("p")
        (8, 5)
        """
        return dict(self.lengths).get(name, self.d)

    def with_lengths(self, lengths: Mapping[str, int]) -> Layout:
        """Return the layout with more vectors of other lengths."""
        return replace(self, lengths=tuple(sorted({**dict(self.lengths), **lengths}.items())))

    def with_sample_shapes(self, shapes: SampleShapes) -> Layout:
        """Return the layout with the shapes of one input and of its label."""
        return replace(self, sample_shapes=shapes)

    def with_buffers(self, model: nn.Module, names: Sequence[str]) -> Layout:
        """Return the layout with the given buffers of a model.

        Integers, such as ``num_batches_tracked``, become numbers of the layout's dtype.

        >>> layer = nn.BatchNorm1d(2)
        >>> layout = Layout.of(layer).with_buffers(layer, ["running_mean", "num_batches_tracked"])
        >>> layout.read(layer).tolist()
        [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
        """
        return self.with_shapes_of({name: model.get_buffer(name) for name in names})

    def with_shapes_of(self, buffers: Mapping[str, Tensor]) -> Layout:
        """Return the layout with buffers of the given names and shapes, if there are any."""
        if not buffers:
            return self
        shapes = tuple(tuple(x.shape) for x in buffers.values())
        part = Layout(tuple(buffers), shapes, self.dtype)
        return replace(self, buffers=part).with_lengths({"b": part.d})

    def without_buffers(self) -> Layout:
        """Return the layout without buffers."""
        lengths = tuple((name, length) for name, length in self.lengths if name != "b")
        return replace(self, buffers=None, lengths=lengths)

    def split(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Split values into the parameters ``(..., d)`` and the buffers."""
        return values[..., : self.d], values[..., self.d :]

    def named(self, values: Tensor) -> dict[str, Tensor]:
        """Split values into parameters and buffers by name; the buffers may be left out."""
        w, b = self.split(values)
        return {**self.unflatten(w), **self.named_buffers(b)}

    def named_buffers(self, b: Tensor) -> dict[str, Tensor]:
        """Split a vector of buffers by name; it may be empty."""
        return self.buffers.unflatten(b) if self.buffers and b.numel() else {}

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
        """Return a copy of the model's parameters, and of its buffers after them, as one vector."""
        w = self.flatten({n: p.detach() for n, p in _trainable(model).items()})
        return torch.cat([w, self.read_buffers(model)]) if self.buffers else w

    def read_buffers(self, model: nn.Module) -> Tensor:
        """Return a copy of the model's buffers as one vector, empty without buffers."""
        if self.buffers is None:
            return torch.empty(0, dtype=self.dtype)
        named = {name: model.get_buffer(name).detach() for name in self.buffers.names}
        return self.buffers.flatten(named).to(self.dtype)

    def write(self, values: Tensor, model: nn.Module) -> None:
        """Set the model's parameters, and its buffers if they are given, from a vector."""
        targets = _trainable(model)
        shapes = {name: tuple(p.shape) for name, p in targets.items()}
        if shapes != dict(zip(self.names, self.shapes, strict=True)):
            raise ValueError("the parameter names or shapes differ from those of the trained model")
        w, b = self.split(values)
        with torch.no_grad():
            for name, value in self.unflatten(w).items():
                targets[name].copy_(value)
        if b.numel():
            self.write_buffers(b, model)

    def write_buffers(self, b: Tensor, model: nn.Module) -> None:
        """Set the model's buffers from a vector. Integers are rounded."""
        if self.buffers is None:
            return
        with torch.no_grad():
            for name, value in self.buffers.unflatten(b).items():
                target = model.get_buffer(name)
                target.copy_(value if target.is_floating_point() else value.round())

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
        """Return a short hash of names, shapes, dtype, other lengths, buffers and samples."""
        buffers = (self.buffers.fingerprint(),) if self.buffers else ()
        samples = self.sample_shapes or ()
        text = repr((self.names, self.shapes, str(self.dtype), *self.lengths, *buffers, *samples))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def all_finite(*tensors: Tensor) -> bool:
    """Whether all elements of the tensors are finite.

    >>> all_finite(torch.tensor([1.0, float("inf")]))
    False
    """
    # A finite sum has finite terms, and takes a fortieth of the time of torch.isfinite on a CPU.
    if bool(torch.stack([x.sum() for x in tensors]).isfinite().all()):
        return True
    return all(bool(x.isfinite().all()) for x in tensors)


def raw_bytes(x: Tensor) -> bytes:
    """Return a tensor's numbers as they are in memory: little endian wherever PyTorch runs.

    >>> raw_bytes(torch.tensor([1.0])).hex()
    '0000803f'
    """
    if not x.numel():
        return b""  # its stride may be 0, which view does not accept
    flat = x.detach().cpu().reshape(-1).contiguous()
    return flat.view(torch.uint8).numpy().tobytes()


def copy_sharing_frozen(model: nn.Module) -> nn.Module:
    """Copy a model. Its frozen parameters, which may take gigabytes, belong to both.

    >>> model = nn.Sequential(nn.Linear(1, 1).requires_grad_(False), nn.Linear(1, 1))
    >>> copied = copy_sharing_frozen(model)
    >>> copied[0].weight is model[0].weight, copied[1].weight is model[1].weight
    (True, False)
    """
    return copy.deepcopy(model, {id(p): p for p in model.parameters() if not p.requires_grad})


def _trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


__getattr__ = explain_renamed(__name__)
