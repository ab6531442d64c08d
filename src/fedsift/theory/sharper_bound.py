"""A sharper form of Theorem 1 that bounds the two moments instead of their ratio.

The paper's proof bounds each step u = m/√(v + ε) by the previous one. This loses in three places:
a drift χ remains even without noise and errors; η‖u − ǔ‖ ≤ δ_{l+1} + δ_l more than doubles the
bound in every step; and Cauchy-Schwarz, applied to coordinatewise products, costs a factor d. The
bound here follows the moments separately. With s = σ_l/√|D̃ₙ| + σ_g and the deviation δ,

    ‖m − m̌‖ ← β₁ ‖m − m̌‖ + (1 − β₁)(s + ρδ)
    ‖v − v̌‖ ← β₂ ‖v − v̌‖ + (1 − β₂) 2G (s + ρδ)
    δ       ← δ + η (‖m − m̌‖/√ε + G ‖v − v̌‖/(2ε√ε))

starting from X_M, X_V and X_W. It needs only the paper's assumptions, and it is zero if
sparsification loses nothing and the gradients have no noise.
"""

from __future__ import annotations

import math

from fedsift.theory.deviation import DeviationCoefficients
from fedsift.theory.log_arithmetic import LOG_ZERO, log, log_sum
from fedsift.theory.validation import check_constants


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
    """Return the factors of X_W, X_M and X_V and the constant term after l local steps.

    A round starts at l = 0. The bound does not depend on d.

    >>> usual = dict(l=30, beta1=0.9, beta2=0.999, eps=1e-6, lr=1e-3, rho=10.0, grad_bound=1.0,
    ...              batch=64)
    >>> c = sharper_coefficients(sigma_l=1.0, sigma_g=1.0, **usual)
    >>> round(c.log_gamma), sharper_coefficients(sigma_l=0.0, sigma_g=0.0, **usual).log_phi
    (276, -inf)
    """
    check_constants(
        steps=l, beta1=beta1, beta2=beta2, eps=eps, lr=lr, rho=rho, grad_bound=grad_bound,
        sigma_l=sigma_l, sigma_g=sigma_g, batch=batch,
    )  # fmt: skip
    step = _step_matrix(beta1, beta2, eps, lr, rho, grad_bound)
    w, m, v, noise = _power(step, int(l))[0]
    s = log_sum(log(sigma_l) - math.log(batch) / 2, log(sigma_g))
    return DeviationCoefficients(w, m, v, noise + s)


Matrix = tuple[tuple[float, ...], ...]
"""The logarithms of a matrix without negative entries."""
IDENTITY: Matrix = tuple(tuple(0.0 if i == j else LOG_ZERO for j in range(4)) for i in range(4))


def _step_matrix(
    beta1: float, beta2: float, eps: float, lr: float, rho: float, grad_bound: float
) -> Matrix:
    """The linear map of (X_W, X_M, X_V, s) in one step."""
    log_eps, log_g, log_2 = math.log(eps), log(grad_bound), math.log(2)
    gradient = (log(rho), LOG_ZERO, LOG_ZERO, 0.0)
    m = _sum(_scaled(log(beta1), IDENTITY[1]), _scaled(math.log1p(-beta1), gradient))
    fresh = math.log1p(-beta2) + log_2 + log_g
    v = _sum(_scaled(log(beta2), IDENTITY[2]), _scaled(fresh, gradient))
    moved = _sum(_scaled(-log_eps / 2, m), _scaled(log_g - log_2 - 1.5 * log_eps, v))
    return _sum(IDENTITY[0], _scaled(log(lr), moved)), m, v, IDENTITY[3]


def _scaled(log_factor: float, row: tuple[float, ...]) -> tuple[float, ...]:
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
    """The n-th power by repeated squaring: a million steps take 20 squarings."""
    found = IDENTITY
    while n:
        if n % 2:
            found = _product(found, matrix)
        matrix, n = _product(matrix, matrix), n // 2
    return found
