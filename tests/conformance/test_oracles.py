"""The oracles of the field's methods, tested by identities that do not read their formulas."""

import numpy as np
import pytest

import oracle
from oracles import e3sfc as synthetic
from oracles.decomfl import decomfl
from oracles.e3sfc import Sample, cosine, e3sfc, synthesize
from oracles.fedavg import fedavg
from oracles.fedopt import ServerState, fedopt, first_state, server_step
from oracles.fedprox import fedprox
from oracles.scaffold import scaffold
from oracles.sparseloco import four_levels, sparseloco
from problems import ridge

CLIENTS, D = 4, 6
COHORTS = [[0, 2], [1], [3, 0, 1], [2, 3]] * 3
STEPS = [3, 1, 4, 2]
SERVERS = ["adam", "yogi", "adagrad"]


@pytest.fixture
def problem():
    return ridge(3, clients=CLIENTS, d=D)


def full_cohorts(rounds):
    return [list(range(CLIENTS))] * rounds


def data(problem):
    return problem.gradients, problem.sizes, problem.w0.numpy()


def averaged(problem, cohorts=COHORTS, steps=STEPS, **settings):
    settings = {"lr": 0.01, **settings}
    return fedavg(*data(problem), cohorts, local_steps=steps, **settings)


def losses(problem):
    def loss(x, y):
        return lambda w: np.mean((x @ w - y) ** 2)

    return [loss(x.numpy(), y.numpy()[:, 0]) for x, y in problem.clients]


def optimum(problem):
    """Where the mean of the clients' losses is smallest."""
    clients = [(x.numpy(), y.numpy()[:, 0]) for x, y in problem.clients]
    hessian = sum(x.T @ x / len(x) for x, _ in clients)
    return np.linalg.solve(hessian, sum(x.T @ y / len(x) for x, y in clients))


def assert_close(ours, theirs, tolerance=1e-10):
    np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)


# FedAvg


def test_fedavg_of_everyone_is_fedsgd(problem):
    sgd, _, _ = oracle.fedsgd(*data(problem), 5, local_steps=4, lr=0.01)
    assert_close(averaged(problem, full_cohorts(5), [4] * CLIENTS), sgd)


def test_fedavg_never_asks_a_client_that_is_away(problem):
    def away(w):
        raise AssertionError

    cohorts = [[0, 3], [1, 0]] * 2
    expected = averaged(problem, cohorts)
    gradients = [*problem.gradients[:2], away, problem.gradients[3]]
    found = fedavg(
        gradients, problem.sizes, problem.w0.numpy(), cohorts, local_steps=STEPS, lr=0.01
    )
    np.testing.assert_array_equal(found, expected)


def test_a_client_of_weight_three_is_three_clients(problem):
    one = averaged(problem, [[0, 1]] * 4)
    three = fedavg(
        [problem.gradients[0], *[problem.gradients[1]] * 3],
        [problem.sizes[0], *[problem.sizes[1] / 3] * 3],
        problem.w0.numpy(), full_cohorts(4), local_steps=[STEPS[0], *[STEPS[1]] * 3], lr=0.01,
    )  # fmt: skip
    assert_close(three, one)


def test_momentum_is_the_heavy_ball_and_restarts_with_the_round(problem):
    gradient, lr, beta = problem.gradients[0], 0.01, 0.8
    x = problem.w0.numpy()
    for _ in range(2):
        before = x
        for _ in range(5):
            x, before = x - lr * gradient(x) + beta * (x - before), x
    assert_close(averaged(problem, [[0]] * 2, [5] * CLIENTS, lr=lr, momentum=beta), x)
    one_step = [1] * CLIENTS
    with_momentum = averaged(problem, steps=one_step, momentum=beta)
    np.testing.assert_array_equal(with_momentum, averaged(problem, steps=one_step))


# FedProx and SCAFFOLD


def proximal(problem, mu, cohorts=COHORTS, steps=STEPS, lr=0.01):
    return fedprox(
        problem.gradients,
        problem.sizes,
        problem.w0.numpy(),
        cohorts,
        mu=mu,
        local_steps=steps,
        lr=lr,
    )


