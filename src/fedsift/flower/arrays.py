"""Conversion between models, Flower's arrays and flat vectors."""

from __future__ import annotations

import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor, nn

from fedsift.vector import Layout


def arrays_of(model: nn.Module) -> ArrayRecord:
    """Return a model's trainable parameters, without its buffers and frozen parameters."""
    layout = Layout.of(model)
    if layout.dtype == torch.bfloat16:
        raise ValueError("Flower's arrays have no bfloat16: convert the model with model.float()")
    return arrays_from_vector(layout, layout.read(model))


def vector_from_arrays(arrays: ArrayRecord) -> tuple[Layout, Tensor]:
    """Return the layout of a model's arrays, and their values as one vector."""
    tensors = {name: torch.from_numpy(array.numpy()) for name, array in arrays.items()}
    dtypes = {x.dtype for x in tensors.values()}
    if len(dtypes) != 1 or not next(iter(dtypes)).is_floating_point:
        found = ", ".join(sorted(map(str, dtypes))) or "no arrays"
        raise ValueError(
            f"initial_arrays must be parameters of one floating-point type, got {found}: pass "
            "fedsift.flower.arrays_of(model)"
        )
    shapes = tuple(tuple(x.shape) for x in tensors.values())
    layout = Layout(tuple(tensors), shapes, dtypes.pop())
    return layout, layout.flatten(tensors)


def arrays_from_vector(layout: Layout, w: Tensor) -> ArrayRecord:
    """Return a vector as a model's arrays; the inverse of :func:`vector_from_arrays`."""
    return ArrayRecord({name: Array(x) for name, x in layout.unflatten(w).items()})
