"""Theorems 2 and 3, Propositions 2 and 3: the convergence of FedAdam-SSM.

The proofs of the printed bounds have three errors (docs/explanation/theory-slips.md derives them):
the negative factor ηρ − 1 multiplies an upper bound; L²G²d/ε has one factor η too many; and the
client drift loses its η². ``printed=True`` evaluates the paper's formulas; the default evaluates
the corrected ones. Both have a part that neither a smaller learning rate nor more rounds reduce.
This part alone exceeds the trivial bound of Assumption 2, so a :class:`Bound` says whether it is
vacuous.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, replace

import numpy as np

from fedsift.theory.validation import check_constants


@dataclass(frozen=True)
class ConvergenceSetting:
    """The constants of the convergence bounds; ``batches`` has the mini-batch size |D̃ₙ| per client.

    >>> ConvergenceSetting(d=10, local_steps=0, lr=1e-3, density=0.05, rho=1.0, grad_bound=1.0)
    Traceback (most recent call last):
    ...
    ValueError: local_steps must be a whole number of at least 1, got 0
    """

    d: int
    local_steps: int
    lr: float
    density: float
    rho: float
    grad_bound: float
    sigma_l: float = 0.0
    sigma_g: float = 0.0
    batches: tuple[int, ...] = (64,)
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-6

    def __post_init__(self) -> None:
        check_constants(**{k: v for k, v in self.__dict__.items() if k != "batches"})
        if not self.lr > 0:
            raise ValueError(f"lr must be a positive number, got {self.lr!r}")
        if not self.batches:
            raise ValueError("batches must have the mini-batch size of at least one client")
        for size in self.batches:
            check_constants(batch=size)

    @property
    def squared_gradient(self) -> float:
        """G²d, the bound of Assumption 2 on ‖∇F‖²."""
        return self.grad_bound * self.grad_bound * self.d

    @property
    def squared_steps(self) -> float:
        """L² as a float: an overflow to infinity is rejected later."""
        return float(self.local_steps) * self.local_steps

    @property
    def noise(self) -> float:
        """Σ D̃ₙ (σ_l/√D̃ₙ + σ_g)² / Σ D̃ₙ, the mean squared error of a client's gradient."""
        errors = [self.sigma_l / math.sqrt(n) + self.sigma_g for n in self.batches]
        weighted = [n * error * error for n, error in zip(self.batches, errors, strict=True)]
        return sum(weighted) / sum(self.batches)

    @property
    def adam_gap(self) -> float:
        """The largest gap between the sum of L Adam steps and one gradient, in units of G²d."""
        L, eps, g2 = float(self.local_steps), self.eps, self.grad_bound * self.grad_bound
        fresh = sum_of_new_weights(self.beta2, self.local_steps)
        momentum = 4 * self.beta1 * (1 - math.pow(self.beta1, L)) / (1 - self.beta1) ** 2
        return g2 / eps * (g2 / eps) * self.d * L * fresh / (4 * eps) + (L * L + momentum) / eps + 1


MANY_STEPS = 1_000_000
"""The sum over more steps is computed in closed form."""


def sum_of_new_weights(beta: float, steps: int) -> float:
    """Return Σ (1 − βʲ) for j = 1 … L, accurate also for β near 1.

    1 − βʲ is the weight of the last j gradients in an average with decay β.

    >>> sum_of_new_weights(0.5, 2), round(sum_of_new_weights(1 - 1e-12, 30) / 1e-12)
    (1.25, 465)
    """
    if beta == 0:
        return float(steps)
    if steps <= MANY_STEPS:
        return float(-np.expm1(math.log(beta) * np.arange(1, steps + 1)).sum())
    return steps + beta * math.expm1(steps * math.log(beta)) / (1 - beta)


@dataclass(frozen=True)
class Bound:
    """The parts of a convergence bound.

    ``initial`` vanishes with more rounds and ``smoothness`` with a smaller learning rate. The other
    parts remain, except that ``sparsification`` vanishes in the paper's version (``printed``).
    ``trivial`` is the bound that follows from the assumptions alone.
    """

    initial: float
    smoothness: float
    sparsification: float
    adam: float
    noise: float
    trivial: float
    printed: bool = False

    def __post_init__(self) -> None:
        if not all(map(math.isfinite, astuple(self))):
            raise ValueError("these constants give a vacuous bound above 10^308")

    @property
    def total(self) -> float:
        """The bound, the sum of its parts."""
        return self.initial + self.smoothness + self.sparsification + self.adam + self.noise

    @property
    def floor(self) -> float:
        """The part that neither more rounds nor a smaller learning rate reduces."""
        return self.adam + self.noise + (0.0 if self.printed else self.sparsification)

    @property
    def vacuous(self) -> bool:
        """Whether the bound is no better than the trivial one, or negative."""
        return self.total >= self.trivial or self.total < 0