def test_fedprox_without_its_term_is_fedavg_bit_for_bit(problem):
    np.testing.assert_array_equal(proximal(problem, mu=0.0), averaged(problem))


def test_fedprox_finds_the_proximal_point(problem):
    x, y = problem.clients[1][0].numpy(), problem.clients[1][1].numpy()[:, 0]
    w0, mu = problem.w0.numpy(), 2.0
    hessian = 2 * x.T @ x / len(x)
    expected = np.linalg.solve(hessian + mu * np.eye(D), 2 * x.T @ y / len(x) + mu * w0)
    assert_close(proximal(problem, mu, [[1]], [2000] * CLIENTS, lr=0.02), expected)


def controlled(problem, cohorts=COHORTS, steps=STEPS, weights=(1.0,) * CLIENTS, **settings):
    settings = {"lr": 0.01, **settings}
    return scaffold(
        problem.gradients, weights, problem.w0.numpy(), cohorts, local_steps=steps, **settings
    )


def test_scaffold_starts_as_fedavg(problem):
    W, _, _ = controlled(problem, COHORTS[:1], weights=problem.sizes)
    assert_close(W, averaged(problem, COHORTS[:1]), 1e-14)


def test_scaffold_of_identical_clients_is_fedavg():
    problem = ridge(3, clients=CLIENTS, d=D, alike=True)
    W, c, cs = controlled(problem, full_cohorts(8), [3] * CLIENTS)
    assert_close(W, averaged(problem, full_cohorts(8), [3] * CLIENTS))
    for c_n in cs:
        assert_close(c_n, c)


def test_scaffolds_server_variate_is_the_mean_of_the_clients(problem):
    _, c, cs = controlled(problem)
    assert_close(c, np.mean(cs, axis=0))


def test_a_clients_variate_is_the_mean_gradient_of_its_last_round(problem):
    seen = [[] for _ in range(CLIENTS)]

    def recorded(n):
        return lambda w: seen[n].append(problem.gradients[n](w)) or seen[n][-1]

    gradients = [recorded(n) for n in range(CLIENTS)]
    _, _, cs = scaffold(
        gradients, [1.0] * CLIENTS, problem.w0.numpy(), COHORTS, local_steps=STEPS, lr=0.01
    )
    for c_n, of_client, steps in zip(cs, seen, STEPS, strict=True):
        assert_close(c_n, np.mean(of_client[-steps:], axis=0))


def test_scaffold_reaches_the_optimum_of_unlike_clients_and_fedavg_does_not(problem):
    steps = [5] * CLIENTS
    gradients = [gradient(optimum(problem)) for gradient in problem.gradients]
    W, c, cs = controlled(problem, full_cohorts(400), steps, lr=0.02)
    assert_close(W, optimum(problem), 1e-6)
    assert_close(c, np.zeros(D), 1e-6)
    assert_close(cs, gradients, 1e-5)
    equal = fedavg(
        problem.gradients,
        [1.0] * CLIENTS,
        problem.w0.numpy(),
        full_cohorts(400),
        local_steps=steps,
        lr=0.02,
    )  # fmt: skip
    assert np.max(np.abs(equal - optimum(problem))) > 1e-3


def test_the_servers_step_scales_the_first_round(problem):
    w0 = problem.w0.numpy()
    one, _, _ = controlled(problem, COHORTS[:1])
    half, _, _ = controlled(problem, COHORTS[:1], server_lr=0.5)
    assert_close(half - w0, 0.5 * (one - w0))


# FedOpt


def adaptive(problem, cohorts=COHORTS, **settings):
    settings = {"server": "adam", "beta1": 0.9, "beta2": 0.99, "tau": 1e-3, **settings}
    return fedopt(
        *data(problem), cohorts, local_steps=STEPS, lr=0.01,
        **{"server_lr": 0.1, **settings},
    )  # fmt: skip


@pytest.mark.parametrize(("server", "beta2"), [("adam", 1.0), ("yogi", 0.9), ("adagrad", 0.9)])
def test_a_large_tau_makes_fedopt_a_scaled_fedavg(problem, server, beta2):
    """v stays at tau^2, so that a step is server_lr / (2 tau) times the mean change."""
    tau = 1e5
    state = adaptive(problem, server=server, beta1=0.0, beta2=beta2, tau=tau, server_lr=2 * tau)
    assert_close(state.W, averaged(problem), 1e-8)


