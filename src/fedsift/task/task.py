"""The learning task: a model, a loss, and the clients' data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedsift.seeding import stream
from fedsift.task.samples import (
    Data,
    DatasetItems,
    Tree,
    device_of,
    leaves_of,
    map_tree,
    model_arguments,
    num_samples,
    size_of,
    type_names,
)
from fedsift.task.threads import one_thread
from fedsift.task.weights import Weights, weight_of
from fedsift.vector import Layout

Loss = Callable[[Tensor, Tensor], Tensor]
NumSteps = int | Callable[[int, int], int]
"""The local steps per round: a number, or a function of a client's samples and batch size."""
Transform = Callable[[Any], Any]


ONE_GRADIENT = Lock()
"""Held while a model has other parameters than its own, which threads must not see."""


@dataclass(frozen=True)
class Epochs:
    """Local steps that pass over the client's data this many times.

    Each epoch is a fresh permutation of the samples, split into batches; samples that do not fill a
    batch are left out.

    >>> Epochs(2)(samples=70, batch=32)
    4
    """

    number: int

    def __post_init__(self) -> None:
        if self.number < 1:
            raise ValueError(f"epochs must be a whole number of at least 1, got {self.number}")

    def __call__(self, samples: int, batch: int) -> int:
        """Return the number of local steps."""
        return self.number * max(1, samples // batch)


class RemoteClients(Sequence[Data]):
    """The data of a fixed number of clients, most of which is on other machines.

    >>> len(RemoteClients(3, {}))
    3
    """

    def __init__(self, number: int, local: Mapping[int, Data]) -> None:
        self.number, self.local = number, local

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, client: int) -> Data:  # type: ignore[override]
        """Return a client's data, which must be on this machine."""
        return self.local[client]