def nonconvex_bound(
    setting: ConvergenceSetting, *, rounds: int, gap: float, printed: bool = False
) -> Bound:
    """Return Theorem 2's bound on (1/T) Σ E‖∇F(W^t)‖², with gap = F(W⁰) − F(W^T).

    It is 2 gap/(ηT) + (ηρ + 6(1 − α)) G²dL²/ε + 6G²d (A + η²ρ²L²/(3ε)) + 6 noise, where A is
    :attr:`ConvergenceSetting.adam_gap`.

    >>> s = ConvergenceSetting(d=21_840, local_steps=30, lr=1e-3, density=0.05,
    ...                        rho=10.0, grad_bound=1.0)
    >>> bound = nonconvex_bound(s, rounds=100, gap=2.3)
    >>> bound.vacuous, bound.floor > bound.trivial
    (True, True)
    """
    check_constants(rounds=rounds, gap=gap)
    g2d, L2 = setting.squared_gradient, setting.squared_steps
    unit, drift = g2d * L2 / setting.eps, setting.rho * setting.rho * L2 / (3 * setting.eps)
    lr, rho, alpha = setting.lr, setting.rho, setting.density
    initial, adam = 2 * gap / (lr * rounds), 6 * g2d * setting.adam_gap
    noise = 6 * setting.noise
    if printed:
        smoothness, sparsification = 2 * (2 - alpha) * lr * lr * rho, 2 * (1 - 2 * alpha) * lr
        adam += 6 * g2d * drift
        return Bound(initial, smoothness * unit, sparsification * unit, adam, noise, g2d, True)
    smoothness = lr * rho * unit + 6 * g2d * lr * lr * drift
    return Bound(initial, smoothness, 6 * (1 - alpha) * unit, adam, noise, g2d)


def pl_bound(
    setting: ConvergenceSetting, *, rounds: int, gap: float, mu: float, printed: bool = False
) -> Bound:
    """Return Theorem 3's bound on E F(W^T) − F(w*) under the PŁ condition, gap = F(W⁰) − F(w*).

    It is (1 − ημ)^T gap plus 1/(2μ) times all parts of Theorem 2 except the first.

    >>> s = ConvergenceSetting(d=10, local_steps=5, lr=1e-3, density=0.5, rho=1.0,
    ...                        grad_bound=1.0, eps=1.0)
    >>> round(pl_bound(s, rounds=5000, gap=1.0, mu=1.0).initial, 4)
    0.0067
    """
    check_constants(rounds=rounds, gap=gap, mu=mu)
    if setting.lr * mu >= 1:
        raise ValueError(f"lr · mu must be below 1, or (1 − ημ)^T diverges; got {setting.lr * mu}")
    rest = nonconvex_bound(setting, rounds=rounds, gap=gap, printed=printed)
    initial = gap * math.exp(rounds * math.log1p(-setting.lr * mu))
    smoothness, sparsification, adam, noise, trivial = (
        part / (2 * mu) for part in astuple(rest)[1:-1]
    )
    return Bound(initial, smoothness, sparsification, adam, noise, trivial, printed)


def nonconvex_rate(
    setting: ConvergenceSetting,
    *,
    rounds: int,
    gap: float,
    scale: float = 1.0,
    printed: bool = False,
) -> tuple[float, Bound]:
    """Return Proposition 2's η = scale/(L²√T), and Theorem 2's bound at this η.

    Only ``initial`` and ``smoothness`` decrease as 1/√T; the printed proposition omits the floor.

    >>> s = ConvergenceSetting(d=10, local_steps=5, lr=1.0, density=1.0, rho=1.0, grad_bound=1.0)
    >>> lr, bound = nonconvex_rate(s, rounds=10_000, gap=1.0)
    >>> lr, round(bound.initial, 9)  # 2 gap L²/√T
    (0.0004, 0.5)
    """
    check_constants(rounds=rounds)
    lr = scale / (setting.squared_steps * math.sqrt(rounds))
    return lr, nonconvex_bound(replace(setting, lr=lr), rounds=rounds, gap=gap, printed=printed)


def pl_rate(
    setting: ConvergenceSetting,
    *,
    rounds: int,
    gap: float,
    mu: float,
    scale: float | None = None,
    printed: bool = False,
) -> tuple[float, Bound]:
    """Return Proposition 3's η = scale · ln T/(L²T), and Theorem 3's bound at this η.

    (1 − ημ)^T is then about T^(−μ·scale/L²): at most 1/T only if scale ≥ L²/μ, the default.

    >>> s = ConvergenceSetting(d=10, local_steps=5, lr=1.0, density=1.0, rho=1.0, grad_bound=1.0)
    >>> round(10_000 * pl_rate(s, rounds=10_000, gap=1.0, mu=0.5)[1].initial, 1)
    1.0
    """
    check_constants(rounds=rounds, mu=mu)
    if rounds < 2:
        raise ValueError(f"rounds must be at least 2, as ln 1 = 0, got {rounds}")
    L2 = setting.squared_steps
    lr = (L2 / mu if scale is None else scale) * math.log(rounds) / (L2 * rounds)
    at_lr = replace(setting, lr=lr)
    return lr, pl_bound(at_lr, rounds=rounds, gap=gap, mu=mu, printed=printed)


def local_steps_threshold(
    *, d: int, density: float, eps: float, rho: float, grad_bound: float, gap: float, rounds: int
) -> float:
    """Return the printed L up to which more local steps help, ((1 − α)ρG²d/(ε gap √T))^¼.

    It compares two terms of the printed Proposition 2. Its (1 − α)ρ should read (2 − α)ρ. The
    corrected bound has no such threshold, as the term does not depend on L there.

    >>> round(local_steps_threshold(d=21_840, density=0.05, eps=1e-6, rho=10.0, grad_bound=1.0,
    ...                             gap=2.3, rounds=100), 1)
    308.2
    """
    check_constants(
        d=d, density=density, eps=eps, rho=rho, grad_bound=grad_bound, gap=gap, rounds=rounds
    )
    fourth_power = (1 - density) * rho * grad_bound * grad_bound * d / eps / gap / math.sqrt(rounds)
    if not math.isfinite(fourth_power):
        raise ValueError("these constants give a meaningless threshold above 10^77")
    return float(fourth_power**0.25)