@pytest.mark.parametrize("server", SERVERS)
def test_fedopt_does_not_depend_on_the_scale_of_the_updates(server):
    draw = np.random.default_rng(0)
    settings = {"server": server, "server_lr": 0.1, "beta1": 0.9, "beta2": 0.99}
    small, large = first_state(np.zeros(D), 1e-2), first_state(np.zeros(D), 8e-2)
    for _ in range(10):
        delta = draw.normal(size=D)
        small = server_step(small, delta, tau=1e-2, **settings)
        large = server_step(large, 8 * delta, tau=8e-2, **settings)
    assert_close(large.W, small.W)


@pytest.mark.parametrize("server", SERVERS)
def test_a_constant_update_moves_fedopt_by_the_servers_step(server):
    """In the limit m / sqrt(v) is 1 for adam and yogi, and 1 / sqrt(t) for adagrad."""
    state, delta, before = first_state(np.zeros(D), 1e-9), np.full(D, -0.3), np.zeros(D)
    for _ in range(2000):
        before = state.W
        state = server_step(
            state, delta, server=server, server_lr=0.1, beta1=0.9, beta2=0.99, tau=1e-9
        )
    step = 0.1 / np.sqrt(2000) if server == "adagrad" else 0.1
    assert_close(before - state.W, step, 1e-7)


def test_yogi_changes_v_by_no_more_than_the_square():
    """Adam forgets a large v at once, Yogi slowly."""
    state = ServerState(np.zeros(1), np.zeros(1), np.array([100.0]))
    settings = {"server_lr": 0.1, "beta1": 0.9, "beta2": 0.5, "tau": 1e-3}
    after = {s: server_step(state, np.ones(1), server=s, **settings).v[0] for s in SERVERS}
    assert after == {"adam": 50.5, "yogi": 99.5, "adagrad": 101.0}


# DeComFL and FeedSign


def random_directions(t, k, p):
    return np.random.default_rng([t, k, p]).normal(size=D)


def axes(t, k, p):
    """The mean of z z^T over p = 0..D-1 is the identity."""
    return np.sqrt(D) * np.eye(D)[p]


def forward_only(problem, directions=random_directions, cohorts=COHORTS, losses_of=None, **options):
    options = {"local_steps": 2, "perturbations": 3, "lr": 0.005, "mu": 0.1, **options}
    weights = options.pop("weights", problem.sizes)
    functions = losses_of or losses(problem)
    return decomfl(functions, weights, problem.w0.numpy(), cohorts, directions, **options)


def test_decomfl_along_every_axis_is_fedavg(problem):
    W, _, _ = forward_only(problem, axes, local_steps=3, perturbations=D)
    assert_close(W, averaged(problem, steps=[3] * CLIENTS, lr=0.005))


def test_decomfls_step_approaches_the_gradients(problem):
    w0, many = problem.w0.numpy(), 1000
    W, _, _ = forward_only(problem, cohorts=[[1]], local_steps=1, perturbations=many, lr=1.0)
    assert cosine(w0 - W, problem.gradients[1](w0)) > 0.95


@pytest.mark.parametrize("bits", [32, 1])
def test_clients_that_were_away_end_with_the_servers_bits(problem, bits):
    W, history, models = forward_only(problem, bits=bits)
    assert all(np.array_equal(model, W) for model in models)
    assert {scalars.shape for scalars in history} == {(2, 3)}


def feedsign(problem, **options):
    options = {
        "local_steps": 1,
        "perturbations": 1,
        "bits": 1,
        "weights": [1.0] * CLIENTS,
        **options,
    }
    return forward_only(problem, **options)


def test_feedsign_votes_and_moves_by_the_learning_rate(problem):
    slopes = [1.0, 1.0, -100.0, 1.0]
    linear = [lambda w, s=s: s * w @ random_directions(1, 0, 0) for s in slopes]
    W, history, _ = feedsign(problem, cohorts=[[0, 1, 2]], losses_of=linear)
    assert history[0] == 1.0
    assert_close(problem.w0.numpy() - W, 0.005 * random_directions(1, 0, 0))


