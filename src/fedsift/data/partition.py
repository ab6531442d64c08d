"""Partitions of a data set among clients: one array of row numbers per client."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from fedsift.seeding import stream

Rows = NDArray[np.int64]


def iid(labels: NDArray[np.int64], clients: int, seed: int) -> list[Rows]:
    """Shuffle and split into parts whose sizes differ by at most one.

    >>> [len(rows) for rows in iid(np.zeros(10, np.int64), 3, seed=0)]
    [4, 3, 3]
    """
    _check_clients(clients, len(labels))
    order = stream(seed, "partition").permutation(len(labels))
    return [np.sort(part) for part in np.array_split(order, clients)]


MAX_THETA = 1e100
"""θ is limited to this: all shares are then equal, and sums of larger values could overflow."""


def dirichlet(labels: NDArray[np.int64], clients: int, seed: int, theta: float) -> list[Rows]:
    """Split each class by shares drawn from Dirichlet(θ); a smaller θ makes clients less alike.

    A client without samples receives one from the largest client.

    >>> rows = dirichlet(np.arange(100) % 2, 5, seed=0, theta=0.1)
    >>> sorted(np.concatenate(rows).tolist()) == list(range(100)), min(map(len, rows)) > 0
    (True, True)
    """
    _check_clients(clients, len(labels))
    if not 0 < theta < math.inf:
        raise ValueError(f"theta must be a positive number, got {theta}")
    draw = stream(seed, "partition")
    rows_of: list[list[int]] = [[] for _ in range(clients)]
    for label in np.unique(labels):
        members = draw.permutation(np.flatnonzero(labels == label))
        shares = draw.dirichlet(np.full(clients, min(theta, MAX_THETA)))
        cuts = np.round(np.cumsum(shares)[:-1] * len(members)).astype(int)
        for client, part in enumerate(np.split(members, cuts)):
            rows_of[client].extend(part.tolist())
    for rows in rows_of:
        if not rows:
            rows.append(max(rows_of, key=len).pop())
    return [np.sort(np.array(rows, np.int64)) for rows in rows_of]


def documents(labels: NDArray[np.int64], clients: int, seed: int) -> list[Rows]:
    """Give each client an equal number of whole, consecutive documents (or classes).

    Consecutive documents are similar, as they are modules of one package. The seed determines the
    first document of the first client.

    >>> rows = documents(np.array([0, 0, 0, 1, 2, 2, 3]), 2, seed=0)
    >>> sorted(map(len, rows)), sorted(np.concatenate(rows).tolist())
    ([3, 4], [0, 1, 2, 3, 4, 5, 6])
    """
    names = np.unique(labels)
    _check_clients(clients, len(names), "whole documents (of images: classes)")
    order = np.roll(names, stream(seed, "partition").integers(len(names)))
    return [np.flatnonzero(np.isin(labels, part)) for part in np.array_split(order, clients)]


PARTITIONS: tuple[str, ...] = ("iid", "dirichlet", "documents")


def partition_indices(
    partition: str, labels: NDArray[np.int64], clients: int, seed: int, theta: float
) -> list[Rows]:
    """Partition by the command-line name of a partition; return the row numbers per client.

    ``labels`` has the class of each sample or, for text, its document.

    >>> partition_indices("dirichlet", np.arange(4), 8, seed=0, theta=1.0)
    Traceback (most recent call last):
    ...
    ValueError: 8 clients cannot share 4 samples; clients must be between 1 and 4
    """
    if partition not in PARTITIONS:
        raise ValueError(f"unknown partition {partition!r}; choose one of: {', '.join(PARTITIONS)}")
    if partition == "iid":
        return iid(labels, clients, seed)
    if partition == "documents":
        return documents(labels, clients, seed)
    return dirichlet(labels, clients, seed, theta)


def _check_clients(clients: int, most: int, what: str = "samples") -> None:
    if not 1 <= clients <= most:
        raise ValueError(
            f"{clients} clients cannot share {most} {what}; clients must be between 1 and {most}"
        )
