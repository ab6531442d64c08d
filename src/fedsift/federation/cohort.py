"""How many clients train in a round."""

from __future__ import annotations

from numbers import Real


def cohort_size(participation: float, clients: int) -> int:
    """Round ``participation * clients`` to the nearest whole number, at least 1; halves go up.

    >>> cohort_size(0.5, 5), cohort_size(0.01, 5)
    (3, 1)
    """
    return max(1, int(participation * clients + 0.5))


def check_cohort(clients: int, participation: float, min_clients: int) -> None:
    """Check that ``participation`` and ``min_clients`` are consistent with the number of clients.

    >>> check_cohort(clients=5, participation=0.5, min_clients=4)
    Traceback (most recent call last):
    ...
    ValueError: min_clients must be from 0 to the cohort's 3, got 4
    """
    if not isinstance(participation, Real) or not 0 < participation <= 1:
        raise ValueError(f"participation must be in (0, 1], got {participation!r}")
    most = cohort_size(participation, clients)
    if not 0 <= min_clients <= most:
        raise ValueError(f"min_clients must be from 0 to the cohort's {most}, got {min_clients}")
