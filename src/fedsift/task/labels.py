"""The classes of each client's data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

MOST_CLASSES = 1000
"""Labels with more distinct values than this are not treated as classes."""


def labels_of(clients: Sequence[Any]) -> list[list[int]] | None:
    """Return the number of samples of each class on each client; None without class labels.

    >>> labels_of([(torch.zeros(3, 2), torch.tensor([0, 1, 1]))])
    [[1, 2]]
    """
    # The labels of a Dataset are unknown without fetching every item.
    labels: list[Any] = [data[1] if isinstance(data, tuple) else None for data in clients]
    if any(not isinstance(y, Tensor) or y.is_floating_point() or y.dim() != 1 for y in labels):
        return None
    all_labels = torch.cat(labels).cpu()
    sizes = torch.tensor([len(y) for y in labels])
    classes = int(all_labels.max()) + 1
    if int(all_labels.min()) < 0 or classes > MOST_CLASSES:
        return None
    owner = torch.arange(len(labels)).repeat_interleave(sizes)
    counts = torch.bincount(owner * classes + all_labels, minlength=len(labels) * classes)
    found: list[list[int]] = counts.view(len(labels), classes).tolist()
    return found
