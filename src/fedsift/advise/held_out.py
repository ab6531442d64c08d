"""Hold out a fifth of the training data, on which settings are judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset

from fedsift.data import load, with_validation_split
from fedsift.runs.config import RunConfig
from fedsift.runs.parts import Parts, built_in_parts, user_parts
from fedsift.seeding import stream
from fedsift.simulation.preparation import check_clients
from fedsift.task.samples import Data, DatasetItems, as_data, map_tree, select_rows, size_of
from fedsift.task.user_code import is_user_code
from fedsift.vector import Layout

HELD_OUT = 5
"""One training sample out of this many is held out to judge the settings."""


def held_out_parts(config: RunConfig) -> Parts:
    """Return what a configuration describes, tested on held-out training data."""
    return held_out_user_parts(config) if is_user_code(config.dataset) else of_dataset(config)


def of_dataset(config: RunConfig) -> Parts:
    """Hold out samples of a built-in data set, and split the others across clients."""
    dataset = load(config.dataset)
    number = len(dataset.labels) // HELD_OUT
    return built_in_parts(config, with_validation_split(dataset, number, config.seed))


def held_out_user_parts(config: RunConfig) -> Parts:
    """Hold out samples of each client of the user's own data."""
    parts = user_parts(config)
    clients, test = hold_out(parts.clients, config.seed, Layout.of(parts.model).dtype)
    return replace(parts, clients=clients, test=test)


def hold_out(clients: Sequence[Any], seed: int, dtype: torch.dtype) -> tuple[list[Any], Any]:
    """Return each client's data without a fifth of its samples, and these samples as a test set.

    >>> x = torch.zeros(10, 3)
    >>> clients, (held, _) = hold_out([(x, x), (x, x)], seed=0, dtype=torch.float32)
    >>> [len(x) for x, _ in clients], len(held)
    ([8, 8], 4)
    """
    check_clients(clients)
    kept, held = [], []
    for n, given in enumerate(clients):
        data = as_data(f"client {n}", given, "cpu", dtype)
        order = stream(seed, "held out", n).permutation(size_of(data))
        cut = len(order) // HELD_OUT
        kept.append(rows_of(data, order[cut:]))
        if cut:
            held.append(rows_of(data, order[:cut]))
    return kept, joined(held)


def rows_of(data: Data, rows: np.ndarray[Any, np.dtype[np.int64]]) -> Any:
    """Return some samples of a client."""
    if isinstance(data, DatasetItems):
        return Subset(data.dataset, rows.tolist())
    return tuple(select_rows(part, torch.from_numpy(rows)) for part in data)


def joined(parts: Sequence[Any]) -> Any:
    """Return the samples of several clients as one test set."""
    if not parts:
        raise ValueError(f"advise needs a client with at least {HELD_OUT} samples")
    if all(isinstance(part, Subset) for part in parts):
        return ConcatDataset(parts)
    if any(isinstance(part, Subset) for part in parts):
        raise ValueError("advise needs the data of all clients in one format: arrays or Datasets")
    return map_tree(lambda *tensors: torch.cat(tensors), *parts)
