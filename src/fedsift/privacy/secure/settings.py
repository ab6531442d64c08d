"""The settings of secure aggregation, and the checks that they are possible."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fedsift.algorithms.method import Algorithm
from fedsift.codec.update import Role
from fedsift.errors import require_packages
from fedsift.privacy.secure.graph import default_neighbors

MIN_CLIENTS = 3


@dataclass(frozen=True)
class SecureSettings:
    """How many neighbors each client has, and how many of them must take part.

    ``neighbors`` is the number of clients with which each client masks and shares its key; 0 takes
    the number of ``graph.default_neighbors``. ``threshold`` of them restore the key of a client
    that was lost, and must agree on the clients in the sum; 0 takes three fifths plus one. A client
    refuses a round with fewer than ``min_clients`` clients: a server that chose two of its own for
    a round of three would see the third one's values.

    >>> SecureSettings().resolved(clients=20)
    SecureSettings(neighbors=19, threshold=12, min_clients=3)
    """

    neighbors: int = 0
    threshold: int = 0
    min_clients: int = MIN_CLIENTS

    def resolved(self, clients: int) -> SecureSettings:
        """Return the numbers for a round with this many clients, after checking them."""
        least = self.min_clients
        if least < MIN_CLIENTS:
            raise ValueError(f"min_clients must be at least {MIN_CLIENTS}, got {least}")
        if clients < least:
            raise ValueError(
                f"secure aggregation needs at least {least} clients per round, got {clients}"
            )
        neighbors = self.neighbors or default_neighbors(clients)
        check_neighbors(neighbors, clients)
        threshold = self.threshold or 3 * neighbors // 5 + 1
        if not max(2, neighbors // 2 + 1) <= threshold <= neighbors:
            raise ValueError(
                f"secure_threshold must be from {max(2, neighbors // 2 + 1)} to {neighbors}, more "
                f"than half of each client's {neighbors} neighbors, got {threshold}"
            )
        return SecureSettings(neighbors, threshold, least)


def settings_from(given: bool | SecureSettings) -> SecureSettings | None:
    """Return the settings of ``secure=``: True takes the defaults, False has none."""
    if isinstance(given, bool):
        return SecureSettings() if given else None
    if not isinstance(given, SecureSettings):
        raise ValueError(f"secure must be True, False or SecureSettings(...), got {given!r}")
    return given


def check_can_be_secure(algorithm: Algorithm) -> None:
    """Refuse secure aggregation of a method whose clients send different coordinates."""
    require_packages("secure sums", "cryptography", "Crypto", extra="secure")
    if not summed_roles(algorithm):
        raise ValueError(
            f"the clients of {algorithm.name} send different coordinates or scales, which have no "
            "secure sum: use sift-common"
        )


def summed_roles(algorithm: Algorithm) -> tuple[Role, ...]:
    """Return the roles of which the server needs only sums, if only from round 2 on."""
    return algorithm.phase(1).summed or algorithm.phase(2).summed


def check_neighbors(neighbors: int, clients: int) -> None:
    """Check that each of the clients can have this many neighbors.

    >>> check_neighbors(5, 7)
    Traceback (most recent call last):
    ...
    ValueError: secure_neighbors must be an even number from 2 to 6, or 6 for all, got 5
    """
    if neighbors != clients - 1 and (neighbors % 2 or not 2 <= neighbors < clients):
        most = clients - 1
        raise ValueError(
            f"secure_neighbors must be an even number from 2 to {most}, or {most} for all, "
            f"got {neighbors}"
        )


@dataclass(frozen=True)
class SecureTraffic:
    """Bytes of a round's secure aggregation by stage, as means per client."""

    uplink: Mapping[str, float] = field(default_factory=dict)
    downlink: Mapping[str, float] = field(default_factory=dict)
