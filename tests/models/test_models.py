"""All models by name."""

import json
import sys

import pytest
import torch
import torch.fx

from fedsift.cli import main
from fedsift.models import MODELS, build, default_model
from fedsift.runs import RunConfig, federation_of
from fedsift.vector import Layout

PARAMETERS = {
    "cnn": 21_840,
    "small-cnn": (9 + 1) * 16 + (9 * 16 + 1) * 48 + (192 + 1) * 100 + (100 + 1) * 10,
    "vgg11": 9_750_922,
    "resnet18": 11_173_962,  # as with batch norm: a scale and a shift per channel
    "resnet18-bn": 11_173_962,
    "vit-tiny": 5_362_378,
    "char-transformer": (96 + 128) * 128 + 3 * (12 * 128**2 + 13 * 128) + 2 * 128 + 129 * 96,
}


def samples(name, number):
    shape = MODELS[name].shape
    if name == "char-transformer":
        return torch.randint(0, 96, (number, *shape))
    return torch.randn(number, *shape)


def weights(name, seed):
    model = build(name, MODELS[name].shape, seed)
    return Layout.of(model).read(model)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_the_expected_number_of_parameters(name):
    assert len(weights(name, seed=0)) == PARAMETERS[name]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_gives_ten_scores_for_each_sample_or_one_for_each_character(name):
    model = build(name, MODELS[name].shape, seed=0)
    scores = (128, 96) if name == "char-transformer" else (10,)
    assert model(samples(name, 3)).shape == (3, *scores)


@pytest.mark.parametrize("name", MODELS)
def test_the_same_seed_gives_the_same_weights_regardless_of_earlier_draws(name):
    first = weights(name, seed=5)
    torch.randn(7)
    assert torch.equal(weights(name, seed=5), first)
    assert not torch.equal(weights(name, seed=6), first)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_can_be_traced_symbolically(name):
    model = build(name, MODELS[name].shape, seed=0)
    x = samples(name, 2)
    torch.testing.assert_close(torch.fx.symbolic_trace(model.eval())(x), model(x))


def test_building_a_model_leaves_torchs_global_random_state_untouched():
    before = torch.random.get_rng_state()
    build("cnn", (1, 28, 28), seed=0)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_model_for_another_shape_is_refused_and_fitting_ones_are_listed():
    with pytest.raises(ValueError, match=r"1x28x28.*1x8x8.*choose one of: small-cnn"):
        build("cnn", (1, 8, 8), seed=0)


def test_the_error_says_how_to_give_your_own_model_if_none_fits():
    with pytest.raises(ValueError, match=r"3x5x5; no other model fits; give your own as"):
        build("cnn", (3, 5, 5), seed=0)


def test_an_unknown_model_is_refused_with_the_list_of_known_ones():
    with pytest.raises(ValueError, match=", ".join(MODELS)):
        build("resnet-1", (1, 8, 8), seed=0)


def test_the_error_names_the_shape_if_no_model_fits():
    with pytest.raises(ValueError, match="5x5"):
        default_model((5, 5))


def test_auto_picks_a_model_that_fits_the_data():
    config = RunConfig.from_values({"clients": 2})
    task = federation_of(config).task
    assert config.model == "small-cnn"
    assert task.layout.d == PARAMETERS["small-cnn"]


USER_MODELS = """
from torch import nn

def small():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

def for_other_data():
    return nn.Linear(7, 2)

def number():
    return 5
"""


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    (tmp_path / "my_models.py").write_text(USER_MODELS)
    (tmp_path / "my_broken.py").write_text("import no_such_library")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    yield
    sys.modules.pop("my_models", None)


@pytest.mark.usefixtures("user_module")
def test_a_user_model_is_imported_from_the_current_directory_and_seeded():
    first, again, other = (build("my_models:small", (1, 8, 8), seed) for seed in (3, 3, 4))
    read = Layout.of(first).read
    assert len(read(first)) == 650
    assert torch.equal(read(first), read(again))
    assert not torch.equal(read(first), read(other))
    assert first.training


BAD_FACTORIES = {
    "no_such_module:small": "No module named 'no_such_module'; give package.module:function",
    "my_models:absent": "no attribute 'absent'",
    "my_models:": "no attribute ''",
    ":small": "package.module:function",
    "my_broken:small": "No module named 'no_such_library'",
    "my_models:number": "got int, not torch.nn.Module",
    "my_models:for_other_data": "fails on samples of shape 1x8x8",
}


@pytest.mark.usefixtures("user_module")
@pytest.mark.parametrize("name", BAD_FACTORIES)
def test_an_unusable_factory_is_refused_with_the_reason(name):
    with pytest.raises(ValueError, match=BAD_FACTORIES[name]) as problem:
        build(name, (1, 8, 8), seed=0)
    assert repr(name) in str(problem.value)


@pytest.mark.usefixtures("user_module")
def test_a_run_with_a_user_model_is_resumed_with_it(tmp_path):
    words = ["--model", "my_models:small", "--rounds", "1", "--clients", "3", "--local-steps", "1"]
    assert main(["run", *words, "--out", "mine"]) == 0
    config = tmp_path / "mine" / "config.toml"
    config.write_text(config.read_text().replace("rounds = 1", "rounds = 2"))
    assert main(["resume", "mine"]) == 0
    summary = json.loads((tmp_path / "mine" / "summary.json").read_text())
    assert (summary["model"], summary["parameters"], summary["rounds"]) == (
        "my_models:small",
        650,
        2,
    )


@pytest.mark.usefixtures("user_module")
def test_resuming_without_the_user_model_gives_a_one_line_error(tmp_path, capsys):
    words = ["--model", "my_models:small", "--rounds", "1", "--clients", "3", "--local-steps", "1"]
    assert main(["run", *words, "--out", "mine"]) == 0
    sys.modules.pop("my_models")
    (tmp_path / "my_models.py").unlink()
    capsys.readouterr()
    assert main(["resume", "mine"]) == 2
    said = capsys.readouterr().err
    assert "my_models" in said
    assert said.count("\n") == 1
