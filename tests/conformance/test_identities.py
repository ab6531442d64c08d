"""Identities that follow from the paper, over random small problems."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import mse_loss

import fedsift
from fedsift import algorithms
from fedsift.adam import centralized_adam
from problems import ridge

MASKED = ["fedadam_ssm", "fedadam_ssm_m", "fedadam_ssm_v", "fairness_top", "fedadam_top"]
EVERY = [name.replace("-", "_") for name in algorithms.METHODS]
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}
seeds = st.integers(0, 2**32 - 1)
steps = st.integers(1, 6)
few_examples = settings(max_examples=15)  # each is two or three trainings


def train(problem, algorithm, rounds=3, **options):
    options = {"batch_size": None, "loss": mse_loss, **options}
    return fedsift.simulate(
        problem.model, problem.clients, algorithm=algorithm, rounds=rounds, **options
    )


def make(name, **settings):
    """A method with those of the given settings that it has."""
    known = algorithms.settings_of(name.replace("_", "-"))
    return getattr(algorithms, name)(**{k: v for k, v in settings.items() if k in known})


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", MASKED)
@few_examples
@given(seed=seeds, local_steps=steps)
def test_density_one_is_fedadam_bit_for_bit(name, dtype, seed, local_steps):
    problem = ridge(seed, dtype=dtype)
    masked = train(problem, make(name, density=1.0, local_steps=local_steps, lr=0.01))
    dense = train(problem, algorithms.fedadam(local_steps=local_steps, lr=0.01))
    for ours, theirs in zip(masked.state, dense.state, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("clients", [1, 3])
@few_examples
@given(seed=seeds, local_steps=steps)
def test_fedadam_on_identical_clients_is_centralized_adam(clients, dtype, seed, local_steps):
    problem = ridge(seed, clients=clients, alike=True, dtype=dtype)
    federated = train(problem, algorithms.fedadam(local_steps=local_steps, lr=0.01))
    x, y = problem.clients[0]

    def gradient(w):
        return 2 * x.T @ (x @ w - y[:, 0]) / len(x)

    central = centralized_adam(problem.w0, gradient, steps=3 * local_steps, lr=0.01)
    for ours, theirs in zip(federated.state, central, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=TOLERANCE[dtype] * 10, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("name", [n for n in EVERY if n != "e3sfc"])  # searches start at random
@few_examples
@given(seed=seeds, order=st.permutations(range(4)))
def test_the_order_of_the_clients_does_not_matter(name, seed, order):
    problem = ridge(seed)
    shuffled = type(problem)([problem.clients[n] for n in order], problem.w0)
    first = train(problem, make(name, density=0.3, local_steps=3, lr=0.01), rounds=2)
    second = train(shuffled, make(name, density=0.3, local_steps=3, lr=0.01), rounds=2)
    for one, other in zip(first.state, second.state, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", EVERY)
@few_examples
@given(seed=seeds)
def test_no_method_makes_the_second_moment_negative(name, seed):
    settings = {"density": 0.2, "local_steps": 2, "lr": 0.1, "beta2": 0.1, "sample_steps": 1}
    result = train(ridge(seed), make(name, **settings))
    assert [record["clamped"] for record in result.history] == [0, 0, 0, 0]


@few_examples
@given(seed=seeds, local_steps=steps)
def test_sgd_of_density_one_is_fedsgd(seed, local_steps):
    problem = ridge(seed)
    masked = train(problem, algorithms.sparse_fedsgd(1.0, local_steps, lr=0.01))
    dense = train(problem, algorithms.fedsgd(local_steps, lr=0.01))
    assert torch.equal(masked.state.w, dense.state.w)


@few_examples
@given(seed=seeds)
def test_one_bit_adam_is_fedadam_of_one_step_while_it_warms_up(seed):
    problem = ridge(seed)
    warming = train(problem, algorithms.onebit_adam(warmup_rounds=3, lr=0.01))
    dense = train(problem, algorithms.fedadam(local_steps=1, lr=0.01))
    for ours, theirs in zip(warming.state, dense.state, strict=True):
        assert torch.equal(ours, theirs)


@few_examples
@given(seed=seeds)
def test_one_bit_adam_freezes_the_second_moment(seed):
    problem = ridge(seed)
    method = algorithms.onebit_adam(warmup_rounds=2, lr=0.01)
    frozen = train(problem, method, rounds=2).state.v
    assert torch.equal(train(problem, method, rounds=5).state.v, frozen)


@pytest.mark.parametrize("name", MASKED)
@few_examples
@given(seed=seeds, density=st.floats(0.01, 1.0))
def test_a_round_moves_no_more_than_the_masks_allow(name, seed, density):
    problem = ridge(seed, clients=2)
    after = train(problem, make(name, density=density, local_steps=2), rounds=1)
    k = max(1, round(density * len(problem.w0)))
    assert int((after.state.w != problem.w0).sum()) <= 2 * k
