import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import nn

from fedsift.selection.masks import (
    num_kept,
    rand_k,
    threshold,
    top_k,
    top_k_per_layer,
    top_k_separate,
    top_k_union,
)
from fedsift.vector import Layout, State

values = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 1e-45, -1e-45, 1e-40, 3e38]),
    st.floats(width=32, allow_nan=False, allow_infinity=False),
)
matrices = st.tuples(st.integers(1, 4), st.integers(1, 40)).flatmap(
    lambda shape: arrays(np.float32, shape, elements=values)
)


def reference_top_k(row, k):
    order = sorted(range(len(row)), key=lambda j: (-abs(row[j]), j))
    return sorted(order[:k])


@given(matrices, st.data())
def test_top_k_equals_the_reference_for_any_input(x, data):
    k = data.draw(st.integers(1, x.shape[1]))
    mask = top_k(torch.from_numpy(x), k)
    for row, ones in zip(x, mask, strict=True):
        assert ones.nonzero()[:, 0].tolist() == reference_top_k(row.tolist(), k)


@given(matrices, st.floats(1e-6, 1.0))
def test_every_mask_has_exactly_k_ones(x, density):
    rows = torch.from_numpy(x)
    k = num_kept(density, x.shape[1])
    delta = State(w=rows, m=rows.flip(-1), v=rows.square().clamp(max=3e38))
    random = rand_k(rows, k, torch.Generator().manual_seed(0))
    for mask in (top_k(rows, k), top_k_union(delta, k), *top_k_separate(delta, k), random):
        assert mask.shape == rows.shape
        assert (mask.sum(-1) == k).all()


def test_a_large_tie_goes_to_the_lower_indices():
    x = torch.ones(2, 1000)
    assert top_k(x, 10).nonzero()[:, 1].tolist() == [*range(10), *range(10)]


def test_the_union_considers_all_three_tensors():
    w, m, v = torch.eye(3)[:, None, :] * torch.tensor([1.0, 3.0, 2.0])
    assert top_k_union(State(w=w, m=m, v=v), 2).tolist() == [[False, True, True]]


def test_every_layer_has_the_same_density():
    layout = Layout.of(nn.Linear(10, 10))
    mask = top_k_per_layer(torch.arange(110.0)[None], 0.1, layout)
    assert {name: int(mask[0, span].sum()) for name, span in layout.layers.items()} == {
        "weight": 10,
        "bias": 1,
    }


def test_threshold_keeps_magnitudes_above_it():
    assert threshold(torch.tensor([[1.0, -3.0, 2.0]]), 2.0).tolist() == [[False, True, False]]


def test_random_masks_differ_by_client_and_depend_on_the_seed():
    x = torch.zeros(2, 1000)
    first = rand_k(x, 100, torch.Generator().manual_seed(1))
    assert torch.equal(first, rand_k(x, 100, torch.Generator().manual_seed(1)))
    assert not torch.equal(first[0], first[1])


@pytest.mark.parametrize(
    "choose",
    [
        lambda x: top_k(x, 1),
        lambda x: threshold(x, 0.5),
        lambda x: rand_k(x, 1, torch.Generator()),
        lambda x: top_k_union(State(w=x, m=x, v=x), 1),
    ],
)
def test_nan_is_refused(choose):
    with pytest.raises(ValueError, match="NaN"):
        choose(torch.tensor([[1.0, float("nan")]]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_nan_is_refused_in_any_precision(dtype):
    with pytest.raises(ValueError, match="NaN"):
        top_k(torch.tensor([[1.0, float("nan")]], dtype=dtype), 1)


@pytest.mark.parametrize("k", [0, 4, -1])
def test_an_invalid_k_is_refused(k):
    with pytest.raises(ValueError, match="between 1 and d = 3"):
        top_k(torch.zeros(1, 3), k)


@pytest.mark.parametrize("density", [0.0, -0.1, 1.1, float("nan")])
def test_an_invalid_density_is_refused(density):
    with pytest.raises(ValueError, match=r"density must be in \(0, 1\]"):
        num_kept(density, 10)


@pytest.mark.parametrize("v", [-1.0, float("nan")])
def test_a_negative_threshold_is_refused(v):
    with pytest.raises(ValueError, match="threshold"):
        threshold(torch.zeros(1, 3), v)
