"""E-3SFC: its transcription, its bytes, its server on Flower, and what it refuses."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import fedsift
from fedsift import data
from fedsift.algorithms import compressed, e3sfc
from fedsift.algorithms.e3sfc import SERVER
from fedsift.codec.frame import CHECKSUM_BYTES, encode, parse_frame
from fedsift.codec.update import Update, dense
from fedsift.codec.wire import SimulatedWire
from fedsift.engine import Forked, Reference, Stacked
from fedsift.engine.contract import ClientResult
from fedsift.engine.processes import forked
from fedsift.errors import ConfigError
from fedsift.seeding import torch_seed
from fedsift.simulation import Options, prepare
from oracles import e3sfc as oracle
from problems import ridge

SEED, ROUNDS, CLIENTS, D, CLASSES = 7, 10, 5, 6, 3
SETTINGS = {"sample_steps": 5, "sample_lr": 0.5, "local_steps": 3, "lr": 0.02}
ENGINES = {
    "one by one": lambda fed: Reference(fed.task),
    "in processes": lambda fed: Forked(fed.task, fed.algorithm, 2),
    "stacked": lambda fed: Stacked(fed.task, fed.algorithm),
}


def federation(model, clients, loss, engine="one by one", wire="count", **settings):
    options = Options(
        batch_size=None, loss=loss, seed=SEED, device="cpu", participation=0.6, dropout=0.0,
        min_clients=0, wire=wire, max_norm_ratio=None,
    )  # fmt: skip
    fed = prepare(model, clients, None, e3sfc(**{**SETTINGS, **settings}), options)
    return replace(fed, engine=ENGINES[engine](fed))


def after_rounds(fed, rounds=ROUNDS):
    snapshot = fed.initial_snapshot()
    for _ in range(rounds):
        snapshot, report = fed.run_round(snapshot)
        assert not report.rejected
    return snapshot


def start_of(round, place, shapes):
    generator = torch.Generator().manual_seed(torch_seed(SEED, "sample", round, place + 1))
    return [torch.randn(shape, generator=generator).double().numpy() for shape in shapes]


def expected(fed, gradients, w0, sample, shapes):
    cohorts = [fed.cohort(t) for t in range(1, ROUNDS + 1)]
    assert len(set(cohorts)) > 1
    return oracle.e3sfc(
        gradients, [1.0] * CLIENTS, w0, cohorts, sample,
        lambda t, n: start_of(t, n, shapes), lambda t: start_of(t, SERVER, shapes),
        **{**SETTINGS, "local_steps": [SETTINGS["local_steps"]] * CLIENTS},
    )  # fmt: skip


def assert_agrees(end, found):
    W, residuals, residual = found
    ours = [end.state.w, end.server_memory["residual"][0]]
    ours += [end.client_memory[n]["residual"][0] for n in end.client_memory]
    theirs = [W, residual, *(residuals[n] for n in end.client_memory)]
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one.numpy(), other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("engine", ENGINES)
def test_ten_rounds_agree_to_ten_digits_on_every_engine(engine, monkeypatch):
    monkeypatch.setattr(forked, "MIN_PARALLEL_SECONDS", -1.0)
    problem = ridge(3, clients=CLIENTS, d=D)
    fed = federation(problem.model, problem.clients, mse_loss, engine)
    w0 = problem.w0.numpy()
    found = expected(fed, problem.gradients, w0, oracle.squares(), ((D,), (1,)))
    assert np.abs(found[0] - w0).max() > 1e-3
    assert_agrees(after_rounds(fed), found)


def softmax_gradient(x, y):
    """The gradient of the mean cross-entropy of a linear model without bias."""

    def gradient(w):
        powers = np.exp(x @ w.reshape(CLASSES, -1).T)
        errors = powers / powers.sum(1, keepdims=True) - np.eye(CLASSES)[y]
        return np.ravel(errors.T @ x) / len(x)

    return gradient


def classification(dtype=torch.float64, inputs=4):
    draw = torch.Generator().manual_seed(1)
    clients = [
        (torch.randn(n, inputs, generator=draw, dtype=dtype), torch.arange(n) % CLASSES)
        for n in (5, 9, 4, 12, 7)
    ]
    model = nn.Linear(inputs, CLASSES, bias=False, dtype=dtype)
    with torch.no_grad():
        model.weight.copy_(torch.randn(CLASSES, inputs, generator=draw))
    return model, clients


def test_labels_are_any_vectors_for_cross_entropy():
    model, clients = classification()
    fed = federation(model, clients, cross_entropy)
    gradients = [softmax_gradient(x.numpy(), y.numpy()) for x, y in clients]
    w0 = model.weight.detach().numpy().ravel()
    sample = oracle.cross_entropy(CLASSES)
    assert_agrees(after_rounds(fed), expected(fed, gradients, w0, sample, ((4,), (CLASSES,))))


def test_frames_hold_a_sample_and_a_header():
    """The sample, its label and the factor: no more, however many parameters there are."""
    sizes = []

    def send(update, spec, limits):
        frame = encode(update, spec)
        _, at = parse_frame(frame)
        if spec.round:
            sizes.append((at, len(frame) - at - CHECKSUM_BYTES))
        return update, len(frame)

    model, clients = classification(torch.float32, inputs=500)
    fed = federation(model, clients, cross_entropy, wire="real", sample_steps=1)
    end = after_rounds(replace(fed, wire=SimulatedWire(send)), 2)
    payload = 4 * (500 + CLASSES + 1)
    assert {n for _, n in sizes} == {payload}
    assert max(header for header, _ in sizes) < 48
    assert end.traffic.uplink_bits_paper == pytest.approx(2 * 0.6 * 8 * payload)


def linear():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def test_it_learns_digits():
    digits = data.load("digits")
    x, y = digits.train
    clients = [(x[n::3], y[n::3]) for n in range(3)]
    result = fedsift.simulate(linear(), clients, digits.test, e3sfc(10, lr=0.2), rounds=15)
    assert result.history[-1]["accuracy"] > 0.6


@pytest.mark.parametrize("buffers", ["average", "local", "frozen"])
def test_models_with_batch_normalization(buffers):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, CLASSES))
    _, clients = classification(torch.float32)
    before = [p.detach().clone() for p in model.parameters()]
    result = fedsift.simulate(
        model, clients, algorithm=e3sfc(**SETTINGS), rounds=2, batch_size=4, buffers=buffers
    )
    result.load_into(model)
    assert not torch.equal(model[0].weight, before[0])


def test_a_sample_whose_gradient_is_not_finite_is_rejected():
    """Its numbers are finite. Only the server's gradient shows that it is harmful."""
    model, clients = classification(torch.float32)
    fed = federation(model, clients, cross_entropy)
    fed = replace(fed, engine=Sends(torch.full((1, 4 + CLASSES + 1), 1e30)))
    after, report = fed.run_round(fed.initial_snapshot())
    assert (report.clients, report.rejected) == (0, 3)
    assert "must be finite" in next(iter(report.problems.values()))
    assert torch.equal(after.state.w, model.weight.detach().flatten())


