"""Convert other formats to clients' tensors: index arrays, torch and Hugging Face data sets."""

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
    """Split samples by a list of index arrays, one per client.

    >>> x, y = torch.arange(4.0)[:, None], torch.tensor([0, 1, 0, 1])
    >>> [labels.tolist() for _, labels in split((x, y), [[0, 2], [1, 3, 0]])]
    [[0, 0], [1, 1, 0]]
    """
    x, y = data
    checked = (_checked(client_rows, len(x), n) for n, client_rows in enumerate(rows))
    return [(x[indices], y[indices]) for indices in checked]


def _checked(rows: ArrayLike, samples: int, client: int) -> Tensor:
    indices = np.asarray(rows)
    if indices.ndim != 1 or not (indices.size and np.issubdtype(indices.dtype, np.integer)):
        raise ValueError(f"the rows of client {client} must be a non-empty list of integers")
    if indices.min() < 0 or indices.max() >= samples:
        raise ValueError(f"client {client} has rows outside the {samples} samples")
    return torch.from_numpy(indices.astype(np.int64))


def from_dataset(dataset: Dataset[Any]) -> Data:
    """Return all samples of a torch ``Dataset`` of pairs as two tensors.

    Its items must be tensors, arrays or numbers; images need a transform that converts them.

    >>> from torch.utils.data import TensorDataset
    >>> x, y = from_dataset(TensorDataset(torch.ones(3, 2), torch.tensor([0, 1, 1])))
    >>> x.shape, y.tolist()
    (torch.Size([3, 2]), [0, 1, 1])
    """
    batches = list(DataLoader(dataset, batch_size=1000))
    if not batches:
        raise ValueError("the dataset is empty")
    return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


class HuggingFaceDataset(Protocol):
    """The part of Hugging Face's ``datasets.Dataset`` that is used here."""

    @property
    def column_names(self) -> Sequence[str]:
        """The names of the columns."""
        ...

    def with_format(self, type: str) -> HuggingFaceDataset:
        """Return the data set with its items in another format."""
        ...

    def __getitem__(self, rows: slice) -> Mapping[str, Any]: ...


def from_huggingface(dataset: HuggingFaceDataset, x: str = "image", y: str = "label") -> Data:
    """Return a Hugging Face ``Dataset``, such as a partition of flwr-datasets, as two tensors.

    ``x`` and ``y`` are the names of its columns. Images of bytes become floats from 0 to 1, with
    the channels first.
    """
    for name in (x, y):
        if name not in dataset.column_names:
            raise ValueError(
                f"there is no column {name!r}; the columns are {list(dataset.column_names)}"
            )
    columns = dataset.with_format("numpy")[:]
    return _as_images(np.asarray(columns[x])), torch.from_numpy(np.asarray(columns[y]))


def _as_images(values: Any) -> Tensor:
    if values.dtype != np.uint8:
        return torch.from_numpy(values)
    images = torch.from_numpy(values).float() / 255
    return images[:, None] if images.dim() == 3 else images.movedim(-1, 1).contiguous()
