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

    >>> usual = dict(l=30, beta1=0.9, beta2=0.999, eps=1e-6, lr=1e-3, rho=10.0, grad_bound=1.0,
    ...              batch=64)
    >>> c = sharper_coefficients(sigma_l=1.0, sigma_g=1.0, **usual)
    >>> round(c.log_gamma), sharper_coefficients(sigma_l=0.0, sigma_g=0.0, **usual).log_phi
    (276, -inf)
    """
    check(
        l=l, beta1=beta1, beta2=beta2, eps=eps, lr=lr, rho=rho, grad_bound=grad_bound,
        sigma_l=sigma_l, sigma_g=sigma_g, batch=batch,
    )  # fmt: skip
    noise = log_sum(log(sigma_l) - math.log(batch) / 2, log(sigma_g))
    starts = (
        (0.0, NOTHING, NOTHING, NOTHING), (NOTHING, 0.0, NOTHING, NOTHING),
        (NOTHING, NOTHING, 0.0, NOTHING), (NOTHING, NOTHING, NOTHING, noise),
    )  # fmt: skip
    ends = [_walk(int(l), start, beta1, beta2, eps, lr, rho, grad_bound) for start in starts]
    return DeviationCoefficients(*ends)


def _walk(
    steps: int,
    start: tuple[float, float, float, float],
    beta1: float,
    beta2: float,
    eps: float,
    lr: float,
    rho: float,
    grad_bound: float,
) -> float:
    """Log δ after the steps, from the logarithms of X_W, X_M, X_V and s."""
    w, m, v, noise = start
    log_eps, log_g = math.log(eps), log(grad_bound)
    for _ in range(steps):
        gradient = log_sum(noise, log(rho) + w)
        m = log_sum(log(beta1) + m, math.log1p(-beta1) + gradient)
        v = log_sum(log(beta2) + v, math.log1p(-beta2) + math.log(2) + log_g + gradient)
        step = log_sum(m - log_eps / 2, log_g + v - math.log(2) - 1.5 * log_eps)
        w = log_sum(w, log(lr) + step)
    return w
