"""Differential privacy of a federation's rounds: their noise, and what they cost.

The server adds noise to sums of clients that it draws independently; or, with secure aggregation,
each client adds a share of the noise to its values.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fedsift.federation.cohort import cohort_size
from fedsift.privacy.differential import Noise, private_roles
from fedsift.privacy.discrete_gaussian import Bits, Integers
from fedsift.privacy.distributed import DistributedNoise
from fedsift.privacy.secure.settings import SecureSettings, summed_roles
from fedsift.seeding import stream
from fedsift.vector import State

if TYPE_CHECKING:
    from fedsift.federation.round import Federation

Codes = npt.NDArray[np.integer]


def distributed_noise(federation: Federation) -> DistributedNoise | None:
    """Return the noise of a federation's clients; None if they add none.

    A sum needs a threshold of each client's neighbors besides the client itself, so it has at least
    one client more than the threshold. See :func:`settings_with_noise` for smaller groups.
    """
    private, secure = federation.privacy, federation.secure
    if private is None or secure is None:
        return None
    clients = cohort_size(federation.participation, len(federation.task.clients))
    fewest = max(secure.resolved(clients).threshold + 1, secure.min_clients)
    roles = summed_roles(federation.algorithm)
    values = sum(federation.task.layout.length(role) for role in roles)
    return private.distributed(fewest, clients, values)


def settings_with_noise(settings: SecureSettings, noise: DistributedNoise | None) -> SecureSettings:
    """Return the settings with which clients refuse sums that would have too little noise.

    A group that lost clients before they sent their keys has a lower threshold than the whole
    cohort, and its sums could have fewer clients than the noise was chosen for.
    """
    return settings if noise is None else replace(settings, min_clients=noise.fewest)


def noisy_mean(federation: Federation, total: State, noise: Noise) -> State:
    """Return the mean of a round with the server's noise."""
    assert federation.privacy is not None
    roles = private_roles(federation.algorithm, federation.privacy)
    expected = federation.participation * len(federation.task.clients)
    return federation.privacy.noisy_mean(total, roles, expected, noise)


def spent(federation: Federation, rounds: int) -> float:
    """Return ε after some rounds of a private run."""
    assert federation.privacy is not None
    if federation.noise:
        return federation.noise.epsilon(rounds, federation.privacy.delta)
    return federation.privacy.spent(rounds, federation.participation)


def noisy_codes(noise: DistributedNoise, codes: Codes, *purpose: int) -> Integers:
    """Return the codes of a simulated client, clipped, with noise.

    The noise follows from the run's seed, so that the run can be repeated. A real client must draw
    it from a secret.
    """
    key = stream(purpose[0], "distributed noise", *purpose[1:]).bytes(16)
    return noise.added_to(codes.astype(np.int64), Bits(key))
