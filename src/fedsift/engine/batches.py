"""Batches that are made at every use: items fetched from a Dataset, and inputs transformed.

Each batch has its own seeds, named by round, client and step. It is the same in every engine,
however many processes fetch the items, and after a resume.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any
from weakref import WeakSet, finalize

import torch
from torch.utils.data import DataLoader, Dataset

from fedsift.seeding import torch_seed, torch_seeds
from fedsift.task import NumSteps, Task
from fedsift.task.samples import (
    DatasetItems,
    Pair,
    Tree,
    leaves_of,
    map_tree,
    restored_python_random,
    restored_torch_random,
    seed_generators,
    select_rows,
    to_device,
)

Key = tuple[int, list[int], int]
"""A client, the rows of a batch, and the seed with which they are fetched."""


class LiveBatches:
    """The batches of clients for which :meth:`Task.is_live` holds."""

    def __init__(self, task: Task) -> None:
        self.task, self.items = task, KeyedBatches(task).__getitem__
        keep_freed_memory()

    def of_clients(self, round: int, clients: Sequence[int], steps: NumSteps) -> Iterator[Pair]:
        """Yield the batch of each client for the first step, then those for the next.

        The last batch of a client that takes fewer steps than others repeats.
        """
        rows = {n: self._rows(round, n, steps) for n in clients}
        last = {n: len(batches) - 1 for n, batches in rows.items()}
        places = [
            (min(step, last[n]), n) for step in range(1 + max(last.values())) for n in clients
        ]
        fetched = self._fetched(round, rows, places)
        with restored_python_random():
            for step, client in places:
                x, y = self._pair(client, rows[client][step], fetched)
                yield self._transformed(x, round, client, step), y

    def _fetched(
        self, round: int, rows: dict[int, list[list[int]]], places: Sequence[tuple[int, int]]
    ) -> Iterator[Pair]:
        """Yield the batches that are fetched from Datasets, in order."""
        is_dataset = {n: isinstance(self.task.clients[n], DatasetItems) for n in rows}
        seeds = {
            n: torch_seeds(len(rows[n]), self.task.seed, "items", round, n)
            for n in rows
            if is_dataset[n]
        }
        keys = ((n, rows[n][step], seeds[n][step]) for step, n in places if is_dataset[n])
        if self.task.num_workers:
            return self._workers.fetch(list(keys))
        return in_bursts(map(self.items, keys), self.task.device)

    def _pair(self, client: int, rows: list[int], fetched: Iterator[Pair]) -> Pair:
        """Return the given rows of a client's samples, or the batch that was fetched for it."""
        data = self.task.clients[client]
        if not isinstance(data, DatasetItems):
            index = torch.tensor(rows)
            return select_rows(data[0], index), select_rows(data[1], index)
        x, y = next(fetched)
        is_elsewhere = data.device.type != "cpu"
        return (to_device(x, data.device), to_device(y, data.device)) if is_elsewhere else (x, y)

    def _rows(self, round: int, client: int, steps: NumSteps) -> list[list[int]]:
        batches = self.task.batches(round, client, steps)
        whole = list(range(self.task.batch_of(client)))
        if batches is None:
            return [whole] * self.task.num_steps(client, steps)
        found: list[list[int]] = batches.tolist()
        return found

    def _transformed(self, x: Tree, round: int, client: int, step: int) -> Tree:
        if self.task.transform is None:
            return x
        seed = torch_seed(self.task.seed, "transform", round, client, step)
        with restored_torch_random(self.task.device), torch.no_grad():
            seed_generators(seed, self.task.device)
            return self.task.transformed(x)

    @cached_property
    def _workers(self) -> FetchWorkers:
        return FetchWorkers(self.task)


FREED_BYTES = 32_000_000
"""The largest block of memory that glibc can be made to keep."""


def keep_freed_memory() -> None:
    """Let the C library keep the memory of batches for the next ones.

    By default, glibc returns it to the system at once, and the page faults of each new batch take
    longer than copying its samples. It keeps blocks up to the size of the largest one ever freed.
    """
    torch.empty(FREED_BYTES, dtype=torch.uint8)


