"""Theorem 1 in 50 digits, by iterating the recurrence of the supplementary proof."""

from dataclasses import dataclass

from mpmath import log, mp, mpf, sqrt

mp.dps = 50


@dataclass(frozen=True)
class ExactRecurrence:
    phi: mpf
    psi: mpf
    chi: mpf
    w: mpf
    m: mpf
    v: mpf
    noise: mpf

    def coefficients(self, steps):
        """(Γ, Λ, Θ, Φ): the recurrence is linear, so each is iterated separately."""
        return (
            self.iterate(steps, mpf(1), self.w, mpf(0)),
            self.iterate(steps, mpf(0), self.m, mpf(0)),
            self.iterate(steps, mpf(0), self.v, mpf(0)),
            self.iterate(steps, mpf(0), self.noise, self.chi),
        )

    def iterate(self, steps, x0, x1, chi):
        for _ in range(steps):
            x0, x1 = x1, self.psi * x1 + self.phi * x0 + chi
        return x0


def recurrence(*, d, beta1, beta2, eps, lr, rho, grad_bound, sigma_l, sigma_g, batch):
    """φ, ψ, χ as printed in equations (19)-(21), and x_1 as printed in Lemma 5."""
    d, b1, b2, eps, lr, rho, g, sl, sg, n = map(
        mpf, (d, beta1, beta2, eps, lr, rho, grad_bound, sigma_l, sigma_g, batch)
    )
    s = sl / sqrt(n) + sg
    phi = b1 / sqrt(b2)
    gain = (1 - b1) / sqrt(eps) * (1 + (1 - b2) * d * g**2 / eps)
    psi = 1 + phi + lr * rho * gain
    chi = (
        d * g * lr * (
            2 * b1 * (1 - sqrt(b2)) / (eps * sqrt(eps * b2)) * (g**2 + eps)
            + (1 - b1) * b2 / (eps * sqrt(eps)) * g**2
        )
        + lr * s * gain
    )  # fmt: skip
    first = lr * (1 - b1) / sqrt(eps) + d * g**2 * lr * (1 - b2) / (eps * sqrt(eps))
    return ExactRecurrence(
        phi, psi, chi,
        w=1 + rho * first,
        m=lr * b1 / sqrt(eps),
        v=sqrt(d) * g * lr * b2 / (2 * eps * sqrt(eps)),
        noise=first * s,
    )  # fmt: skip


def printed(walk, steps):
    """Γ, Λ, Θ, Φ in the paper's own closed form, Θ with the missing minus sign added."""
    psi, phi = walk.psi, walk.phi
    width = sqrt(psi**2 + 4 * phi)
    plus, minus = (psi + width) / 2, (psi - width) / 2
    c = walk.w - (psi - phi)  # β₁(1 − β₂) d G² η ρ / (ε √ε)
    gamma = (minus**steps * (phi - minus - c) + (plus - phi + c) * plus**steps) / width
    s = (plus**steps - minus**steps) / width
    level = ((1 - plus) * minus**steps - (1 - minus) * plus**steps) / width + 1
    phi_coefficient = walk.noise * s + (walk.chi / (1 - psi - phi) * level if walk.chi else 0)
    return gamma, walk.m * s, walk.v * s, phi_coefficient


def logs(values):
    return [log(x) if x else mpf("-inf") for x in values]