class Sends:
    """An engine whose clients all send the same payload."""

    def __init__(self, payload):
        self.payload = payload

    def train(self, job):
        for client in job.cohort:
            update = Update(dense({"p": self.payload}), (1.0,))
            yield ClientResult(client, update, {"residual": torch.zeros(1, 12)}, 0.0, 1)


def simulated(model, clients, **options):
    options = {"rounds": 1, "batch_size": None, **options}
    return fedsift.simulate(model, clients, algorithm=e3sfc(**SETTINGS), **options)


def test_inputs_that_are_not_numbers_are_refused():
    clients = [(torch.zeros(4, 2, dtype=torch.int64), torch.zeros(4, dtype=torch.int64))]
    model = nn.Sequential(nn.Embedding(3, 2), nn.Flatten(), nn.Linear(4, 2))
    with pytest.raises(ValueError, match=r"one tensor of floating-point numbers, got torch\.int64"):
        simulated(model, clients)


def test_a_loss_without_soft_labels_is_refused():
    model, clients = classification(torch.float32)

    def loss(output, y):
        return cross_entropy(output, y.long())

    with pytest.raises(ValueError, match="need a loss that accepts labels in the form of the"):
        simulated(model, clients, loss=loss)


def test_it_cannot_be_compressed_again():
    with pytest.raises(ConfigError, match="it compresses its updates itself"):
        compressed(e3sfc())