BURST_BYTES = 16_000_000
"""Batches are fetched ahead of their use up to about this size."""


def in_bursts(batches: Iterator[Pair], device: torch.device) -> Iterator[Pair]:
    """Yield batches that are fetched several at a time, without effect on PyTorch's generators.

    After a training step, the code of the Dataset is no longer in the processor's caches, so that
    fetching the first batch takes much longer than fetching the next ones.

    >>> ahead = iter([(torch.zeros(2), torch.zeros(2)), (torch.ones(2), torch.ones(2))])
    >>> x, y = next(in_bursts(ahead, torch.device("cpu")))
    >>> x.tolist(), list(ahead)
    ([0.0, 0.0], [])
    """
    while burst := next_burst(batches, device):
        yield from burst


def next_burst(batches: Iterator[Pair], device: torch.device) -> list[Pair]:
    """Return the next batches, up to about :data:`BURST_BYTES`; at the end, none."""
    with restored_torch_random(device):
        burst = list(islice(batches, 1))
        size = sum(leaf.nbytes for pair in burst for leaf in leaves_of(pair))
        return burst + list(islice(batches, BURST_BYTES // max(1, size)))


class KeyedBatches(Dataset[Pair]):
    """Batches of items by their keys."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def __getitem__(self, key: Key) -> Pair:
        client, rows, seed = key
        data = self.task.clients[client]
        assert isinstance(data, DatasetItems)
        return data.fetch_seeded(rows, seed)


class FetchWorkers:
    """Processes that fetch batches ahead of their use; they live as long as this object.

    Nothing that the loader refers to may refer to this object. Workers whose loader is part of a
    reference cycle outlive it by five seconds, because the cycle's queues are closed first.
    """

    def __init__(self, task: Task) -> None:
        self.keys = KeysOfRound()
        with allow_many_workers():
            self.loader = DataLoader(
                KeyedBatches(task),
                sampler=self.keys,
                batch_size=None,
                num_workers=task.num_workers,
                persistent_workers=True,
                collate_fn=lambda pair: pair,
                generator=torch.Generator(),
                multiprocessing_context="fork" if sys.platform == "linux" else None,
            )

    def fetch(self, keys: list[Key]) -> Iterator[Pair]:
        """Yield the batches with these keys, in order."""
        self.keys.keys = keys
        with allow_many_workers():
            iterator = iter(self.loader)
        if iterator not in WITH_WORKERS:
            WITH_WORKERS.add(iterator)
            finalize(self, iterator._shutdown_workers)  # type: ignore[attr-defined]
        return iterator


@contextmanager
def allow_many_workers() -> Iterator[None]:
    """Let PyTorch not warn of more workers than cores, which are right for items that wait."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")
        yield


@dataclass
class KeysOfRound:
    """The keys of the batches that the workers fetch next, in order."""

    keys: Sequence[Key] = ()

    def __iter__(self) -> Iterator[Key]:
        return iter(self.keys)


WITH_WORKERS: WeakSet[Any] = WeakSet()
"""Iterators of this process that stop their workers when they are no longer used."""


def leave_workers_to_parent() -> None:
    """In a forked process, do not try to stop the workers of its parent: PyTorch fails at that."""
    for iterator in WITH_WORKERS:
        iterator._shutdown = True


os.register_at_fork(after_in_child=leave_workers_to_parent)


def joined(pairs: Sequence[Pair]) -> Pair:
    """Return batches end to end.

    >>> x, y = joined([(torch.zeros(2, 3), torch.zeros(2)), (torch.zeros(1, 3), torch.zeros(1))])
    >>> x.shape, y.shape
    (torch.Size([3, 3]), torch.Size([3]))
    """
    x, y = zip(*pairs, strict=True)
    return map_tree(lambda *parts: torch.cat(parts), *x), map_tree(
        lambda *parts: torch.cat(parts), *y
    )
