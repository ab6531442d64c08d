import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsift.theory.convergence import (
    Bound,
    ConvergenceSetting,
    local_steps_threshold,
    nonconvex_bound,
    nonconvex_rate,
    pl_bound,
    pl_rate,
)

PAPER = ConvergenceSetting(
    d=21_840, local_steps=30, lr=1e-3, density=0.05, rho=10.0, grad_bound=1.0, sigma_l=2.0,
    sigma_g=0.5, batches=(64, 64, 10),
)  # fmt: skip


def powers(low, high):
    return st.floats(low, high).map(lambda x: 10.0**x)


settings = st.builds(
    ConvergenceSetting,
    d=st.integers(1, 10**7),
    local_steps=st.integers(1, 100),
    lr=powers(-6, 0),
    density=st.floats(0.001, 1),
    rho=powers(-3, 3),
    grad_bound=powers(-4, 2),
    sigma_l=st.floats(0, 10),
    sigma_g=st.floats(0, 10),
    beta1=st.floats(0, 0.99),
    beta2=st.floats(0.1, 0.9999),
    eps=powers(-8, 1),
)


def printed_theorem_2(s, rounds, gap):
    """Equation (27) as printed."""
    g, d, L, eps, lr, rho, b1, b2 = (
        s.grad_bound, s.d, s.local_steps, s.eps, s.lr, s.rho, s.beta1, s.beta2
    )  # fmt: skip
    inner = (
        (L - b2 * (1 - b2**L) / (1 - b2)) * g**4 * d * L / (4 * eps**3) + L**2 / eps
        + 4 * b1 * (1 - b1**L) / (eps * (1 - b1) ** 2) + 1 + rho**2 * L**2 / (3 * eps)
    )  # fmt: skip
    weights = sum(s.batches)
    noise = sum(n * (s.sigma_l / math.sqrt(n) + s.sigma_g) ** 2 for n in s.batches) / weights
    coefficient = (lr * rho + 2) * (1 - s.density) + lr * rho - 1
    middle = 2 * coefficient * lr * g**2 * d * L**2 / eps
    return 2 / (lr * rounds) * gap + middle + 6 * g**2 * d * inner + 6 * noise


def printed_theorem_3(s, rounds, gap, mu):
    """Equation (31) as printed."""
    rest = printed_theorem_2(s, rounds, gap) - 2 / (s.lr * rounds) * gap
    return (1 - s.lr * mu) ** rounds * gap + rest / (2 * mu)


@given(settings, st.integers(1, 1000), powers(-3, 2))
def test_the_printed_theorem_2_matches_the_paper(s, rounds, gap):
    found = nonconvex_bound(s, rounds=rounds, gap=gap, printed=True)
    assert found.total == pytest.approx(printed_theorem_2(s, rounds, gap), rel=1e-9)


def test_the_printed_theorem_3_matches_the_paper():
    found = pl_bound(PAPER, rounds=50, gap=2.0, mu=0.3, printed=True)
    assert found.total == pytest.approx(printed_theorem_3(PAPER, 50, 2.0, 0.3), rel=1e-9)


@given(settings, st.integers(1, 10**6), powers(-3, 2), st.booleans())
def test_theorem_2_never_beats_assumption_2(s, rounds, gap, printed):
    """The printed one only below lr = 3; lr here is at most 1."""
    assert nonconvex_bound(s, rounds=rounds, gap=gap, printed=printed).vacuous


@given(settings, st.integers(1, 10**6), powers(-3, 2), st.floats(1e-3, 0.99))
def test_theorem_3_never_beats_assumption_2_and_pl(s, rounds, gap, mu):
    assert pl_bound(s, rounds=rounds, gap=gap, mu=mu).vacuous


def test_a_bound_below_the_trivial_one_is_not_vacuous():
    assert not Bound(1.0, 0.0, 0.0, 0.0, 0.0, trivial=2.0).vacuous
    assert Bound(-3.0, 0.0, 0.0, 0.0, 0.0, trivial=2.0).vacuous


