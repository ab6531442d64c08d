"""How a data set is dealt out to clients: arrays of row numbers, one a client."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from fedsift.seeding import stream

Rows = NDArray[np.int64]


def iid(labels: NDArray[np.int64], clients: int, seed: int) -> list[Rows]:
    """Shuffle and cut into equal parts, to within one sample.

    >>> [len(rows) for rows in iid(np.zeros(10, np.int64), 3, seed=0)]
    [4, 3, 3]
    """
    _check_clients(clients, len(labels))
    order = stream(seed, "partition").permutation(len(labels))
    return [np.sort(part) for part in np.array_split(order, clients)]


EVEN = 1e100
"""A θ from which on shares are equal; sums of much larger ones are no numbers any more."""


def dirichlet(labels: NDArray[np.int64], clients: int, seed: int, theta: float) -> list[Rows]:
    """Deal each class by shares drawn from Dirichlet(θ): the smaller θ, the less alike the clients.

    A client that would end up empty takes one sample of the largest.

    >>> rows = dirichlet(np.arange(100) % 2, 5, seed=0, theta=0.1)
    >>> sorted(np.concatenate(rows).tolist()) == list(range(100)), min(map(len, rows)) > 0
    (True, True)
    """
    _check_clients(clients, len(labels))
    if not 0 < theta < math.inf:
        raise ValueError(f"theta must be a positive number, got {theta}")
    draw = stream(seed, "partition")
    dealt: list[list[int]] = [[] for _ in range(clients)]
    for label in np.unique(labels):
        members = draw.permutation(np.flatnonzero(labels == label))
        shares = draw.dirichlet(np.full(clients, min(theta, EVEN)))
        cuts = np.round(np.cumsum(shares)[:-1] * len(members)).astype(int)
        for client, part in enumerate(np.split(members, cuts)):
            dealt[client].extend(part.tolist())
    for poor in dealt:
        if not poor:
            poor.append(max(dealt, key=len).pop())
    return [np.sort(np.array(rows, np.int64)) for rows in dealt]


def documents(labels: NDArray[np.int64], clients: int, seed: int) -> list[Rows]:
    """Whole documents (or classes) to each client: as many to each, neighbors together.

    Neighbors are alike, as the modules of a package are. The seed says where the first client
    begins.

    >>> rows = documents(np.array([0, 0, 0, 1, 2, 2, 3]), 2, seed=0)
    >>> sorted(map(len, rows)), sorted(np.concatenate(rows).tolist())
    ([3, 4], [0, 1, 2, 3, 4, 5, 6])
    """
    names = np.unique(labels)
    _check_clients(clients, len(names), "whole documents (of images: classes)")
    order = np.roll(names, stream(seed, "partition").integers(len(names)))
    return [np.flatnonzero(np.isin(labels, own)) for own in np.array_split(order, clients)]


PARTITIONS: tuple[str, ...] = ("iid", "dirichlet", "documents")


def deal(
    partition: str, labels: NDArray[np.int64], clients: int, seed: int, theta: float
) -> list[Rows]:
    """Deal by a partition's command-line name.

    ``labels`` are each sample's class or, in a text, its document.

    >>> deal("dirichlet", np.arange(4), 8, seed=0, theta=1.0)
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
