import math

import oracle_deviation as oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsift.theory.order import GRID, beta2_limit, coefficient_order, survey


def powers(low, high):
    return st.floats(low, high).map(lambda x: 10.0**x)


settings = st.fixed_dictionaries(
    {
        "l": st.integers(1, 40),
        "d": st.integers(1, 10**8),
        "beta1": st.floats(0, 0.999),
        "beta2": st.floats(0.001, 0.99999),
        "eps": powers(-9, 3),
        "lr": powers(-5, 1),
        "rho": powers(-3, 4),
        "grad_bound": powers(-5, 2),
    }
)


@given(settings)
def test_the_order_matches_50_digit_arithmetic(values):
    found = coefficient_order(**values)
    rest = {k: v for k, v in values.items() if k != "l"}
    walk = oracle.recurrence(**rest, sigma_l=0, sigma_g=0, batch=1)
    gamma, lam, theta, _ = walk.coefficients(values["l"])
    if abs(gamma - theta) > gamma * 1e-9:
        assert found.gamma_over_theta == (gamma > theta)
    if abs(theta - lam) > theta * 1e-9:
        assert found.theta_over_lambda == (theta > lam)


@given(settings)
def test_the_printed_condition_implies_gamma_over_theta(values):
    found = coefficient_order(**values)
    assert found.gamma_over_theta or not found.condition


@given(settings)
def test_gamma_over_theta_after_one_step_implies_it_after_more(values):
    first = coefficient_order(**{**values, "l": 1})
    assert coefficient_order(**values).gamma_over_theta or not first.gamma_over_theta


def test_theta_is_below_lambda_for_large_eps():
    found = coefficient_order(
        l=30, d=21_840, beta1=0.9, beta2=0.999, eps=100.0, lr=1e-3, rho=10, grad_bound=1.0
    )
    assert found.condition
    assert found.gamma_over_theta
    assert not found.theta_over_lambda
    assert found.is_counter_example


def test_the_condition_is_not_necessary():
    found = coefficient_order(
        l=30, d=100, beta1=0.9, beta2=0.999, eps=1e-2, lr=1e-3, rho=0.1, grad_bound=0.1
    )
    assert found.holds
    assert not found.condition


def test_the_limit_matches_the_paper():
    assert beta2_limit(d=4, rho=3.0, grad_bound=0.5) == pytest.approx(1 - 1 / (1 + 6))


def test_zero_steps_are_refused():
    with pytest.raises(ValueError, match="l must be a whole number of at least 1, got 0"):
        coefficient_order(
            l=0, d=1, beta1=0.9, beta2=0.999, eps=1e-6, lr=1e-3, rho=1.0, grad_bound=1.0
        )


def test_all_counter_examples_in_a_part_of_the_grid_have_theta_below_lambda():
    part = {**GRID, "l": (1, 30), "lr": (1e-3,), "rho": (10.0, 100.0), "beta2": (0.9, 0.999)}
    found = [o for _, o in survey(part)]
    assert len(found) == math.prod(len(v) for v in part.values())
    bad = [o for o in found if o.is_counter_example]
    assert bad
    assert all(o.gamma_over_theta and not o.theta_over_lambda for o in bad)
