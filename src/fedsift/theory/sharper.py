"""A sharper Theorem 1: follow the two moments instead of their ratio.

The paper's proof bounds the step u = m/√(v + ε) by the last one and pays for it three times: with a
drift χ that stays when there is no noise and no error at all, with η‖u − ǔ‖ ≤ δ_{l+1} + δ_l, which
more than doubles the bound every step, and with Cauchy-Schwarz on products that are coordinatewise,
which costs a factor d. Followed one by one, with s = σ_l/√|D̃ₙ| + σ_g and δ the deviation,

    ‖m − m̌‖ ← β₁ ‖m − m̌‖ + (1 − β₁)(s + ρδ)
    ‖v − v̌‖ ← β₂ ‖v − v̌‖ + (1 − β₂) 2G (s + ρδ)
    δ       ← δ + η (‖m − m̌‖/√ε + G ‖v − v̌‖/(2ε√ε))

from X_M, X_V and X_W: under the paper's own assumptions, and zero where nothing is lost.
"""

from __future__ import annotations

import math

from fedsift.theory.deviation import DeviationCoefficients
from fedsift.theory.logs import NOTHING, log, log_sum
from fedsift.theory.ranges import check


def sharper_coefficients(
    *,
    l: int,  # noqa: E741
    beta1: float,
    beta2: float,
    eps: float,
    lr: float,
    rho: float,
    grad_bound: float,
    sigma_l: float,
    sigma_g: float,
    batch: int,
) -> DeviationCoefficients:
    """The factors of X_W, X_M, X_V and the rest, after l local steps; d plays no part.

    A round starts at l = 0.

    >>> usual = dict(l=30, beta1=0.9, beta2=0.999, eps=1e-6, lr=1e-3, rho=10.0, grad_bound=1.0,
    ...              batch=64)
    >>> c = sharper_coefficients(sigma_l=1.0, sigma_g=1.0, **usual)
    >>> round(c.log_gamma), sharper_coefficients(sigma_l=0.0, sigma_g=0.0, **usual).log_phi
    (276, -inf)
    """
    check(
        steps=l, beta1=beta1, beta2=beta2, eps=eps, lr=lr, rho=rho, grad_bound=grad_bound,
        sigma_l=sigma_l, sigma_g=sigma_g, batch=batch,
    )  # fmt: skip
    step = _step(beta1, beta2, eps, lr, rho, grad_bound)
    w, m, v, noise = _power(step, int(l))[0]
    s = log_sum(log(sigma_l) - math.log(batch) / 2, log(sigma_g))
    return DeviationCoefficients(w, m, v, noise + s)


Matrix = tuple[tuple[float, ...], ...]
"""The logarithms of a matrix with no negative entry."""
UNIT: Matrix = tuple(tuple(0.0 if i == j else NOTHING for j in range(4)) for i in range(4))


def _step(
    beta1: float, beta2: float, eps: float, lr: float, rho: float, grad_bound: float
) -> Matrix:
    """One step of (X_W, X_M, X_V, s), from the old four to the new."""
    log_eps, log_g, log_2 = math.log(eps), log(grad_bound), math.log(2)
    gradient = (log(rho), NOTHING, NOTHING, 0.0)
    m = _sum(_times(log(beta1), UNIT[1]), _times(math.log1p(-beta1), gradient))
    fresh = math.log1p(-beta2) + log_2 + log_g
    v = _sum(_times(log(beta2), UNIT[2]), _times(fresh, gradient))
    moved = _sum(_times(-log_eps / 2, m), _times(log_g - log_2 - 1.5 * log_eps, v))
    return _sum(UNIT[0], _times(log(lr), moved)), m, v, UNIT[3]


def _times(log_factor: float, row: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(log_factor + x for x in row)


def _sum(one: tuple[float, ...], other: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(map(log_sum, one, other))


def _product(a: Matrix, b: Matrix) -> Matrix:
    columns = tuple(zip(*b, strict=True))
    return tuple(
        tuple(log_sum(*(x + y for x, y in zip(row, column, strict=True))) for column in columns)
        for row in a
    )


def _power(matrix: Matrix, n: int) -> Matrix:
    """By squaring, so that a million steps are twenty."""
    found = UNIT
    while n:
        if n % 2:
            found = _product(found, matrix)
        matrix, n = _product(matrix, matrix), n // 2
    return found
