from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsift.theory.deviation import DeviationCoefficients
from fedsift.theory.masks import MASKS, Sparsification, best_mask, mask_costs
from fedsift.vector import MOMENTS, State


def problem(seed, d, spread=2.0):
    draw = np.random.default_rng(seed)
    delta = (draw.normal(size=d) * 10 ** draw.uniform(-1, 1, size=d) for _ in range(3))
    weights = DeviationCoefficients(*(spread * draw.normal(size=3)).tolist(), 0.0)
    return Sparsification(State.of(MOMENTS, map(torch.tensor, delta)), weights)


def every_mask(d, k):
    for chosen in combinations(range(d), k):
        mask = torch.zeros(d, dtype=torch.bool)
        mask[list(chosen)] = True
        yield mask


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 9), st.data())
def test_the_solver_finds_the_minimum_over_every_mask(seed, d, data):
    k = data.draw(st.integers(1, d))
    mine = problem(seed, d)
    found = best_mask(mine, k, tolerance=1e-9)
    exact = min(mine.cost(mask) for mask in every_mask(d, k))
    assert int(found.mask.sum()) == k
    assert found.cost == pytest.approx(exact, rel=1e-9, abs=1e-12)
    assert found.lower <= exact * (1 + 1e-9) + 1e-12
    assert mine.cost(found.mask) == pytest.approx(found.cost, abs=1e-12)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.01, 0.9))
def test_the_gap_closes_on_large_problems_and_the_lower_bound_holds(seed, density):
    mine = problem(seed, 3000)
    k = int(3000 * density)
    found = best_mask(mine, k)
    assert found.gap <= 1e-3
    draw = torch.Generator().manual_seed(seed)
    for weights in torch.rand(20, 3, generator=draw, dtype=torch.float64) ** 4:
        score = sum(w * x.square() for w, x in zip(weights, mine.delta, strict=True))
        mask = torch.zeros(3000, dtype=torch.bool)
        mask[score.topk(k).indices] = True
        assert mine.cost(mask) >= found.lower * (1 - 1e-9)


def test_the_best_mask_is_the_top_k_of_a_weighted_sum_of_squares():
    mine = problem(3, 500)
    found = best_mask(mine, 50)
    squares, _ = mine.scaled
    score = torch.tensor(found.weights, dtype=torch.float64) @ squares
    assert score[found.mask].min() >= score[~found.mask].max()


def test_the_best_mask_of_one_tensor_is_its_top_k():
    x = torch.tensor([1.0, -4.0, 3.0, 0.5])
    alone = Sparsification(
        State(w=x, m=torch.zeros(4), v=torch.zeros(4)), DeviationCoefficients(0.0, 0.0, 0.0, 0.0)
    )
    assert best_mask(alone, 2).mask.tolist() == [False, True, True, False]
    assert mask_costs(alone, 2)["W"] == pytest.approx(1)


def test_very_different_weights_do_not_overflow():
    mine = problem(1, 50)
    heavy = Sparsification(mine.delta, DeviationCoefficients(2000.0, 0.0, -2000.0, 0.0))
    costs = mask_costs(heavy, 5)
    assert costs["W"] == pytest.approx(1)
    assert set(costs) == {*MASKS, "best"}


@pytest.mark.parametrize("seed", range(5))
def test_the_gap_closes_with_a_very_small_weight(seed):
    """Without the box, the number of corners doubled with every cut."""
    delta = problem(seed, 2000).delta
    light = Sparsification(delta, DeviationCoefficients(0.0, -18.0, -5.0, 0.0))
    for k in (20, 100, 400):
        assert best_mask(light, k, cuts=60).gap <= 1e-4


def test_the_full_mask_costs_nothing():
    mine = problem(0, 6)
    assert best_mask(mine, 6).cost == 0
    assert best_mask(mine, 6).gap == 0
    with pytest.raises(ValueError, match="loses nothing"):
        mask_costs(mine, 6)


def test_zero_updates_and_a_bad_k_are_refused():
    empty = State.start(torch.zeros(4))
    with pytest.raises(ValueError, match="nothing to send"):
        best_mask(Sparsification(empty, DeviationCoefficients(0.0, 0.0, 0.0, 0.0)), 1)
    for k in (0, 7):
        with pytest.raises(ValueError, match="k must be"):
            best_mask(problem(0, 6), k)
