"""Any dense method can be compressed: the oracle, the identity, and what is refused."""

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import mse_loss

import oracle
from fedsift import algorithms
from fedsift.algorithms import compressed, fedadam, fedopt, fedprox, fedsgd, find, for_rounds
from fedsift.algorithms.method import Algorithm, Context, Phase, always, nonzero_parts
from fedsift.codec.update import dense
from fedsift.schedules import cosine, linear
from fedsift.simulation import Options, prepare
from oracles.compressed import compressed as transcription
from oracles.fedopt import first_state, server_step
from problems import ridge

ADAM = {"lr": 0.02, "beta1": 0.9, "beta2": 0.99, "eps": 1e-6}
SETTINGS = {"density": 0.3, "down_density": 0.5, "bits": 4, "decay": 0.9}
MU = 0.7
SERVER = {"server_lr": 0.1, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3}
INNER = {
    "fedsgd": fedsgd(5, lr=0.01),
    "fedadam": fedadam(5, **ADAM),
    "fedprox": fedprox(MU, 5, lr=0.01),
    "fedopt": fedopt("yogi", local_steps=5, lr=0.01, **SERVER),
}


def federation(problem, algorithm, participation=1.0, wire="count"):
    options = Options(
        batch_size=None, participation=participation, dropout=0.0, min_clients=0, wire=wire,
        loss=mse_loss, seed=0, device="cpu", max_norm_ratio=None,
    )  # fmt: skip
    return prepare(problem.model, problem.clients, None, algorithm, options)


def trained(federation, rounds):
    snapshot = federation.initial_snapshot()
    for _ in range(rounds):
        snapshot, _ = federation.run_round(snapshot)
    return snapshot


def local_of(problem, name):
    """Five local steps of a client, by the oracle of the method."""

    def local(n, state):
        gradient, (W, *_) = problem.gradients[n], state
        if name == "fedadam":
            return list(oracle.adam(gradient, tuple(state), 5, **ADAM))
        mu = MU if name == "fedprox" else 0.0
        return [oracle.sgd(lambda w: gradient(w) + mu * (w - W), W, 5, lr=0.01)]

    return local


def server_of(name):
    """The server's step by the oracle of FedOpt; other servers take the mean itself."""
    state = first_state(np.zeros(12), SERVER["tau"])

    def server(means):
        nonlocal state
        before, state = state.W, server_step(state, means[0], server="yogi", **SERVER)
        return [state.W - before]

    return server if name == "fedopt" else list


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("bits", [4, 32])
@pytest.mark.parametrize("name", INNER)
def test_ten_rounds_agree_with_the_transcription(name, bits, seed):
    problem, given = ridge(seed), {**SETTINGS, "bits": bits}
    fed = federation(problem, compressed(INNER[name], **given), participation=0.5, wire="real")
    cohorts = [fed.cohort(round) for round in range(1, 11)]
    assert len(set(cohorts)) > 1
    w0 = problem.w0.numpy()
    start = [w0, 0 * w0, 0 * w0] if name == "fedadam" else [w0]
    expected = transcription(
        local_of(problem, name), problem.sizes, start, cohorts, server=server_of(name), **given
    )
    for ours, theirs in zip(trained(fed, 10).state, expected, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-10, atol=1e-10)


@cache
def dense_methods():
    made = []
    for name in algorithms.METHODS:
        known = algorithms.settings_of(name)
        few = {"local_steps": 2, "lr": 0.01}
        try:
            made.append(find(f"compressed-{name}")(**{k: few[k] for k in few.keys() & known}))
        except ValueError:
            continue
    return {algorithm.name.removeprefix("compressed-"): algorithm for algorithm in made}


