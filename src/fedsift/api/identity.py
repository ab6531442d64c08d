"""What identifies the data and the model of a run, so that a folder is continued with the same."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsift.api.result import Result
from fedsift.api.settings import OWN_DATA
from fedsift.api.start import snapshot_of
from fedsift.federation.round import Federation
from fedsift.federation.snapshot import Snapshot
from fedsift.task import Data, Task
from fedsift.task.samples import DatasetItems, leaves_of

HEX_DIGITS = 8
ITEMS = 16
"""The items of a Dataset that are compared, besides its length."""


def identity_of(federation: Federation, start: Result | Snapshot | None) -> dict[str, str]:
    """Return settings that name the data, the fixed part of the model and the start by hashes.

    The initial parameters are not part of it: an unfinished run continues from its checkpoint.
    """
    task = federation.task
    found = {"dataset": f"{OWN_DATA} {data_digest(task)}"}
    if fixed := fixed_tensors(task):
        found["model"] = f"{type(task.model).__name__} {digest_of_tensors(*fixed)}"
    if start is not None:
        snapshot = snapshot_of(start)
        found["start"] = f"round {snapshot.round} {digest_of_tensors(*snapshot.state)}"
    return found


def data_digest(task: Task) -> str:
    """Return a hash of the clients' data and of the test set."""
    hasher = hashlib.blake2b(digest_size=HEX_DIGITS // 2)
    for data in (*task.clients, *([] if task.test is None else [task.test])):
        add_data(hasher, data)
    return hasher.hexdigest()


def add_data(hasher: Any, data: Data) -> None:
    """Add all arrays of a client's data; of a Dataset, its length and some items."""
    if isinstance(data, DatasetItems):
        rows = np.linspace(0, len(data) - 1, min(ITEMS, len(data))).astype(int).tolist()
        hasher.update(f"{len(data)} items".encode())
        data = data.fetch(rows, seed=0)
    for leaf in leaves_of(data):
        add_tensor(hasher, leaf)


def fixed_tensors(task: Task) -> list[Tensor]:
    """Return the parameters and buffers that training does not change."""
    buffers = task.layout.buffers
    trained = {*task.layout.names, *(buffers.names if buffers else ())}
    named = {**dict(task.model.named_parameters()), **dict(task.model.named_buffers())}
    return [x for name, x in named.items() if name not in trained]


def digest_of_tensors(*tensors: Tensor) -> str:
    """Return a hash of tensors.

    >>> digest_of_tensors(torch.zeros(2)), digest_of_tensors(torch.zeros(1, 2))
    ('7376d294', '22b1aa2e')
    """
    hasher = hashlib.blake2b(digest_size=HEX_DIGITS // 2)
    for x in tensors:
        add_tensor(hasher, x)
    return hasher.hexdigest()


def add_tensor(hasher: Any, x: Tensor) -> None:
    """Add a tensor's dtype, shape and bytes."""
    hasher.update(f"{x.dtype} {tuple(x.shape)}".encode())
    content = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    hasher.update(content.numpy().data)
