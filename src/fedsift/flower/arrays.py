"""Conversion between models, Flower's arrays and flat vectors."""

from __future__ import annotations

import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor, nn

from fedsift.task import statistics_of
from fedsift.vector import Layout

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""The buffers of normalization layers, whose names tell them from parameters."""


def arrays_of(model: nn.Module) -> ArrayRecord:
    """Return a model's trainable parameters and the running statistics of its layers.

    Frozen parameters and other buffers are left out.
    """
    layout = Layout.of(model).with_buffers(model, statistics_of(model))
    if layout.dtype == torch.bfloat16:
        raise ValueError("Flower's arrays have no bfloat16: convert the model with model.float()")
    return arrays_from_vector(layout, layout.read(model))


def vector_from_arrays(arrays: ArrayRecord) -> tuple[Layout, Tensor]:
    """Return the layout of a model's arrays, and their values as one vector."""
    tensors = {name: torch.from_numpy(array.numpy()) for name, array in arrays.items()}
    buffers = {name: x for name, x in tensors.items() if is_statistic(name)}
    parameters = {name: x for name, x in tensors.items() if name not in buffers}
    dtypes = {x.dtype for x in parameters.values()}
    if len(dtypes) != 1 or not next(iter(dtypes)).is_floating_point:
        found = ", ".join(sorted(map(str, dtypes))) or "no arrays"
        raise ValueError(
            f"initial_arrays must be parameters of one floating-point type, got {found}: pass "
            "fedsift.flower.arrays_of(model)"
        )
    shapes = tuple(tuple(x.shape) for x in parameters.values())
    layout = Layout(tuple(parameters), shapes, dtypes.pop()).with_shapes_of(buffers)
    w = layout.flatten(parameters)
    return layout, torch.cat([w, layout.buffers.flatten(buffers).to(w)]) if layout.buffers else w


def arrays_from_vector(layout: Layout, values: Tensor) -> ArrayRecord:
    """Return a vector as a model's arrays; the inverse of :func:`vector_from_arrays`."""
    named = layout.named(values)
    return ArrayRecord(
        {name: Array(x.round().long() if is_count(name) else x) for name, x in named.items()}
    )


def is_statistic(name: str) -> bool:
    """Whether an array holds running statistics of a normalization layer.

    >>> is_statistic("1.running_mean"), is_statistic("1.weight")
    (True, False)
    """
    return name.rpartition(".")[2] in STATISTICS


def is_count(name: str) -> bool:
    """Whether an array is a layer's number of batches, which is an integer."""
    return name.rpartition(".")[2] == STATISTICS[-1]
