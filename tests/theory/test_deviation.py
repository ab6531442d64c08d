import math

import oracle_deviation as oracle
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedsift.theory.deviation import deviation_coefficients, deviation_recurrence

NAMES = ("log_gamma", "log_lambda", "log_theta", "log_phi")
BASE = {
    "d": 21_840, "beta1": 0.9, "beta2": 0.999, "eps": 1e-6, "lr": 1e-3, "rho": 10.0,
    "grad_bound": 1.0, "sigma_l": 1.0, "sigma_g": 1.0, "batch": 64,
}  # fmt: skip


def powers(low, high):
    return st.floats(low, high).map(lambda x: 10.0**x)


def constants():
    return st.fixed_dictionaries(
        {
            "d": st.integers(1, 10**9),
            "beta1": st.one_of(st.just(0.0), powers(-30, -3), st.floats(0.001, 0.9999)),
            "beta2": st.one_of(powers(-20, -3), st.floats(0.001, 1 - 1e-12)),
            "eps": powers(-30, 5),
            "lr": st.one_of(st.just(0.0), powers(-300, 2)),
            "rho": st.one_of(st.just(0.0), powers(-30, 30)),
            "grad_bound": st.one_of(st.just(0.0), powers(-30, 30)),
            "sigma_l": st.one_of(st.just(0.0), powers(-30, 30)),
            "sigma_g": st.one_of(st.just(0.0), powers(-30, 30)),
            "batch": st.integers(1, 10**6),
        }
    )


def assert_same(found, wanted, tolerance=1e-12):
    for name, exact in zip(NAMES, wanted, strict=True):
        value, exact = getattr(found, name), float(exact)
        if math.isinf(exact):
            assert value == exact, name
        else:
            assert abs(value - exact) <= tolerance * max(1.0, abs(exact)), (name, value, exact)


@settings(max_examples=400, deadline=None)
@given(constants(), st.integers(1, 60))
@example(BASE, 1)
@example(BASE, 30)
@example(BASE | {"d": 10**9, "eps": 1e-30, "grad_bound": 1e30, "rho": 1e30}, 60)
@example(BASE | {"lr": 5e-324}, 7)
@example(BASE | {"lr": 0.0}, 30)
@example(BASE | {"beta1": 0.0}, 30)
@example(BASE | {"beta1": 0.0, "lr": 1e-200}, 30)
@example(BASE | {"beta1": 0.0, "rho": 0.0}, 30)
@example(BASE | {"grad_bound": 0.0}, 30)
@example(BASE | {"grad_bound": 0.0, "sigma_l": 0.0, "sigma_g": 0.0, "beta1": 0.0}, 30)
@example(BASE | {"beta1": 0.9, "beta2": 0.81, "lr": 0.0}, 30)  # φ = 1: the roots are closest
def test_the_closed_forms_solve_the_recurrence(values, steps):
    found = deviation_coefficients(l=steps, **values)
    wanted = oracle.logs(oracle.recurrence(**values).coefficients(steps))
    assert_same(found, wanted)


@settings(max_examples=20, deadline=None)
@given(constants(), st.integers(500, 5000))
def test_many_steps_are_exact(values, steps):
    found = deviation_coefficients(l=steps, **values)
    assert_same(found, oracle.logs(oracle.recurrence(**values).coefficients(steps)))


@settings(max_examples=100, deadline=None)
@given(constants(), st.integers(0, 40))
def test_the_printed_forms_solve_it_with_the_missing_minus_sign(values, steps):
    walk = oracle.recurrence(**values)
    if walk.chi and walk.psi + walk.phi - 1 < oracle.mpf(10) ** -8:
        return  # the printed Φ divides by 1 − ψ − φ, and 50 digits are not enough
    for mine, theirs in zip(walk.coefficients(steps), oracle.printed(walk, steps), strict=True):
        assert abs(mine - theirs) <= oracle.mpf(10) ** -20 * max(abs(mine), 1)


@settings(max_examples=100, deadline=None)
@given(constants())
def test_the_recurrence_matches_the_paper(values):
    mine, theirs = deviation_recurrence(**values), oracle.recurrence(**values)
    found = (mine.log_psi, mine.log_phi, mine.log_chi, mine.log_start_w, mine.log_start_m)
    wanted = oracle.logs((theirs.psi, theirs.phi, theirs.chi, theirs.w, theirs.m))
    for value, exact in zip(found, wanted, strict=True):
        assert value == pytest.approx(float(exact), rel=1e-12, abs=1e-12)


@settings(max_examples=200, deadline=None)
@given(constants())
def test_the_roots_are_well_separated(values):
    walk = oracle.recurrence(**values)
    width = oracle.sqrt(walk.psi**2 + 4 * walk.phi)
    assert width >= 1
    assert abs((walk.psi - width) / (walk.psi + width)) < 0.1716


def test_the_printed_product_for_theta_is_not_a_solution():
    walk = oracle.recurrence(**BASE)
    width = oracle.sqrt(walk.psi**2 + 4 * walk.phi)
    for steps in range(1, 6):
        wrong = walk.v * ((walk.psi + width) / 2 * (walk.psi - width) / 2) ** steps / width
        assert abs(wrong - walk.v / width * (-walk.phi) ** steps) < 1e-30 * abs(walk.v)
        assert wrong < 0 or wrong < walk.coefficients(steps)[2]


def test_the_bound_is_the_weighted_sum_of_the_errors():
    c = deviation_coefficients(l=2, **BASE | {"lr": 1e-9})
    wanted = (
        math.exp(c.log_gamma) * 0.5 + math.exp(c.log_lambda) * 2 + math.exp(c.log_theta) * 0.1
        + math.exp(c.log_phi)
    )  # fmt: skip
    assert math.exp(c.log_bound(w_error=0.5, m_error=2, v_error=0.1)) == pytest.approx(wanted)


def test_a_round_starts_from_the_error_of_w():
    start = deviation_recurrence(**BASE).after(0)
    assert_same(start, oracle.logs(oracle.recurrence(**BASE).coefficients(0)))
    with pytest.raises(ValueError, match="steps must be a whole number of at least 0, got -1"):
        deviation_recurrence(**BASE).after(-1)


def test_without_errors_the_bound_is_phi():
    c = deviation_coefficients(l=5, **BASE)
    assert c.log_bound(w_error=0, m_error=0, v_error=0) == c.log_phi


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("beta2", 1.0), ("beta2", 1.5), ("beta2", 0.0), ("beta1", 1.0), ("beta1", -0.1),
        ("eps", 0.0), ("eps", -1e-6), ("l", 0), ("l", -1), ("l", 1.5), ("d", 0), ("lr", -1e-3),
        ("rho", -1.0), ("grad_bound", math.nan), ("sigma_l", math.inf), ("batch", 0),
        ("sigma_g", -1.0), ("d", True), ("eps", "1e-6"),
    ],
)  # fmt: skip
def test_bad_constants_are_refused_in_one_line(name, value):
    with pytest.raises(ValueError, match=name) as caught:
        deviation_coefficients(**{"l": 30, **BASE, name: value})
    assert "\n" not in str(caught.value)


def test_a_negative_error_is_refused():
    with pytest.raises(ValueError, match="m_error"):
        deviation_coefficients(l=1, **BASE).log_bound(w_error=0, m_error=-1, v_error=0)
