import numpy as np
import pytest
import torch
from torch import nn

from fedsift.task import Task
from fedsift.theory.constants import Estimate, estimate_constants, top_curvature
from fedsift.theory.objective import Objective
from fedsift.vector import Layout
from problems import ridge


def task_of(problem):
    model = problem.model
    return Task(model, nn.functional.mse_loss, problem.clients, None, None, 0, Layout.of(model))


@pytest.fixture(scope="module")
def problem():
    return ridge(7, clients=3, d=6)


@pytest.fixture(scope="module")
def found(problem):
    return estimate_constants(task_of(problem), [problem.w0, 0 * problem.w0], iterations=500)


def test_rho_is_the_largest_eigenvalue(problem, found):
    exact = max(
        np.linalg.eigvalsh(2 * x.T.numpy() @ x.numpy() / len(x))[-1] for x, _ in problem.clients
    )
    assert found.rho.value == pytest.approx(exact, rel=1e-5)
    assert found.rho.low <= exact * (1 + 1e-12)
    assert found.rho.high >= exact


def test_the_gradient_bound_is_over_samples_and_coordinates(problem, found):
    exact = max(
        float((2 * x * (x @ w - y[:, 0])[:, None]).abs().max())
        for x, y in problem.clients
        for w in (problem.w0, 0 * problem.w0)
    )
    assert found.grad_bound.value == pytest.approx(exact)


def test_the_variances_are_those_of_the_definition(problem, found):
    total = sum(problem.sizes)
    local, between = [], []
    for w in (problem.w0.numpy(), 0 * problem.w0.numpy()):
        gradients = [g(w) for g in problem.gradients]
        whole = sum(n * g for n, g in zip(problem.sizes, gradients, strict=True)) / total
        between += [np.linalg.norm(g - whole) for g in gradients]
        for (x, y), g in zip(problem.clients, gradients, strict=True):
            each = 2 * x.numpy() * (x.numpy() @ w - y.numpy()[:, 0])[:, None]
            local.append(np.sqrt(np.square(each - g).sum(1).mean()))
    assert found.sigma_g.value == pytest.approx(max(between))
    assert found.sigma_l.value == pytest.approx(max(local))
    assert found.sigma_l.low < found.sigma_l.value < found.sigma_l.high


def test_mu_of_a_parabola_is_exact():
    """f = w² has μ = 2 and F* = 0."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    data = [(torch.ones(3, 1).double(), torch.zeros(3, 1).double())]
    task = Task(model, nn.functional.mse_loss, data, None, None, 0, Layout.of(model))
    points = [torch.tensor([x]).double() for x in (1.0, 2.0, -3.0)]
    assert estimate_constants(task, points).mu.value == pytest.approx(2.0)
    with pytest.raises(ValueError, match="minimum"):
        estimate_constants(task, points, minimum=5.0)


def test_curvature_is_symmetric_and_finds_negative_eigenvalues():
    value, error = top_curvature(lambda v: torch.tensor([-7.0, 1.0, 2.0]) * v, torch.zeros(3))
    assert value == pytest.approx(7, abs=1e-2)
    assert error < 0.1
    assert top_curvature(torch.zeros_like, torch.zeros(3)) == (0.0, 0.0)


def test_products_with_the_hessian_are_those_of_finite_differences():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    data = [(torch.randn(5, 3).double(), torch.randint(0, 2, (5,)))]
    task = Task(model, nn.functional.cross_entropy, data, None, None, 0, Layout.of(model))
    objective = Objective(task)
    w, v = task.layout.read(model), torch.randn(task.layout.d).double()
    slope = (objective.gradient(w + 1e-5 * v) - objective.gradient(w - 1e-5 * v)) / 2e-5
    assert torch.allclose(objective.curvature(w, data[0])(v), slope, atol=1e-7)
    assert torch.allclose(objective.sample_gradients(w, data[0]).mean(0), objective.gradient(w, 0))


def test_the_limit_of_a_maximum_covers_the_truth_in_95_percent():
    draw = np.random.default_rng(0)
    inside = [Estimate.supremum(draw.random(50).tolist()).high >= 1 for _ in range(2000)]
    assert np.mean(inside) == pytest.approx(0.95, abs=0.02)


def test_the_number_of_samples_is_limited(problem):
    few = estimate_constants(task_of(problem), [problem.w0], samples=2)
    assert few.grad_bound.n == 2 * len(problem.clients)


def test_no_points_are_refused(problem):
    with pytest.raises(ValueError, match="point"):
        estimate_constants(task_of(problem), [])
