"""Proposition 1: the conditions for Γ > Θ > Λ, under which the error of ΔW has the largest weight.

The paper's condition β₂ < 1 − 1/(1 + 2Gρ√d) is sufficient for Γ > Θ after any l ≥ 1 steps. It does
not imply Θ > Λ, which holds if and only if β₂ G √d > 2 ε β₁. The proof assumes this without stating
it ("ε is a small number") and prints the difference with the wrong sign.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from fedsift.theory.deviation import deviation_coefficients
from fedsift.theory.validation import check_constants


@dataclass(frozen=True)
class Order:
    """The condition of Proposition 1 and the actual order of Γ, Θ and Λ.

    ``condition`` is the printed condition. ``gamma_over_theta`` and ``theta_over_lambda`` say
    whether Γ > Θ and Θ > Λ hold.
    """

    condition: bool
    gamma_over_theta: bool
    theta_over_lambda: bool

    @property
    def holds(self) -> bool:
        """Whether Γ > Θ > Λ."""
        return self.gamma_over_theta and self.theta_over_lambda

    @property
    def is_counter_example(self) -> bool:
        """Whether the paper's condition holds but the order does not."""
        return self.condition and not self.holds


def coefficient_order(
    *,
    l: int,  # noqa: E741
    d: int,
    beta1: float,
    beta2: float,
    eps: float,
    lr: float,
    rho: float,
    grad_bound: float,
) -> Order:
    """Return whether Γ > Θ > Λ after l ≥ 1 local steps.

    >>> usual = dict(l=30, d=21_840, beta1=0.9, beta2=0.999, lr=1e-3, rho=10.0, grad_bound=1.0)
    >>> coefficient_order(eps=1e-6, **usual)
    Order(condition=True, gamma_over_theta=True, theta_over_lambda=True)
    >>> coefficient_order(eps=100.0, **usual).is_counter_example
    True
    """
    c = deviation_coefficients(
        l=l, d=d, beta1=beta1, beta2=beta2, eps=eps, lr=lr, rho=rho, grad_bound=grad_bound,
        sigma_l=0.0, sigma_g=0.0, batch=1,
    )  # fmt: skip
    return Order(
        condition=beta2_limit(d=d, rho=rho, grad_bound=grad_bound) > beta2,
        gamma_over_theta=c.log_gamma > c.log_theta,
        theta_over_lambda=lr > 0 and beta2 * grad_bound * math.sqrt(d) > 2 * eps * beta1,
    )


def beta2_limit(*, d: int, rho: float, grad_bound: float) -> float:
    """Return the printed condition's limit on β₂, 1 − 1/(1 + 2Gρ√d).

    >>> beta2_limit(d=100, rho=1.0, grad_bound=0.05)
    0.5
    """
    check_constants(d=d, rho=rho, grad_bound=grad_bound)
    x = 2 * grad_bound * rho * math.sqrt(d)
    return x / (1 + x)


GRID: Mapping[str, tuple[float, ...]] = {
    "l": (1, 2, 30),
    "d": (1, 10, 100, 1_000, 21_840, 1_000_000, 9_750_922),
    "beta1": (0.0, 0.5, 0.9, 0.99),
    "beta2": (0.5, 0.9, 0.99, 0.999, 0.9999),
    "eps": (1e-8, 1e-6, 1e-3, 1e-1, 1.0, 10.0),
    "lr": (1e-4, 1e-3, 1e-2),
    "rho": (0.01, 0.1, 1.0, 10.0, 100.0),
    "grad_bound": (1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0),
}
"""The 226,800 settings on which Proposition 1 is checked."""


def survey(
    grid: Mapping[str, tuple[float, ...]] = GRID,
) -> Iterator[tuple[dict[str, float], Order]]:
    """Yield every setting of a grid with its order.

    >>> small = {name: values[:1] for name, values in GRID.items()}
    >>> [(x["d"], found.holds) for x, found in survey(small)]  # Θ > Γ here
    [(1, False)]
    """
    for values in product(*grid.values()):
        setting = dict(zip(grid, values, strict=True))
        yield setting, coefficient_order(**setting)  # type: ignore[arg-type]