@given(settings)
def test_the_floor_does_not_depend_on_the_learning_rate(s):
    small = nonconvex_bound(replace(s, lr=1e-12), rounds=10**6, gap=1.0)
    assert small.floor == nonconvex_bound(s, rounds=1, gap=1.0).floor
    assert small.total >= small.floor


@given(settings, st.integers(2, 50))
def test_the_corrected_bound_only_grows_with_the_local_steps(s, more):
    """At η = 1/(L²√T) with ηρ ≤ √3 at L = 1: there is no threshold on L."""
    rounds = max(100, math.ceil(s.rho**2 / 3))
    one = nonconvex_rate(replace(s, local_steps=1), rounds=rounds, gap=1.0)[1]
    many = nonconvex_rate(replace(s, local_steps=more), rounds=rounds, gap=1.0)[1]
    assert many.total > one.total


def test_the_rate_of_proposition_2_is_that_of_its_vanishing_part():
    s = replace(PAPER, density=1.0)
    first = nonconvex_rate(s, rounds=10**4, gap=1.0)[1]
    later = nonconvex_rate(s, rounds=4 * 10**4, gap=1.0)[1]
    assert first.initial / later.initial == pytest.approx(2)
    assert first.smoothness / later.smoothness == pytest.approx(2, rel=0.05)
    assert first.floor == later.floor


def test_the_rate_of_proposition_3_needs_its_constant():
    enough = [pl_rate(PAPER, rounds=t, gap=1.0, mu=0.5)[1].initial * t for t in (100, 10_000)]
    assert enough == pytest.approx([1, 1], rel=0.2)
    _, short = pl_rate(PAPER, rounds=10_000, gap=1.0, mu=0.5, scale=1.0)
    assert short.initial == pytest.approx(10_000 ** (-0.5 / 900), rel=1e-3)


def test_the_threshold_matches_the_paper():
    values = {"d": 100, "eps": 1e-2, "rho": 2.0, "grad_bound": 0.5, "gap": 1.5, "rounds": 25}
    found = local_steps_threshold(density=0.2, **values)
    assert found == pytest.approx((0.8 * 2 * 0.25 * 100 / (1e-2 * 1.5 * 5)) ** 0.25)
    assert local_steps_threshold(density=1.0, **values) == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("beta2", 1.0), ("eps", 0.0), ("eps", -1.0), ("local_steps", 0), ("lr", 0.0),
        ("density", 0.0), ("density", 1.1), ("rho", math.nan), ("batches", ()), ("batches", (0,)),
    ],
)  # fmt: skip
def test_bad_settings_are_refused(name, value):
    with pytest.raises(ValueError, match="batch" if name == "batches" else name):
        replace(PAPER, **{name: value})


@pytest.mark.parametrize("gap", [0.0, -1.0, math.inf])
def test_a_meaningless_gap_is_refused(gap):
    with pytest.raises(ValueError, match="gap"):
        nonconvex_bound(PAPER, rounds=10, gap=gap)


def test_overflows_raise_errors():
    with pytest.raises(ValueError, match="10\\^308"):
        nonconvex_bound(replace(PAPER, grad_bound=1e60, eps=1e-30), rounds=1, gap=1.0)
    with pytest.raises(ValueError, match="10\\^77"):
        local_steps_threshold(
            d=1, density=0.5, eps=1e-300, rho=1.0, grad_bound=1e10, gap=1.0, rounds=1
        )


def test_too_large_a_learning_rate_is_refused_under_pl():
    with pytest.raises(ValueError, match="below 1"):
        pl_bound(replace(PAPER, lr=0.5), rounds=10, gap=1.0, mu=2.0)


def test_proposition_3_needs_two_rounds():
    with pytest.raises(ValueError, match="rounds"):
        pl_rate(PAPER, rounds=1, gap=1.0, mu=0.5)
