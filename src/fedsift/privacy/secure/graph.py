"""The graph of a round: which clients mask with each other and hold each other's shares.

A random k-regular graph, as in Bell et al. (2020): the clients are put on a circle in an order that
no client chooses, and each is connected to the k / 2 next ones on either side.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import comb

from fedsift.privacy.secure.hashing import digest

ALL_UP_TO = 64
"""Up to this many clients, all are each other's neighbors."""
CORRUPT = 0.2
"""The share of clients that may collude with the server, for the default number of neighbors."""
LOST = 0.3
"""The share of clients that may be lost, for the same."""
SECURITY_BITS = 40
"""The default graph fails to protect with a probability of at most 2**-SECURITY_BITS."""
RELIABILITY_BITS = 10
"""The default graph cannot finish a round with a probability of at most 2**-RELIABILITY_BITS."""


def neighbors_of(group: Sequence[int], neighbors: int, seed: bytes) -> dict[int, tuple[int, ...]]:
    """Return each client's neighbors in ascending order.

    >>> neighbors_of([3, 5, 8], 2, b"seed")
    {3: (5, 8), 5: (3, 8), 8: (3, 5)}
    """
    if neighbors >= len(group) - 1:
        return {u: tuple(v for v in sorted(group) if v != u) for u in sorted(group)}
    circle = sorted(group, key=lambda client: digest("order", seed, client))
    steps = [*range(-(neighbors // 2), 0), *range(1, neighbors // 2 + 1)]
    found = {
        u: tuple(sorted(circle[(at + step) % len(circle)] for step in steps))
        for at, u in enumerate(circle)
    }
    return {u: found[u] for u in sorted(found)}


@cache
def default_neighbors(clients: int) -> int:
    """Return the number of neighbors per client: all up to 64 clients, then as few as are safe.

    Among more, it is the smallest even number with which, if a random fifth of the clients collude
    with the server and a random 30 % are lost, no client has a threshold of colluding neighbors
    except with a probability of 2**-40, and every client has a threshold of neighbors that are left
    except with 2**-10. The threshold is three fifths of the neighbors, plus one.

    >>> default_neighbors(20), default_neighbors(1000)
    (19, 328)
    """
    if clients <= ALL_UP_TO:
        return clients - 1
    for neighbors in range(2, clients - 1, 2):
        if is_safe(clients, neighbors):
            return neighbors
    return clients - 1


def is_safe(clients: int, neighbors: int) -> bool:
    """Whether the default threshold holds in a random graph with this many neighbors."""
    threshold = 3 * neighbors // 5 + 1
    corrupt, lost = round(CORRUPT * clients), round(LOST * clients)
    captured = tail(clients - 1, corrupt, neighbors, threshold)
    stranded = tail(clients - 1, lost, neighbors, neighbors - threshold + 1)
    return (
        clients * captured <= 2.0**-SECURITY_BITS and clients * stranded <= 2.0**-RELIABILITY_BITS
    )


def tail(population: int, marked: int, drawn: int, at_least: int) -> float:
    """Return the probability that a random draw contains at least this many marked members.

    >>> tail(population=4, marked=2, drawn=2, at_least=2) == 1 / 6
    True
    """
    ways = sum(
        comb(marked, found) * comb(population - marked, drawn - found)
        for found in range(at_least, min(marked, drawn) + 1)
    )
    return ways / comb(population, drawn)
