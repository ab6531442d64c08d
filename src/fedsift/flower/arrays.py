"""A model's arrays as Flower has them, and as one flat vector."""

from __future__ import annotations

import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor, nn

from fedsift.vector import Layout


def flat(arrays: ArrayRecord) -> tuple[Layout, Tensor]:
    """The layout of a model's arrays, and the arrays as one vector."""
    tensors = {name: torch.from_numpy(array.numpy()) for name, array in arrays.items()}
    dtypes = {x.dtype for x in tensors.values()}
    if len(dtypes) != 1 or not next(iter(dtypes)).is_floating_point:
        raise ValueError(
            f"initial_arrays must be parameters of one floating-point type, got {dtypes}: give "
            "fedsift.flower.arrays_of(model)"
        )
    shapes = tuple(tuple(x.shape) for x in tensors.values())
    layout = Layout(tuple(tensors), shapes, dtypes.pop())
    return layout, layout.flatten(tensors)


def arrays_of(model: nn.Module) -> ArrayRecord:
    """A model's parameters that are trained, to start from: neither buffers nor frozen ones."""
    layout = Layout.of(model)
    if layout.dtype == torch.bfloat16:
        raise ValueError("Flower's arrays have no bfloat16: give the model float32")
    return named(layout, layout.read(model))


def named(layout: Layout, w: Tensor) -> ArrayRecord:
    """A vector as a model's arrays, as ``flat`` found them."""
    return ArrayRecord({name: Array(x) for name, x in layout.unflatten(w).items()})