@pytest.mark.parametrize("name", dense_methods())
@settings(max_examples=8)
@given(seed=st.integers(0, 1000), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_without_compression_it_is_the_method_itself(name, seed, dtype):
    algorithm, whole = dense_methods()[name], {"density": 1, "down_density": 1, "bits": 32}
    shared = algorithms.settings_of(name)
    itself = find(name)(**{k: x for k, x in algorithm.settings.items() if k in shared})
    lossless = find(algorithm.name)(**{**algorithm.settings, **whole})
    problem = ridge(seed, dtype=dtype)
    ours, theirs = (trained(federation(problem, x, 0.5), 4) for x in (lossless, itself))
    for one, other in zip(ours.state, theirs.state, strict=True):
        assert torch.equal(one, other)
    assert ours.traffic.uplink_bits_paper == theirs.traffic.uplink_bits_paper


def test_the_dense_methods_are_known():
    assert set(dense_methods()) == {"fedsgd", "fedadam", "fedavg", "fedprox", "fedopt"}


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (algorithms.onebit_adam, "onebit-adam cannot be compressed: it compresses its updates"),
        (algorithms.sift, "sift cannot be compressed: it already has density, bits, decay"),
        (algorithms.scaffold, r"scaffold cannot be compressed: the mean of its control variates"),
        (algorithms.fedadamw, "fedadamw cannot be compressed: it compresses its updates itself"),
        (lambda: compressed(fedsgd()), "compressed-fedsgd cannot be compressed: it already has"),
        (lambda: Algorithm(fedsgd().phase), "compressed takes an algorithm made by a function"),
    ],
)
def test_other_methods_are_refused_in_one_line(make, problem):
    with pytest.raises(ValueError, match=f"^{problem}[^\n]*$"):
        compressed(make())


def handmade(registered, parts=None, broadcast=None):
    """A method that sends other parts than ΔW."""
    send = lambda context, update, memory: (parts(update) if parts else (), memory)  # noqa: E731
    phase = Phase(1, fedsgd().phase(1).step, send, lambda d: 0.0)
    phase = phase if broadcast is None else Phase(**{**vars(phase), "broadcast": broadcast})
    registered("handmade")(lambda: Algorithm(always(phase), state=("w", "m", "c")))
    return find("handmade")()


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setattr(algorithms.registry, "METHODS", dict(algorithms.METHODS))
    return algorithms.method


def test_what_must_be_exact_is_refused(registered):
    def control(update):
        return dense({"w": update.delta_w, "c": update.end["c"]})

    with pytest.raises(ValueError, match=r"the mean of its control variates \(C\) must be exact"):
        compressed(handmade(registered, control))
    with pytest.raises(ValueError, match="its clients do not send ΔW"):
        compressed(handmade(registered))


def test_a_server_that_sends_more_than_its_clients_is_refused(registered):
    def broadcast(context: Context, mean, memory):
        return nonzero_parts(mean.replace(m=mean.w)), memory

    def weights(update):
        return dense({"w": update.delta_w})

    with pytest.raises(ValueError, match="its server sends M, which its clients do not send"):
        compressed(handmade(registered, weights, broadcast))
    compressed(handmade(registered, weights))


def test_steps_may_change_the_memory_of_the_method_inside(registered):
    def step(x, gradient, context):
        mean = 0.5 * (context.memory["mean"] + gradient)
        return x.replace(w=x.w - 0.01 * mean), {"mean": mean}

    @registered("remembers")
    def remembers():
        phase = Phase(3, step, lambda c, update, m: (dense({"w": update.delta_w}), m), lambda d: d)
        return Algorithm(always(phase), client_memory=("mean",), state=("w",))

    lossless = compressed(remembers(), density=1, down_density=1, bits=32)
    ours, theirs = (trained(federation(ridge(0), x), 3) for x in (lossless, remembers()))
    assert torch.equal(ours.state.w, theirs.state.w)
    assert torch.equal(ours.client_memory[0]["mean"], theirs.client_memory[0]["mean"])
    assert bool(theirs.client_memory[0]["mean"].any())


def test_every_setting_may_be_a_schedule():
    algorithm = for_rounds(
        compressed(fedsgd(3, lr=cosine(0.02)), density=linear(0.5, 0.2), bits=linear(8, 4)),
        rounds=4,
    )
    assert repr(algorithm).startswith(
        "compressed_fedsgd(local_steps=3, lr=cosine(start=0.02, end=0.0, rounds=4), density=linear("
    )
    bits = [algorithm.phase(round).paper_bits(100) for round in (1, 3)]
    assert bits[0] > bits[1]
    problem = ridge(0)
    constant = compressed(fedsgd(3, lr=0.02), density=0.5, bits=8)
    ours, theirs = (trained(federation(problem, x), 1) for x in (algorithm, constant))
    assert torch.equal(ours.state.w, theirs.state.w)
    trained(federation(problem, algorithm, wire="real"), 4)


@pytest.mark.parametrize("bits", [1, 9, 33, 4.5])
def test_bits_are_checked(bits):
    with pytest.raises(ValueError, match=r"^bits must be a whole number from 2 to 8, or 32, got"):
        compressed(fedsgd(), bits=bits)
