"""Conversion between models, Flower's arrays and flat vectors."""

from __future__ import annotations

from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord
from torch import Tensor, nn

from fedsift.task import statistics_of
from fedsift.vector import Layout

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""The buffers of normalization layers, whose names tell them from parameters."""
DTYPES = {str(dtype): dtype for dtype in (torch.float16, torch.float32, torch.float64)}
"""The types of parameters that Flower's arrays can have."""


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


def values_of(layout: Layout, arrays: ArrayRecord) -> Tensor:
    """Return the values of a model's arrays in a given layout; other arrays are left out."""
    tensors = {}
    shapes = {**shapes_of(layout), **(shapes_of(layout.buffers) if layout.buffers else {})}
    for name, shape in shapes.items():
        if name not in arrays:
            raise ValueError(f"the model's arrays lack {name!r}: reply with all that were received")
        tensors[name] = torch.from_numpy(arrays[name].numpy()).to(layout.dtype)
        if tuple(tensors[name].shape) != shape:
            found = tuple(tensors[name].shape)
            raise ValueError(f"the array {name!r} has the shape {found}, but was sent as {shape}")
    w = layout.flatten(tensors)
    return torch.cat([w, layout.buffers.flatten(tensors)]) if layout.buffers else w


def shapes_of(layout: Layout) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter by name."""
    return dict(zip(layout.names, layout.shapes, strict=True))


def record_of_layout(layout: Layout) -> ConfigRecord:
    """Return the names and shapes of a model's arrays as a record of a message.

    >>> layout = Layout(("weight", "bias"), ((10, 64), (10,)), torch.float32)
    >>> dict(record_of_layout(layout))["shapes"]
    ['10,64', '10']
    """
    parts = [layout, *([layout.buffers] if layout.buffers else [])]
    shapes = [shape for part in parts for shape in part.shapes]
    return ConfigRecord({
        "names": [name for part in parts for name in part.names],
        "shapes": [",".join(map(str, shape)) for shape in shapes],
        "parameters": len(layout.names),
        "dtype": str(layout.dtype),
    })  # fmt: skip


def layout_from_record(record: ConfigRecord) -> Layout:
    """Return the layout in a record; the inverse of :func:`record_of_layout`."""
    about: dict[str, Any] = dict(record)
    shapes = [tuple(map(int, filter(None, text.split(",")))) for text in about["shapes"]]
    names, number = about["names"], about["parameters"]
    layout = Layout(tuple(names[:number]), tuple(shapes[:number]), DTYPES[about["dtype"]])
    rest = zip(names[number:], shapes[number:], strict=True)
    return layout.with_shapes_of({name: torch.empty(x, device="meta") for name, x in rest})


def is_statistic(name: str) -> bool:
    """Whether an array holds running statistics of a normalization layer.

    >>> is_statistic("1.running_mean"), is_statistic("1.weight")
    (True, False)
    """
    return name.rpartition(".")[2] in STATISTICS


def is_count(name: str) -> bool:
    """Whether an array is a layer's number of batches, which is an integer."""
    return name.rpartition(".")[2] == STATISTICS[-1]
