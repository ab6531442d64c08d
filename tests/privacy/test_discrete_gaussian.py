"""The sampler has the distribution of the discrete Gaussian, and sums of samples nearly have it."""

import numpy as np
import pytest

from fedsift.privacy.discrete_gaussian import (
    Bits,
    bernoulli_exp,
    discrete_gaussian,
    discrete_laplace,
)


def probabilities(variance, largest):
    """The discrete Gaussian on -largest..largest."""
    x = np.arange(-largest, largest + 1)
    weights = np.exp(-(x**2) / (2 * variance))
    return weights / weights.sum()


def chi_squared(samples, expected, largest):
    """Pearson's statistic and its degrees of freedom, with rare values put together."""
    counts = np.bincount(np.clip(samples, -largest, largest) + largest, minlength=2 * largest + 1)
    is_common = expected * len(samples) >= 5
    rest = [counts[~is_common].sum()], [expected[~is_common].sum()]
    counts = np.concatenate([counts[is_common], rest[0]])
    wanted = np.concatenate([expected[is_common], rest[1]]) * len(samples)
    used = wanted > 1
    return (((counts - wanted) ** 2 / wanted)[used]).sum(), used.sum() - 1


@pytest.mark.parametrize("variance", [1, 2, 9, 500])
def test_samples_have_the_distribution_of_the_discrete_gaussian(variance):
    samples = discrete_gaussian(100_000, variance, Bits(b"sixteen bytes !!"))
    largest = 12 * int(np.sqrt(variance)) + 12
    statistic, degrees = chi_squared(samples, probabilities(variance, largest), largest)
    assert statistic < degrees + 5 * np.sqrt(2 * degrees)  # a normal test at five deviations


def test_the_test_tells_a_rounded_gaussian_from_a_discrete_one():
    rounded = np.random.default_rng(0).normal(0, 1, 100_000).round().astype(int)
    statistic, degrees = chi_squared(rounded, probabilities(1, 24), 24)
    assert statistic > degrees + 5 * np.sqrt(2 * degrees)


def test_laplace_and_bernoulli_have_their_probabilities():
    samples = discrete_laplace(100_000, 3, Bits(bytes(16)))
    weights = np.exp(-np.abs(np.arange(-60, 61)) / 3)
    statistic, degrees = chi_squared(samples, weights / weights.sum(), 60)
    assert statistic < degrees + 5 * np.sqrt(2 * degrees)
    for numerator in (0, 1, 5, 12):
        share = bernoulli_exp(np.full(100_000, numerator), 5, Bits(bytes(16))).mean()
        assert abs(share - np.exp(-numerator / 5)) < 0.008


def test_equal_keys_give_equal_samples_and_others_do_not():
    first, again, other = (
        discrete_gaussian(50, 40, Bits(key)) for key in (bytes(16), bytes(16), b"1" * 16)
    )
    assert first.tolist() == again.tolist() != other.tolist()


def test_uniform_integers_are_uniform():
    bound = 3 * 2**61  # the words modulo this bound would not be uniform
    draws = Bits(bytes(16)).below(np.full(40_000, bound))
    assert draws.min() >= 0
    assert abs((draws < bound // 3).mean() - 1 / 3) < 0.015


@pytest.mark.parametrize("variance", [0, 2**20 + 1])
def test_impossible_variances_are_refused(variance):
    with pytest.raises(ValueError, match="the variance must be from 1 to 1048576"):
        discrete_gaussian(1, variance, Bits(bytes(16)))
