import math

import pytest

from fedsift.theory.sharper_bound import sharper_coefficients

SETTING = {"beta1": 0.9, "beta2": 0.99, "eps": 0.5, "lr": 0.1, "rho": 2.0, "grad_bound": 1.5}


def iterate(steps, w, m, v, s, *, beta1, beta2, eps, lr, rho, grad_bound):
    """The three lines of the module docstring, without logarithms."""
    for _ in range(steps):
        gradient = s + rho * w
        m = beta1 * m + (1 - beta1) * gradient
        v = beta2 * v + (1 - beta2) * 2 * grad_bound * gradient
        w += lr * (m / math.sqrt(eps) + grad_bound * v / (2 * eps * math.sqrt(eps)))
    return w


@pytest.mark.parametrize("steps", [0, 1, 2, 7, 30])
def test_the_coefficients_are_those_of_the_recurrence(steps):
    found = sharper_coefficients(l=steps, sigma_l=3.0, sigma_g=0.25, batch=16, **SETTING)
    noise = 3.0 / 4 + 0.25
    starts = ((1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, noise))
    wanted = [iterate(steps, *start, **SETTING) for start in starts]
    logs = (found.log_gamma, found.log_lambda, found.log_theta, found.log_phi)
    assert [math.exp(x) for x in logs] == pytest.approx(wanted, rel=1e-12)
