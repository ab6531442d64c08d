"""Every method against the NumPy transcription of the paper, in float64."""

import importlib

import numpy as np
import pytest
from torch.nn.functional import mse_loss

import fedsift
import oracle
from fedsift import algorithms
from problems import ridge

ADAM = {"lr": 0.02, "beta1": 0.9, "beta2": 0.99, "eps": 1e-6}
SPARSE = {"density": 0.3, "local_steps": 5}
CASES = {
    "fedadam_ssm": {**ADAM, **SPARSE},
    "fedadam_ssm_m": {**ADAM, **SPARSE},
    "fedadam_ssm_v": {**ADAM, **SPARSE},
    "fairness_top": {**ADAM, **SPARSE},
    "fedadam_top": {**ADAM, **SPARSE},
    "fedadam": {**ADAM, "local_steps": 5},
    "fedsgd": {"lr": 0.01, "local_steps": 5},
    "sparse_fedsgd": {"lr": 0.01, **SPARSE},
    "onebit_adam": {**ADAM, "warmup_rounds": 3},
    "efficient_adam": {**ADAM, "bits": 4},
    "sparseloco": {**ADAM, **SPARSE, "decay": 0.95, "outer_lr": 0.8},
    "fedadamw": {**ADAM, "local_steps": 5, "correction": 0.5, "weight_decay": 0.1},
    "sift": {
        **ADAM,
        **SPARSE,
        "down_density": 0.5,
        "decay": 0.9,
        "bits": 4,
        "momentum": 0.5,
        "clip": 1.0,
        "warmup_rounds": 8,
        "average": 0.3,
    },
}
TESTED_ELSEWHERE = {"decomfl", "e3sfc", "fedavg", "fedopt", "fedprox", "scaffold"}
"""Methods without gradients or with their own random numbers: see tests/algorithms. Those of
test_field_methods.py are tested there with partial participation."""


def test_every_method_has_a_transcription():
    known = {name.replace("_", "-") for name in CASES} | TESTED_ELSEWHERE
    assert known == set(algorithms.METHODS)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", CASES)
def test_ten_rounds_agree_to_ten_digits(name, seed):
    problem = ridge(seed)
    settings = CASES[name]
    result = fedsift.simulate(
        problem.model,
        problem.clients,
        algorithm=getattr(algorithms, name)(**settings),
        rounds=10,
        batch_size=None,
        loss=mse_loss,
    )
    W, M, V, *model = getattr(oracle, name)(
        problem.gradients, problem.sizes, problem.w0.numpy(), 10, **settings
    )
    known = {"w": W, "m": M, "v": V}
    expected = [*(known[name] for name in result.state.names), *(model or [W])]
    for ours, theirs in zip((*result.state, result.weights), expected, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("name", "sizes"), [("sparseloco", (8, 4)), ("fedadamw", (4,))])
def test_chunks_and_blocks_agree_when_there_are_several(name, sizes, monkeypatch):
    """Twelve coordinates are less than a chunk: here chunks and blocks are shorter than that."""
    module = importlib.import_module(f"fedsift.algorithms.{name}")
    names = ("chunk", "block")[-len(sizes) :]
    for constant, size in zip(names, sizes, strict=True):
        monkeypatch.setattr(module, constant.upper(), size)
    problem, settings = ridge(0), CASES[name]
    algorithm = getattr(algorithms, name)(**settings)
    result = fedsift.simulate(
        problem.model, problem.clients, algorithm=algorithm, rounds=5, batch_size=None,
        loss=mse_loss, wire="real",
    )  # fmt: skip
    expected = getattr(oracle, name)(
        problem.gradients, problem.sizes, problem.w0.numpy(), 5, **settings,
        **dict(zip(names, sizes, strict=True)),
    )  # fmt: skip
    for ours, theirs in zip(result.state, expected, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-10, atol=1e-10)
