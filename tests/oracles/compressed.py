"""Compression of any method that sends differences: top-k, few bits, error feedback."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from oracle import Vector, count, log_quantize, quantize, top_k
from oracles.common import Cohorts, mean_of

Local: TypeAlias = Callable[[int, list[Vector]], list[Vector]]
"""Where a client's vectors end up, given its number and the global ones; W is the first."""
Server: TypeAlias = Callable[[list[Vector]], list[Vector]]
"""What the method's server makes of the mean differences."""


def compressed(
    local: Local,
    weights: Sequence[float],
    start: list[npt.NDArray[np.float64]],
    cohorts: Cohorts,
    *,
    density: float,
    down_density: float,
    bits: int,
    decay: float,
    server: Server = list,
) -> list[Vector]:
    """Each client's residual of dW decays; the server's residuals of all vectors do not."""
    state = [x.copy() for x in start]
    up, down = (count(share, state[0].size) for share in (density, down_density))
    errors = [np.zeros_like(state[0]) for _ in weights]
    residuals = [np.zeros_like(x) for x in state]

    def squeezed(vectors: list[Vector], k: int) -> list[Vector]:
        """The k largest of W; W and M in linear codes, V in four-bit logarithmic ones."""
        mask, sent = top_k(vectors[0], k), [np.zeros_like(x) for x in vectors]
        for place, x in enumerate(vectors):
            exact = x[mask]
            few = log_quantize(exact, 4) if place == 2 else quantize(exact, bits)
            sent[place][mask] = exact if bits == 32 else few
        return sent

    for cohort in cohorts:
        messages = []
        for n in cohort:
            ends = local(n, [x.copy() for x in state])
            differences = [end - x for end, x in zip(ends, state, strict=True)]
            differences[0] = differences[0] + decay * errors[n]
            messages.append(squeezed(differences, up))
            errors[n] = differences[0] - messages[-1][0]
        means = [mean_of(cohort, list(sent), weights) for sent in zip(*messages, strict=True)]
        steps = [x + kept for x, kept in zip(server(means), residuals, strict=True)]
        broadcast = squeezed(steps, down)
        residuals = [step - sent for step, sent in zip(steps, broadcast, strict=True)]
        state = [x + sent for x, sent in zip(state, broadcast, strict=True)]
        if len(state) == 3:
            state[2] = np.maximum(state[2], 0)
    return state
