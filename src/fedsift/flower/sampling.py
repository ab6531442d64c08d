"""The arguments that FedAvg also has: which clients take part, and with which weights."""

from __future__ import annotations

from dataclasses import dataclass

from fedsift.federation.cohort import check_cohort, cohort_size
from fedsift.task import Weights, check_weights

MIN_TRAIN_NODES = 2
"""FedAvg's default."""


@dataclass(frozen=True)
class Sampling:
    """How many clients train and evaluate in a round, and how many are waited for.

    A round needs ``min_clients`` updates, and ends early with ``enough``. ``min_nodes`` is the
    number of SuperNodes to wait for before each round, if the user chose it.
    """

    clients: int
    participation: float
    min_clients: int
    enough: int | None
    min_nodes: int | None
    fraction_evaluate: float
    min_evaluate_nodes: int

    def __post_init__(self) -> None:
        check_cohort(self.clients, self.participation, self.min_clients)
        check_enough(self.enough, self.min_clients, self.clients)
        check_evaluation(self.fraction_evaluate, self.min_evaluate_nodes)

    @property
    def cohort_size(self) -> int:
        """The number of clients that train in a round."""
        return cohort_size(self.participation, self.clients)


def chosen_participation(
    participation: float | None, fraction_train: float | None, least: int | None, clients: int
) -> float:
    """Return the fraction of clients that train.

    As in FedAvg, ``fraction_train`` of the clients is rounded down, but at least ``least``.

    >>> chosen_participation(None, 0.39, least=2, clients=10)
    0.3
    """
    if participation is not None:
        if fraction_train is not None or least is not None:
            raise ValueError(
                "participation excludes fraction_train and min_train_nodes, which also determine "
                "how many clients train: pass one or the other"
            )
        return participation
    fraction = 1.0 if fraction_train is None else fraction_train
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction_train must be greater than 0 and at most 1, got {fraction}")
    if least is not None and not 1 <= least <= clients:
        raise ValueError(f"min_train_nodes must be from 1 to {clients}, got {least}")
    least = min(MIN_TRAIN_NODES, clients) if least is None else least
    return max(int(clients * fraction), least) / clients


def nodes_to_wait_for(available: int | None, train: int | None, clients: int) -> int | None:
    """Return for how many SuperNodes each round waits, if the user chose that; as in FedAvg.

    >>> nodes_to_wait_for(3, 5, clients=9), nodes_to_wait_for(None, None, clients=9)
    (5, None)
    """
    if available is not None and not 1 <= available <= clients:
        raise ValueError(
            f"min_available_nodes must be from 1 to {clients}, or None, got {available}"
        )
    return max((n for n in (available, train) if n is not None), default=None)


def chosen_weights(weights: Weights | None, key: str | None) -> Weights | None:
    """Return the clients' weights: their numbers of samples if the metric of these is named.

    >>> chosen_weights(None, None), chosen_weights(None, "num-examples")
    (None, 'examples')
    """
    check_weights(weights)
    if key is None:
        return weights
    if weights not in (None, "examples"):
        raise ValueError(f"weighted_by_key contradicts weights={weights!r}: pass one of them")
    return "examples"


def check_sizes(clients: int, batch_size: int | None) -> None:
    """Refuse numbers of clients or of samples per batch below one."""
    if clients < 1:
        raise ValueError(f"clients must be at least 1, got {clients}")
    if batch_size is not None and batch_size < 1:
        raise ValueError(
            f"batch_size must be at least 1, or None for the whole local set, got {batch_size}"
        )


def check_enough(enough: int | None, min_clients: int, clients: int) -> None:
    """Refuse a number of replies with which a round cannot end."""
    least = max(1, min_clients)
    if enough is not None and not least <= enough <= clients:
        raise ValueError(f"enough must be from {least} to {clients}, or None, got {enough}")


def check_evaluation(fraction: float, least: int) -> None:
    """Refuse an invalid fraction or number of nodes that evaluate."""
    if not 0 <= fraction <= 1:
        raise ValueError(f"fraction_evaluate must be from 0 to 1, got {fraction}")
    if least < 0:
        raise ValueError(f"min_evaluate_nodes must be at least 0, got {least}")