def test_feedsign_does_not_see_the_scale_of_a_loss(problem):
    scaled = [lambda w, f=f, n=n: (n + 1) ** 3 * f(w) for n, f in enumerate(losses(problem))]
    W, _, _ = feedsign(problem)
    np.testing.assert_array_equal(feedsign(problem, losses_of=scaled)[0], W)


# E-3SFC


def softmax_case(seed=0, classes=3, inputs=4):
    draw = np.random.default_rng(seed)
    w, r = draw.normal(size=(2, classes * inputs))
    return (
        synthetic.cross_entropy(classes),
        w,
        r,
        draw.normal(size=inputs),
        draw.normal(size=classes),
    )


def cross_entropy_loss(w, x, y):
    scores = w.reshape(len(y), -1) @ x
    return np.log(np.sum(np.exp(scores))) * np.sum(y) - y @ scores


def slope(function, z, h=1e-6):
    return np.array([(function(z + h * e) - function(z - h * e)) / (2 * h) for e in np.eye(z.size)])


SAMPLES = {"cross_entropy": cross_entropy_loss, "squares": lambda w, x, y: (x @ w - y[0]) ** 2}


@pytest.mark.parametrize("name", SAMPLES)
def test_a_samples_gradient_and_pullback_are_slopes(name):
    case = softmax_case()
    sample, w, u, x, y = case
    if name == "squares":
        sample, w, u, y = synthetic.squares(), w[:4], u[:4], y[:1]
    assert_close(sample.gradient(w, x, y), slope(lambda w: SAMPLES[name](w, x, y), w), 1e-6)
    dx, dy = sample.pullback(w, x, y, u)
    assert_close(dx, slope(lambda x: sample.gradient(w, x, y) @ u, x), 1e-6)
    assert_close(dy, slope(lambda y: sample.gradient(w, x, y) @ u, y), 1e-6)


@pytest.mark.parametrize("sign", [1, -1])
def test_synthesis_descends_on_one_minus_the_cosine(sign):
    sample, w, r, x, y = softmax_case()

    def distance(z):
        return 1 - abs(cosine(sample.gradient(w, z[:4], z[4:]), sign * r))

    lr, z = 1e-2, np.concatenate([x, y])
    found_x, found_y, _ = synthesize(sample, w, sign * r, x, y, 1, lr)
    assert_close(np.concatenate([found_x, found_y]), z - lr * slope(distance, z), 1e-8)
    long_x, long_y, _ = synthesize(sample, w, sign * r, x, y, 300, 0.5)
    assert distance(np.concatenate([long_x, long_y])) < 0.8 * distance(z)


def test_what_a_sample_does_not_say_is_orthogonal_to_what_it_says():
    sample, w, r, x, y = softmax_case()
    x, y, s = synthesize(sample, w, r, x, y, 5, 0.1)
    sent = s * sample.gradient(w, x, y)
    assert abs((r - sent) @ sent) < 1e-10
    assert np.linalg.norm(r - sent) < np.linalg.norm(r)


def test_nothing_to_say_is_said_with_a_zero():
    sample, w, r, x, y = softmax_case()
    assert synthesize(sample, w, 0 * r, x, y, 3, 0.1)[2] == 0.0
    assert synthesize(sample, w, r, 0 * x, y, 3, 0.1)[2] == 0.0


def synthesized(problem, sample, cohorts=COHORTS, steps=5, sample_lr=0.1, gradients=None):
    def client_start(t, n):
        draw = np.random.default_rng([t, n])
        return draw.normal(size=D), draw.normal(size=1)

    return e3sfc(
        gradients or problem.gradients, *data(problem)[1:], cohorts, sample, client_start,
        lambda t: client_start(t, CLIENTS), local_steps=STEPS, lr=0.005, sample_steps=steps,
        sample_lr=sample_lr,
    )  # fmt: skip


