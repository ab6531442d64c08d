"""FedOpt: an adaptive optimizer on the server."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from oracle import Gradient, Vector, start
from oracles.common import Cohorts, local_sgd, mean_of


@dataclass(frozen=True)
class ServerState:
    """What the server of FedOpt keeps: the weights and both moments."""

    W: Vector
    m: Vector
    v: Vector


def first_state(w0: npt.ArrayLike, tau: float) -> ServerState:
    """m starts at 0 and v at tau^2."""
    W, m, _ = start(w0)
    return ServerState(W, m, np.full_like(W, tau**2))


def server_step(
    state: ServerState,
    delta: Vector,
    *,
    server: str,
    server_lr: float,
    beta1: float,
    beta2: float,
    tau: float,
) -> ServerState:
    """One step of FedOpt's server, Algorithm 2 of Reddi et al. (2021). No bias correction."""
    m = beta1 * state.m + (1 - beta1) * delta
    squared = delta**2
    if server == "adagrad":
        v = state.v + squared
    elif server == "yogi":
        v = state.v - (1 - beta2) * squared * np.sign(state.v - squared)
    elif server == "adam":
        v = beta2 * state.v + (1 - beta2) * squared
    else:
        raise ValueError(server)
    return ServerState(state.W + server_lr * m / (np.sqrt(v) + tau), m, v)


def fedopt(
    gradients: Sequence[Gradient],
    weights: Sequence[float],
    w0: npt.ArrayLike,
    cohorts: Cohorts,
    *,
    server: str,
    server_lr: float,
    beta1: float,
    beta2: float,
    tau: float,
    local_steps: Sequence[int],
    lr: float,
) -> ServerState:
    """FedOpt (Reddi et al., 2021): SGD on clients; `server` is adam, yogi or adagrad."""
    state = first_state(w0, tau)
    for cohort in cohorts:
        W = state.W
        dWs = [local_sgd(gradients[n], W, local_steps[n], lr) - W for n in cohort]
        state = server_step(
            state, mean_of(cohort, dWs, weights),
            server=server, server_lr=server_lr, beta1=beta1, beta2=beta2, tau=tau,
        )  # fmt: skip
    return state
