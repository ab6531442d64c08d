import math

import pytest
import torch
from torch import nn

import fedsift
from fedsift.algorithms import fedadam, fedadam_ssm
from fedsift.selection.masks import num_kept, top_k
from fedsift.task import Task
from fedsift.theory.deviation import deviation_recurrence
from fedsift.theory.objective import Objective
from fedsift.theory.reality import updates, visited_noise, watch
from fedsift.theory.sharper import sharper_coefficients
from fedsift.theory.trials import run_trial, sampling_ratios
from fedsift.vector import Layout, Moments
from problems import ridge


def task_of(problem, batch_size=None, loss=nn.functional.mse_loss):
    model = problem.model
    return Task(model, loss, problem.clients, None, batch_size, 0, Layout.of(model))


@pytest.mark.parametrize("batch_size", [None, 2])
@pytest.mark.parametrize("kind", ["logistic", "quadratic"])
def test_the_inequality_holds_in_every_step_of_every_trial(kind, batch_size):
    for seed in range(1000, 1025):
        trial = run_trial(kind, seed, batch_size)
        assert trial.steps > 0
        assert trial.theorem <= 1 + 1e-9, trial
        assert trial.sharper <= 1 + 1e-9, trial


def test_the_trials_come_close_to_the_bound():
    """Else they would show nothing."""
    assert max(run_trial("logistic", seed).theorem for seed in range(15)) > 0.4


def test_with_a_standard_deviation_it_holds_only_in_expectation():
    ratios = [r for seed in range(4) for r in sampling_ratios(seed)]
    assert sum(ratios) / len(ratios) < 1
    assert sum(r > 1 for r in ratios) > len(ratios) / 10


def test_the_printed_theta_breaks_the_inequality():
    """A linear loss, two states that differ in V alone: the printed bound is negative."""
    lr, beta1, beta2, eps, g = 0.1, 0.9, 0.999, 1.0, 1.0
    here = Moments(torch.zeros(1), torch.ones(1), torch.zeros(1))
    there = Moments(torch.zeros(1), torch.ones(1), torch.ones(1))
    step = fedadam_ssm(lr=lr, beta1=beta1, beta2=beta2, eps=eps, density=1.0).phase(1).step
    real = float((step(here, torch.ones(1)).w - step(there, torch.ones(1)).w).abs())
    walk = deviation_recurrence(
        d=1, beta1=beta1, beta2=beta2, eps=eps, lr=lr, rho=0.0, grad_bound=g, sigma_l=0.0,
        sigma_g=0.0, batch=1,
    )  # fmt: skip
    phi, psi = math.exp(walk.log_phi), math.exp(walk.log_psi)
    printed = math.exp(walk.log_start_v) * -phi / math.sqrt(psi**2 + 4 * phi)
    assert printed < 0 < real
    corrected = walk.after(1).log_bound(w_error=0, m_error=0, v_error=1)
    assert real <= math.exp(corrected)


@pytest.mark.parametrize("batch_size", [None, 3])
def test_what_is_watched_is_the_real_federation(batch_size):
    problem = ridge(3)
    algorithm = fedadam_ssm(density=0.3, local_steps=4)
    seen = list(watch(task_of(problem, batch_size), algorithm, 3))
    result = fedsift.simulate(
        problem.model, problem.clients, algorithm=algorithm, rounds=2, batch_size=batch_size,
        loss=nn.functional.mse_loss,
    )  # fmt: skip
    for mine, theirs in zip(seen[2].start, result.state, strict=True):
        assert torch.equal(mine, theirs)


def test_without_a_mask_nothing_is_lost():
    for seen in watch(task_of(ridge(1)), fedadam(local_steps=3), 3):
        assert max(seen.errors) < 1e-12
        assert seen.deviation[:, 0].max() < 1e-12


def test_one_client_with_all_its_data_is_centralized_adam():
    seen = list(watch(task_of(ridge(1, clients=1)), fedadam(local_steps=5), 3))
    assert max(float(s.deviation.max()) for s in seen) < 1e-12


def test_the_deviation_starts_from_the_error_of_the_weights():
    for seen in watch(task_of(ridge(2)), fedadam_ssm(density=0.1, local_steps=2), 4):
        assert torch.allclose(seen.deviation[:, 0], torch.tensor(seen.errors[0]).double())


def test_the_second_form_is_no_smaller_than_the_first():
    *_, before, after = watch(task_of(ridge(2)), fedadam_ssm(density=0.3, local_steps=2), 3)
    share = before.weights / before.weights.sum()
    mask = top_k(before.delta.w, num_kept(0.3, before.delta.w.shape[1]))
    for x, error in zip(before.delta, after.errors, strict=True):
        assert float(share @ (x * ~mask).norm(dim=-1)) >= error - 1e-12


def test_noise_is_measured_where_the_proof_needs_it():
    task = task_of(ridge(5), batch_size=2)
    (seen,) = watch(task, fedadam(local_steps=3), 1)
    noise = visited_noise(seen, Objective(task))
    assert noise.sampling > 0
    assert noise.between > 0


def test_the_sharper_bound_is_zero_where_nothing_is_lost_and_the_theorem_is_not():
    values = {
        "beta1": 0.9, "beta2": 0.999, "eps": 1e-3, "lr": 1e-3, "rho": 1.0, "grad_bound": 1.0,
        "sigma_l": 0.0, "sigma_g": 0.0, "batch": 1,
    }  # fmt: skip
    assert sharper_coefficients(l=30, **values).log_phi == -math.inf
    assert deviation_recurrence(d=100, **values).after(30).log_phi > 0


def test_updates_are_the_watched_ones_client_by_client():
    """Also where the clients' batches differ, so that they do not train in one stack."""
    draw = torch.Generator().manual_seed(0)
    sizes = (3, 9, 3, 9, 2)
    data = [torch.randn(n, 6, generator=draw, dtype=torch.float64).split((5, 1), 1) for n in sizes]
    model = nn.Linear(5, 1, dtype=torch.float64)
    task = Task(model, nn.functional.mse_loss, data, None, 4, 0, Layout.of(model))
    method = fedadam_ssm(local_steps=3, density=0.5)
    for found, seen in zip(updates(task, method, 2), watch(task, method, 2), strict=True):
        for mine, theirs in zip(found, seen.delta, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)
