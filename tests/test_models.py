"""The networks, by name."""

import pytest
import torch
import torch.fx

from fedsift.models import MODELS, build, default_model
from fedsift.runs import RunConfig, federation_of
from fedsift.vector import Layout

PARAMETERS = {
    "cnn": 21_840,
    "small-cnn": (9 + 1) * 16 + (9 * 16 + 1) * 48 + (192 + 1) * 100 + (100 + 1) * 10,
    "vgg11": 9_750_922,
    "resnet18": 11_173_962,  # as with batch norm: a scale and a shift a channel
}


def weights(name, seed):
    model = build(name, MODELS[name].shape, seed)
    return Layout.of(model).read(model)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_the_parameters_that_its_layers_add_up_to(name):
    assert len(weights(name, seed=0)) == PARAMETERS[name]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_gives_ten_scores_for_each_sample_of_its_shape(name):
    model = build(name, MODELS[name].shape, seed=0)
    assert model(torch.zeros(3, *MODELS[name].shape)).shape == (3, 10)


@pytest.mark.parametrize("name", MODELS)
def test_the_same_seed_gives_the_same_weights_whatever_was_drawn_before(name):
    first = weights(name, seed=5)
    torch.randn(7)
    assert torch.equal(weights(name, seed=5), first)
    assert not torch.equal(weights(name, seed=6), first)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_can_be_traced_symbolically(name):
    model = build(name, MODELS[name].shape, seed=0)
    x = torch.randn(2, *MODELS[name].shape)
    torch.testing.assert_close(torch.fx.symbolic_trace(model)(x), model(x))


def test_building_a_model_leaves_torchs_global_random_state_untouched():
    before = torch.random.get_rng_state()
    build("cnn", (1, 28, 28), seed=0)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_model_for_samples_of_another_shape_is_refused_with_the_ones_that_fit():
    with pytest.raises(ValueError, match=r"1x28x28.*1x8x8.*choose one of: small-cnn"):
        build("cnn", (1, 8, 8), seed=0)


def test_an_unknown_model_is_refused_with_the_list_of_known_ones():
    with pytest.raises(ValueError, match=", ".join(MODELS)):
        build("resnet-1", (1, 8, 8), seed=0)


def test_no_model_for_a_shape_is_said_with_the_shape():
    with pytest.raises(ValueError, match="5x5"):
        default_model((5, 5))


def test_auto_picks_a_model_that_fits_the_data():
    config = RunConfig.from_values({"clients": 2})
    task = federation_of(config).task
    assert config.model == "small-cnn"
    assert task.layout.d == PARAMETERS["small-cnn"]