def test_residuals_keep_what_was_not_sent(problem):
    """Changes are constant where gradients are: their sum is what arrived and what is left."""
    constant = [lambda w, n=n: np.arange(D) - float(n) for n in range(CLIENTS)]
    W, residuals, residual = synthesized(
        problem, synthetic.squares(), [[2]] * 5, gradients=constant
    )
    change = 5 * STEPS[2] * -0.005 * constant[2](None)
    assert_close(W - problem.w0.numpy() + residual + residuals[2], change)
    assert np.linalg.norm(residuals[2]) > 0.01 * np.linalg.norm(change)
    assert not any(residuals[n].any() for n in (0, 1, 3))


def test_a_sample_that_says_everything_makes_e3sfc_fedavg(problem):
    """With the loss x w the gradient is x: descent turns it into the direction of the residual."""
    linear = Sample(lambda w, x, y: x, lambda w, x, y, u: (u, np.zeros(1)))
    W, residuals, residual = synthesized(problem, linear, COHORTS[:4], 500, 1.0)
    assert_close(W, averaged(problem, COHORTS[:4], lr=0.005), 1e-6)
    assert_close(np.array([*residuals, residual]), 0.0, 1e-6)


# SparseLoCo's four levels


def heavy_tailed(seed=0, size=200):
    return np.random.default_rng(seed).standard_t(3, size=size)


def test_four_levels_keep_the_mean_and_lose_what_is_orthogonal():
    x = heavy_tailed()
    q = four_levels(x)
    assert len(np.unique(q)) == 4
    assert_close(np.mean(q), np.mean(x))
    assert_close(q @ q + (x - q) @ (x - q), x @ x)
    assert np.all(np.diff(q[np.argsort(x)]) >= 0)


def test_four_levels_follow_shifts_and_scales():
    x = heavy_tailed()
    assert_close(four_levels(3 * x + 7), 3 * four_levels(x) + 7)


def test_four_levels_are_not_symmetric():
    """Below the mean a value is large from 2.25 standard deviations on, above it from 0.75 on."""
    x = heavy_tailed()
    z = (x - np.mean(x)) / np.std(x, ddof=1)
    codes = np.unique(four_levels(x), return_inverse=True)[1]
    edges = [(np.max(z[codes == level]), np.min(z[codes == level + 1])) for level in range(3)]
    for (below, above), edge in zip(edges, (-2.25, -0.75, 0.75), strict=True):
        assert below < edge < above
    assert not np.allclose(four_levels(-x), -four_levels(x))


@pytest.mark.parametrize("x", [[2.5], [0.0, 0.0], [-1.5, -1.5, -1.5]])
def test_values_without_spread_are_exact(x):
    assert_close(four_levels(np.array(x)), x)


def test_two_values_share_a_level():
    """They lie 0.71 standard deviations from their mean, and the middle bin ends at 0.75."""
    assert_close(four_levels(np.array([1.0, 4.0])), [2.5, 2.5])


def run_sparseloco(problem, block, density=1.0, decay=0.9, cohorts=COHORTS, outer_lr=0.8, chunk=D):
    return sparseloco(
        *data(problem), cohorts, density=density, decay=decay, outer_lr=outer_lr,
        local_steps=[3] * CLIENTS, lr=0.02, beta1=0.9, beta2=0.99, eps=1e-6,
        chunk=chunk, block=block,
    )  # fmt: skip


def test_sparseloco_forgets_nothing_that_its_levels_say_exactly(problem):
    """A value that is a block of its own has no spread: nothing is left to decay."""
    exact = [run_sparseloco(problem, 1, decay=decay) for decay in (0.1, 0.9)]
    assert_close(*exact)
    rounded = [run_sparseloco(problem, D, decay=decay) for decay in (0.1, 0.9)]
    assert not np.allclose(*rounded)


def test_sparseloco_sends_the_density_of_each_chunk(problem):
    moved = run_sparseloco(problem, D, 0.5, cohorts=[[1]], chunk=4) != problem.w0.numpy()
    assert (np.count_nonzero(moved[:4]), np.count_nonzero(moved[4:])) == (2, 1)


def test_the_outer_step_scales_sparselocos_first_round(problem):
    w0 = problem.w0.numpy()
    one, half = (run_sparseloco(problem, D, cohorts=[[0, 3]], outer_lr=lr) for lr in (1.0, 0.5))
    assert_close(half - w0, 0.5 * (one - w0))
