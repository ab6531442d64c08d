from itertools import pairwise

import pytest
import torch
from torch import nn

from fedsift.vector import Layout, State, all_finite


def network():
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Linear(5, 4))


def test_a_model_is_restored_from_its_vector():
    model, other = network(), network()
    layout = Layout.of(model)
    layout.write(layout.read(model), other)
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_the_vector_has_the_order_of_the_model():
    model = network()
    expected = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert torch.equal(Layout.of(model).read(model), expected)


def test_unflatten_keeps_a_client_axis():
    layout = Layout.of(network())
    stack = torch.arange(3.0 * layout.d).view(3, -1)
    named = layout.unflatten(stack)
    assert named["2.weight"].shape == (3, 4, 5)
    assert torch.equal(layout.flatten(named), stack)


def test_layers_cover_the_whole_vector():
    layout = Layout.of(network())
    spans = list(layout.layers.values())
    assert spans[0].start == 0
    assert spans[-1].stop == layout.d
    assert all(a.stop == b.start for a, b in pairwise(spans))


def test_frozen_parameters_are_left_out():
    model = network()
    model[0].requires_grad_(False)
    assert Layout.of(model).names == ("2.weight", "2.bias")


def test_different_layouts_have_different_fingerprints():
    assert Layout.of(nn.Linear(2, 3)).fingerprint() != Layout.of(nn.Linear(3, 2)).fingerprint()
    assert Layout.of(network()).fingerprint() == Layout.of(network()).fingerprint()


def test_a_model_of_two_dtypes_is_refused():
    model = network()
    model[2].double()
    with pytest.raises(ValueError, match="parameters of several dtypes"):
        Layout.of(model)


def test_a_model_without_parameters_is_refused():
    with pytest.raises(ValueError, match="no trainable parameters"):
        Layout.of(nn.ReLU())


def test_states_add_and_subtract_by_vector():
    x = State(w=torch.ones(2), m=torch.full((2,), 2.0), v=torch.full((2,), 3.0))
    assert [float(t[0]) for t in x.plus(x)] == [2.0, 4.0, 6.0]
    assert [float(t[0]) for t in x - x] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_finite_means_that_each_element_is_finite(dtype):
    largest = torch.full((1, 1000), torch.finfo(dtype).max, dtype=dtype)  # their sum is infinite
    assert all_finite(largest, torch.zeros(0, dtype=dtype))
    for bad in (float("nan"), float("inf"), -float("inf")):
        x = torch.cat([largest, -largest], -1)
        x[0, 777] = bad
        assert not all_finite(largest, x)
    opposite = torch.tensor([float("inf"), -float("inf")], dtype=dtype)
    assert not all_finite(opposite)
