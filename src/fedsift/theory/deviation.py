"""Theorem 1: a bound on the distance of a client from centralized Adam after l local steps.

With the sparsification errors of the last round, X_W = ‖W^t − W̆^t‖ and likewise X_M and X_V,

    E‖w_n^{l,t} − w̌^{l,t}‖ ≤ x_l = Γ X_W + Λ X_M + Θ X_V + Φ,

where x solves x_{l+2} = ψ x_{l+1} + φ x_l + χ with x_0 and x_1 from the supplementary proof. All
values are natural logarithms, as x_l exceeds 10^308 for L = 30 and millions of parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedsift.theory.log_arithmetic import LOG_ZERO, log, log1p_exp, log_geometric, log_sum
from fedsift.theory.validation import check_constants


@dataclass(frozen=True)
class Recurrence:
    """x_{l+2} = ψ x_{l+1} + φ x_l + χ, with x_0 = X_W and x_1 = a X_W + b X_M + c X_V + e.

    ``log_kappa`` is log κ with ψ = 1 + φ + κ. The four starts are the logarithms of a (the factor
    of X_W in Lemma 5), b, c and the noise e. Note that φ is not the coefficient Φ.
    """

    log_phi: float
    log_kappa: float
    log_chi: float
    log_start_w: float
    log_start_m: float
    log_start_v: float
    log_start_noise: float

    @property
    def log_psi(self) -> float:
        """Log ψ = log(1 + φ) + log(1 + κ/(1 + φ)), which avoids cancellation near ψ = 1."""
        base = log1p_exp(self.log_phi)
        return base + log1p_exp(self.log_kappa - base)

    def after(self, steps: int) -> DeviationCoefficients:
        """Return Γ, Λ, Θ and Φ after l = ``steps`` local steps, in closed form.

        With S_l = (r₊^l − r₋^l)/(r₊ − r₋), these are Γ = a S_l + φ S_{l−1}, Λ = b S_l, Θ = c S_l
        and Φ = e S_l + χ Σ_{j<l} S_j. Unlike in the printed form, all terms are positive. A round
        starts at l = 0.
        """
        check_constants(steps=steps)
        if steps == 0:
            return DeviationCoefficients(0.0, LOG_ZERO, LOG_ZERO, LOG_ZERO)
        s, before = self.log_s(steps), self.log_s(steps - 1)
        return DeviationCoefficients(
            log_gamma=log_sum(self.log_start_w + s, self.log_phi + before),
            log_lambda=self.log_start_m + s,
            log_theta=self.log_start_v + s,
            log_phi=log_sum(self.log_start_noise + s, self.log_chi + self.log_sum_of_s(steps)),
        )

    def log_s(self, steps: int) -> float:
        """Return log S_l, where S_0 = 0, S_1 = 1 and S_{l+2} = ψ S_{l+1} + φ S_l."""
        if steps < 2:
            return LOG_ZERO if steps == 0 else 0.0
        root, width = self._roots()
        ratio = -math.exp(self.log_phi - 2 * root)  # r₋/r₊, never below −0.172
        return steps * root + math.log1p(-(ratio**steps)) - width

    def log_sum_of_s(self, steps: int) -> float:
        """Return log Σ_{j<l} S_j, from two geometric sums of the same sign."""
        if steps < 2:
            return LOG_ZERO
        root, width = self._roots()
        minus = math.exp(self.log_phi - root)  # |r₋| < 1
        small = minus * (1 - (-minus) ** (steps - 1)) / (1 + minus)
        return log_sum(log_geometric(root, steps - 1), log(small)) - width

    def _roots(self) -> tuple[float, float]:
        """Log r₊ and log(r₊ − r₋). As ψ ≥ 1 + φ, ψ² + 4φ ≥ 1, so the roots are distinct."""
        psi = self.log_psi
        z = math.exp(math.log(4) + self.log_phi - 2 * psi)
        width = math.sqrt(1 + z)
        return psi + math.log1p(z / (2 * (1 + width))), psi + math.log(width)


@dataclass(frozen=True)
class DeviationCoefficients:
    """log Γ, log Λ, log Θ and log Φ: natural logarithms, -inf for a coefficient of 0."""

    log_gamma: float
    log_lambda: float
    log_theta: float
    log_phi: float

    def log_bound(self, *, w_error: float, m_error: float, v_error: float) -> float:
        """Return the bound on a client's deviation, log(Γ X_W + Λ X_M + Θ X_V + Φ).

        >>> DeviationCoefficients(0.0, LOG_ZERO, LOG_ZERO, LOG_ZERO).log_bound(
        ...     w_error=1.0, m_error=5.0, v_error=5.0)
        0.0
        """
        check_constants(w_error=w_error, m_error=m_error, v_error=v_error)
        return log_sum(
            self.log_gamma + log(w_error),
            self.log_lambda + log(m_error),
            self.log_theta + log(v_error),
            self.log_phi,
        )


def deviation_coefficients(
    *,
    l: int,  # noqa: E741
    d: int,
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
    """Return Γ, Λ, Θ and Φ of Theorem 1 after l ≥ 1 local steps, as natural logarithms.

    ``grad_bound`` is G of Assumption 2 and ``batch`` the client's mini-batch size |D̃ₙ|. Pass
    ``sigma_l=0`` for a client that uses its whole set in every step, as it has no sampling noise.

    >>> c = deviation_coefficients(l=30, d=9_750_922, beta1=0.9, beta2=0.999, eps=1e-6, lr=1e-3,
    ...                            rho=10.0, grad_bound=1.0, sigma_l=1.0, sigma_g=1.0, batch=64)
    >>> round(c.log_gamma, 3), round(c.log_theta, 3)  # Γ is about 10^300
    (692.321, 688.186)
    """
    check_constants(l=l)
    return deviation_recurrence(
        d=d, beta1=beta1, beta2=beta2, eps=eps, lr=lr, rho=rho, grad_bound=grad_bound,
        sigma_l=sigma_l, sigma_g=sigma_g, batch=batch,
    ).after(int(l))  # fmt: skip


def trivial_log_bound(
    *,
    l: int,  # noqa: E741
    d: int,
    eps: float,
    lr: float,
    grad_bound: float,
    w_error: float,
) -> float:
    """Return the trivial bound, log(X_W + 2 l η √d G/√ε).

    As |m| ≤ G and v ≥ 0, neither model moves by more than ηG/√ε per coordinate and step. Theorem 1
    is vacuous if its bound is larger than this one.

    >>> round(math.exp(trivial_log_bound(l=30, d=21_840, eps=1e-6, lr=1e-3, grad_bound=1.0,
    ...                                 w_error=0.0)))
    8867
    """
    check_constants(steps=l, d=d, eps=eps, lr=lr, grad_bound=grad_bound, w_error=w_error)
    distance = log(2 * l) + log(lr) + log(grad_bound) + math.log(d) / 2 - math.log(eps) / 2
    return log_sum(log(w_error), distance)


def deviation_recurrence(
    *,
    d: int,
    beta1: float,
    beta2: float,
    eps: float,
    lr: float,
    rho: float,
    grad_bound: float,
    sigma_l: float,
    sigma_g: float,
    batch: int,
) -> Recurrence:
    """Return the recurrence of Theorem 1, with φ, ψ and χ of Lemma 4 and the start of Lemma 5.

    >>> r = deviation_recurrence(d=1, beta1=0.5, beta2=0.25, eps=1.0, lr=0.0, rho=1.0,
    ...                          grad_bound=1.0, sigma_l=0.0, sigma_g=0.0, batch=1)
    >>> round(math.exp(r.log_psi), 12), math.exp(r.log_phi)  # ψ = 1 + φ, φ = 0.5/√0.25
    (2.0, 1.0)
    """
    check_constants(
        d=d, beta1=beta1, beta2=beta2, eps=eps, lr=lr, rho=rho, grad_bound=grad_bound,
        sigma_l=sigma_l, sigma_g=sigma_g, batch=batch,
    )  # fmt: skip
    log_lr, log_g, log_d = log(lr), log(grad_bound), math.log(d)
    log_eps, fresh1, fresh2 = math.log(eps), math.log1p(-beta1), math.log1p(-beta2)
    log_noise = log_sum(log(sigma_l) - math.log(batch) / 2, log(sigma_g))
    log_step = log_lr - log_eps / 2  # η/√ε
    squares = fresh2 + log_d + 2 * log_g - log_eps  # (1 − β₂) d G²/ε
    gradient = log_step + fresh1 + log1p_exp(squares)  # the effect of a gap of 1 in the gradients
    first_gradient = log_step + log_sum(fresh1, squares)
    return Recurrence(
        log_phi=log(beta1) - math.log(beta2) / 2,
        log_kappa=gradient + log(rho),
        log_chi=log_sum(
            gradient + log_noise,
            log_step + log_d + log_g + _log_drift(beta1, beta2, log_g, log_eps),
        ),
        log_start_w=log1p_exp(first_gradient + log(rho)),
        log_start_m=log_step + log(beta1),
        log_start_v=log_step + log_d / 2 + log_g + math.log(beta2) - math.log(2) - log_eps,
        log_start_noise=first_gradient + log_noise,
    )


def _log_drift(beta1: float, beta2: float, log_g: float, log_eps: float) -> float:
    """The noise-free part of Lemma 4: (2 β₁(1 − √β₂)(G² + ε)/√β₂ + (1 − β₁)β₂ G²)/ε."""
    root = math.sqrt(beta2)
    shrink = math.log1p(-beta2) - math.log1p(root)  # log(1 − √β₂), accurate near β₂ = 1
    memory = math.log(2) + log(beta1) + shrink - math.log(root) + log_sum(2 * log_g, log_eps)
    return log_sum(memory, math.log1p(-beta1) + math.log(beta2) + 2 * log_g) - log_eps
