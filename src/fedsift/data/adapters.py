"""Clients' tensors out of what others hold: row numbers, torch data sets, Flower's partitions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

Data = tuple[Tensor, Tensor]


def split(data: Data, rows: Iterable[ArrayLike]) -> list[Data]:
    """Deal samples out by any list of index arrays, one a client.

    >>> x, y = torch.arange(4.0)[:, None], torch.tensor([0, 1, 0, 1])
    >>> [labels.tolist() for _, labels in split((x, y), [[0, 2], [1, 3, 0]])]
    [[0, 0], [1, 1, 0]]
    """
    x, y = data
    return [(x[own], y[own]) for own in (_checked(r, len(x), n) for n, r in enumerate(rows))]


def _checked(rows: ArrayLike, samples: int, client: int) -> Tensor:
    own = np.asarray(rows)
    if own.ndim != 1 or not (own.size and np.issubdtype(own.dtype, np.integer)):
        raise ValueError(f"client {client}'s rows must be a list of whole numbers, not empty")
    if own.min() < 0 or own.max() >= samples:
        raise ValueError(f"client {client} has rows outside of the {samples} samples")
    return torch.from_numpy(own.astype(np.int64))


def from_dataset(dataset: Dataset[Any]) -> Data:
    """All samples of a torch ``Dataset`` of pairs, as two tensors.

    Its items are tensors, arrays or numbers; give images a transform that makes tensors of them.

    >>> from torch.utils.data import TensorDataset
    >>> x, y = from_dataset(TensorDataset(torch.ones(3, 2), torch.tensor([0, 1, 1])))
    >>> x.shape, y.tolist()
    (torch.Size([3, 2]), [0, 1, 1])
    """
    batches = list(DataLoader(dataset, batch_size=1000))
    if not batches:
        raise ValueError("the data set is empty")
    return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


class Partition(Protocol):
    """What is asked of a Hugging Face ``datasets.Dataset``, which Flower's partitions are."""

    @property
    def column_names(self) -> Sequence[str]:
        """Its columns."""
        ...

    def with_format(self, type: str) -> Partition:
        """Itself, giving arrays of that library."""
        ...

    def __getitem__(self, rows: slice) -> Mapping[str, Any]: ...


def from_partition(partition: Partition, x: str = "image", y: str = "label") -> Data:
    """A partition of flwr-datasets, or any Hugging Face ``Dataset``, as two tensors.

    ``x`` and ``y`` are the names of its columns. Images of whole numbers come out as floats from 0
    to 1, with their channels first.
    """
    for name in (x, y):
        if name not in partition.column_names:
            raise ValueError(f"there is no column {name!r}; it has {list(partition.column_names)}")
    columns = partition.with_format("numpy")[:]
    return _as_images(np.asarray(columns[x])), torch.from_numpy(np.asarray(columns[y]))


def _as_images(values: Any) -> Tensor:
    if values.dtype != np.uint8:
        return torch.from_numpy(values)
    images = torch.from_numpy(values).float() / 255
    return images[:, None] if images.dim() == 3 else images.movedim(-1, 1).contiguous()