@dataclass(frozen=True)
class Task:
    """A model, a loss and the clients' data, independent of the method that trains it.

    ``transform`` is applied to the inputs of each training batch. ``num_workers`` processes fetch
    the items of Datasets ahead of their use; with 0, the training process fetches them.
    ``is_frozen`` keeps normalization layers with running statistics in evaluation mode.
    """

    model: nn.Module
    loss: Loss
    clients: Sequence[Data]
    test: Data | None
    batch_size: int | None
    seed: int
    layout: Layout
    transform: Transform | None = None
    num_workers: int = 0
    is_frozen: bool = False

    @property
    def has_model(self) -> bool:
        """Whether the model is known, which a Flower server need not know."""
        return type(self.model) is not nn.Module

    @property
    def device(self) -> torch.device:
        """The device of the clients' data."""
        return device_of(self.clients[0])

    def train_mode(self, model: nn.Module) -> nn.Module:
        """Set a model to training mode, except for its frozen layers, and return it."""
        model.train()
        if self.is_frozen:
            for module in model.modules():
                if has_statistics(module):
                    module.eval()
        return model

    def is_live(self, client: int) -> bool:
        """Whether a client's batches are made again at every use: fetched or transformed."""
        return self.transform is not None or isinstance(self.clients[client], DatasetItems)

    def transformed(self, x: Tree) -> Tree:
        """Return the transformed inputs of a training batch."""
        if self.transform is None:
            return x
        found = self.transform(x)
        if not all(isinstance(leaf, Tensor) for leaf in leaves_of(found)):
            raise ValueError(f"transform must return tensors, got {type_names(found)}")
        if num_samples(found) != num_samples(x):
            raise ValueError(
                f"transform must return as many samples as it gets, {num_samples(x)}, got "
                f"{num_samples(found)}"
            )
        return found

    def batch_of(self, client: int) -> int:
        """Return the client's mini-batch size |D̃ₙ|."""
        size = size_of(self.clients[client])
        return size if self.batch_size is None else min(self.batch_size, size)

    def weight(self, client: int, weights: Weights) -> float:
        """Return the client's weight in the mean."""
        return float(weight_of(weights, size_of(self.clients[client]), self.batch_of(client)))

    def num_steps(self, client: int, steps: NumSteps) -> int:
        """Return the number of a client's local steps per round."""
        if isinstance(steps, int):
            return steps
        return steps(size_of(self.clients[client]), self.batch_of(client))

    def batches(self, round: int, client: int, steps: NumSteps) -> NDArray[np.int64] | None:
        """Return a random sample of rows for each step; None if each batch is the whole set."""
        size, batch = size_of(self.clients[client]), self.batch_of(client)
        if batch == size:
            return None
        if isinstance(steps, Epochs):
            generator = stream(self.seed, "batches", round, client)
            epochs = [generator.permutation(size) for _ in range(steps.number)]
            full = [rows[: size // batch * batch] for rows in epochs]
            return np.concatenate(full).reshape(-1, batch)
        number = self.num_steps(client, steps)
        return sample_without_replacement(self.batch_uniforms(round, client, number), size)

    def batch_uniforms(self, round: int, client: int, steps: int) -> NDArray[np.float64]:
        """Return the uniform random numbers ``(steps, batch)`` that choose the client's batches."""
        generator = stream(self.seed, "batches", round, client)
        return generator.random((steps, self.batch_of(client)))

    def gradient(self, w: Tensor, x: Tree, y: Tree) -> Tensor:
        """Return the gradient ``(d,)`` of the loss on (x, y) at weights w ``(d,)``.

        If buffers follow the weights in w, they are used in place of the model's own. The model is
        in evaluation mode. If x or y requires gradients, the result can be differentiated with
        respect to them. It is computed on one thread, because the clients and the server of a
        deployment must get the same bits.
        """
        w, b = self.layout.split(w)
        point = w if w.requires_grad else w.detach().requires_grad_()
        is_differentiable = any(leaf.requires_grad for leaf in leaves_of((x, y)))
        with ONE_GRADIENT, torch.enable_grad(), one_thread():
            self.model.eval()
            named = {**self.layout.unflatten(point), **self.layout.named_buffers(b)}
            # The last bits of a product depend on where in memory its factors begin.
            aligned = {name: value.clone() for name, value in named.items()}
            x, y = map_tree(torch.clone, (x, y))
            with plain_attention() if is_differentiable else nullcontext():
                output = functional_call(self.model, aligned, *model_arguments(x))
                (gradient,) = torch.autograd.grad(
                    self.loss(output, y), point, create_graph=is_differentiable
                )
        return gradient


def plain_attention() -> AbstractContextManager[None]:
    """Compute attention from plain operations: fused kernels can be differentiated only once."""
    return sdpa_kernel(SDPBackend.MATH)


def sample_without_replacement(
    uniforms: NDArray[np.float64], size: int | NDArray[np.int64]
) -> NDArray[np.int64]:
    """Turn uniform numbers in [0, 1) into distinct integers below ``size`` along the last axis.

    Every set of integers is equally likely. This is Floyd's method: the i-th of n integers is drawn
    from the first size - n + i + 1, and replaced by the last of these if it was drawn before.
    ``size`` may be an array, one size per sample.

    >>> sample_without_replacement(np.array([[0.0, 0.0, 0.9], [0.5, 0.5, 0.99]]), 5).tolist()
    [[0, 3, 4], [1, 2, 4]]
    """
    number = uniforms.shape[-1]
    last = np.asarray(size)[..., None] - number + np.arange(number)
    drawn = (uniforms * (last + 1)).astype(np.int64)
    if number > MAX_COMPARED or drawn.size <= FEW_SAMPLES * number:
        return _replace_duplicates(drawn, np.broadcast_to(last, uniforms.shape))
    drawn = np.ascontiguousarray(np.moveaxis(drawn, -1, 0))
    for place in range(1, number):
        is_duplicate = (drawn[:place] == drawn[place]).any(0)
        np.copyto(drawn[place], last[..., place], where=is_duplicate)
    return np.moveaxis(drawn, 0, -1)


MAX_COMPARED = 512
"""The largest sample in which comparing all pairs is faster than looking up integers in a set."""
FEW_SAMPLES = 16
"""Up to this many samples, looking up is always faster: each place is one call of NumPy."""


def _replace_duplicates(drawn: NDArray[np.int64], last: NDArray[np.int64]) -> NDArray[np.int64]:
    """Replace duplicates in each sample, one sample after another."""
    result = np.empty_like(drawn)
    for place in np.ndindex(drawn.shape[:-1]):
        seen: dict[int, None] = {}
        for number, replacement in zip(drawn[place].tolist(), last[place].tolist(), strict=True):
            seen[replacement if number in seen else number] = None
        result[place] = list(seen)
    return result


def has_statistics(module: nn.Module) -> bool:
    """Whether a module is a normalization layer with running statistics.

    >>> has_statistics(nn.BatchNorm2d(3)), has_statistics(nn.GroupNorm(1, 3))
    (True, False)
    """
    return getattr(module, "running_mean", None) is not None


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks, which may observe or change what it computes.

    >>> layer = nn.Linear(1, 1)
    >>> handle = layer.register_forward_hook(lambda module, x, y: 2 * y)
    >>> has_hooks(layer), has_hooks(nn.Linear(1, 1))
    (True, False)
    """
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, kind) for kind in kinds)
