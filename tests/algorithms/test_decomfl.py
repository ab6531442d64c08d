"""DeComFL: its transcription, its directions, its bytes, and clients that were away."""

from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import fedsift
from fedsift import data
from fedsift.algorithms import decomfl
from fedsift.algorithms.directions import directions
from fedsift.algorithms.method import Context
from fedsift.codec.frame import CHECKSUM_BYTES, decode, encode, parse_frame
from fedsift.codec.wire import SimulatedWire
from fedsift.engine import Forked, Reference, Stacked
from fedsift.engine.gpu.losses import require_no_dropout
from fedsift.engine.processes import forked
from fedsift.errors import Diverged
from fedsift.federation.round import apply_broadcast
from fedsift.simulation import Options, prepare
from oracles import decomfl as oracle
from problems import ridge

SEED, D, ROUNDS = 7, 12, 10
SETTINGS = {"perturbations": 3, "local_steps": 2, "lr": 0.005, "mu": 0.1}
ENGINES = {
    "one by one": lambda fed: Reference(fed.task),
    "in processes": lambda fed: Forked(fed.task, fed.algorithm, 2),
    "stacked": lambda fed: Stacked(fed.task, fed.algorithm),
}


def rebuilt(round, step, p, seed=SEED, d=D):
    """A direction, computed as the documentation says, with Python's integers."""

    def bits(key, n):
        x = (key + (n + 1) * 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    key = bits(bits(bits(seed, round), step), p)
    numbers = [bits(key, i // 4) >> 16 * (i % 4) & 0xFFFF for i in range(d)]
    return np.array([np.float32(NormalDist().inv_cdf((u + 0.5) / 2**16)) for u in numbers], float)


def federation(problem, engine="one by one", wire="count", **settings):
    method = decomfl(**{**SETTINGS, **settings})
    options = Options(
        batch_size=None, loss=mse_loss, seed=SEED, device="cpu", participation=0.5, dropout=0.0,
        min_clients=0, wire=wire,
    )  # fmt: skip
    fed = prepare(problem.model, problem.clients, None, method, options)
    return replace(fed, engine=ENGINES[engine](fed))


def after_rounds(fed, rounds=ROUNDS):
    snapshot = fed.initial_snapshot()
    for _ in range(rounds):
        snapshot, _ = fed.run_round(snapshot)
    return snapshot


def losses(problem):
    def loss(x, y):
        return lambda w: np.mean((x @ w - y) ** 2)

    return [loss(x.numpy(), y.numpy()[:, 0]) for x, y in problem.clients]


@pytest.mark.parametrize("bits", [32, 1])
@pytest.mark.parametrize("engine", ENGINES)
def test_ten_rounds_agree_to_ten_digits_on_every_engine(engine, bits, monkeypatch):
    monkeypatch.setattr(forked, "MIN_PARALLEL_SECONDS", -1.0)
    problem = ridge(3, clients=6, d=D)
    fed = federation(problem, engine, bits=bits)
    cohorts = [fed.cohort(t) for t in range(1, ROUNDS + 1)]
    assert len(set(cohorts)) > 1
    expected, _, _ = oracle.decomfl(
        losses(problem), [1.0] * 6, problem.w0.numpy(), cohorts,
        lambda t, k, p: rebuilt(t, k + 1, p), bits=bits, **SETTINGS,
    )  # fmt: skip
    found = after_rounds(fed).state.w.numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-10)
    assert np.abs(found - problem.w0.numpy()).max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_directions_are_what_the_documentation_says(dtype):
    found = list(directions(torch.zeros(3, 1001, dtype=dtype), 2**64 - 2, 3, 5, 2))
    for p, z in enumerate(found):
        expected = rebuilt(3, 5, p, seed=2**64 - 2, d=1001)
        assert torch.equal(z, torch.tensor(expected, dtype=dtype))


def test_directions_are_normal_and_independent():
    zs = torch.stack(list(directions(torch.zeros(40_000), 0, 1, 1, 6)))
    zs = torch.cat([zs, *(next(directions(zs, *key, 1))[None] for key in [(1, 1, 1), (0, 2, 1)])])
    normal = torch.tensor([1.0, 3.0])
    for z in zs:
        torch.testing.assert_close(
            torch.stack([(z**2).mean(), (z**4).mean()]), normal, rtol=0.06, atol=0
        )
    products = zs @ zs.T / zs.shape[-1]
    assert (products - products.diag().diag()).abs().max() < 0.025


@pytest.mark.parametrize(("bits", "payload"), [(32, 4 * 6), (1, 1)])
def test_frames_hold_the_scalars_and_a_header(bits, payload):
    sizes = []

    def send(update, spec, limits):
        frame = encode(update, spec)
        _, at = parse_frame(frame)
        if spec.round:
            sizes.append((at, len(frame) - at - CHECKSUM_BYTES))
        return decode(frame, spec.layout, limits), len(frame)

    fed = federation(ridge(3, clients=6, d=5000, dtype=torch.float32), wire="real", bits=bits)
    after_rounds(replace(fed, wire=SimulatedWire(send)), 2)
    assert {n for _, n in sizes} == {payload}
    assert max(header for header, _ in sizes) < 48


@pytest.mark.parametrize("bits", [32, 1])
def test_a_client_that_was_away_replays_the_broadcasts_bit_for_bit(bits):
    frames = []

    def send(update, spec, limits):
        frame = encode(update, spec)
        if spec.round and limits.client is None:
            frames.append(frame)
        return decode(frame, spec.layout, limits), len(frame)

    fed = federation(ridge(3, clients=6, d=500, dtype=torch.float32), wire="real", bits=bits)
    fed = replace(fed, wire=SimulatedWire(send))
    end, state = after_rounds(fed, 5).state, fed.initial_snapshot().state
    for round, frame in enumerate(frames, 1):
        parts = decode(frame, fed.task.layout).parts
        state, _ = apply_broadcast(fed.algorithm, Context.of(fed.task, round, state), state, parts)
    assert torch.equal(state.w, end.w)


def perceptron():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


@pytest.mark.parametrize("bits", [32, 1])
def test_it_learns_digits(bits):
    digits = data.load("digits")
    x, y = digits.train
    clients = [(x[n::3], y[n::3]) for n in range(3)]
    method = decomfl(lr=0.05, local_steps=5, bits=bits)
    result = fedsift.simulate(perceptron(), clients, digits.test, method, rounds=30, batch_size=32)
    assert result.history[-1]["accuracy"] > 0.6
    assert result.history[-1]["train_loss"] < 0.8 * result.history[1]["train_loss"]


def test_random_layers_draw_the_same_numbers_at_every_point():
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(D, 1, dtype=torch.float64))
    result = fedsift.simulate(
        model, ridge(0, d=D).clients, algorithm=decomfl(mu=1e-6, lr=1e-3), rounds=5,
        batch_size=None, loss=mse_loss,
    )  # fmt: skip
    # Other numbers would make slopes, and then W, as large as 1 / mu.
    assert result.state.w.abs().max() < 10


def test_dropout_on_a_gpu_is_refused():
    with pytest.raises(ValueError, match="cannot train a model with dropout"):
        require_no_dropout(nn.Sequential(nn.Linear(2, 2), nn.Dropout2d(0.1)))


@pytest.mark.parametrize("bits", [32, 1])
def test_a_loss_that_is_not_finite_is_reported(bits):
    problem = ridge(0, d=D)
    with pytest.raises(Diverged):
        fedsift.simulate(
            problem.model, problem.clients, algorithm=decomfl(bits=bits), rounds=1,
            batch_size=None, loss=lambda output, y: torch.inf * mse_loss(output, y),
        )  # fmt: skip


def test_settings_that_decide_what_is_sent_are_checked():
    with pytest.raises(ValueError, match="bits must be 1 or 32, got 2"):
        decomfl(bits=2)
    with pytest.raises(ValueError, match=r"local_steps must be .* in all rounds"):
        decomfl(local_steps=lambda round: round)
