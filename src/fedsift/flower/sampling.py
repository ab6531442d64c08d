"""The arguments that FedAvg also has: which clients take part, and with which weights."""

from __future__ import annotations

from fedsift.federation.cohort import cohort_size
from fedsift.task import Weights, check_weights


def chosen_participation(
    participation: float | None, fraction_train: float | None, least: int, clients: int
) -> float:
    """Return the fraction of clients that train, under either of its names.

    >>> chosen_participation(None, 0.1, least=3, clients=10)
    0.3
    """
    if participation is not None and fraction_train is not None:
        raise ValueError("participation and fraction_train are the same: pass one of them")
    if not 1 <= least <= clients:
        raise ValueError(f"min_train_nodes must be from 1 to {clients}, got {least}")
    given = 1.0 if participation is None else participation
    fraction = given if fraction_train is None else fraction_train
    return fraction if cohort_size(fraction, clients) >= least else least / clients


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


def check_evaluation(fraction: float, least: int) -> None:
    """Refuse an invalid fraction or number of nodes that evaluate."""
    if not 0 <= fraction <= 1:
        raise ValueError(f"fraction_evaluate must be from 0 to 1, got {fraction}")
    if least < 0:
        raise ValueError(f"min_evaluate_nodes must be at least 0, got {least}")


def check_min_available_nodes(number: int | None, clients: int) -> None:
    """Refuse to wait for more nodes than there are clients."""
    if number is not None and not 1 <= number <= clients:
        raise ValueError(f"min_available_nodes must be from 1 to {clients}, or None, got {number}")
