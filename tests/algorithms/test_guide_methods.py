"""The methods of the guide, and FedDyn, against NumPy and on every engine of a CPU."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import mse_loss

import guide
from fedsift.algorithms import (
    METHODS,
    Algorithm,
    Phase,
    always,
    compressed,
    dense,
    for_rounds,
    method,
)
from fedsift.codec.wire import ENCODED
from fedsift.engine import Forked, Reference, Stacked
from fedsift.engine.processes import forked
from fedsift.schedules import cosine
from fedsift.simulation import Options, prepare
from oracles.common import local_sgd, mean_of
from problems import gradient_of, ridge

CLIENTS, ROUNDS, BATCH, LR = 5, 10, 4, 0.01
ENGINES = [Reference, Forked, Stacked]
SMALL = {"local_steps": 3, "lr": LR, "density": 0.3}


@pytest.fixture(autouse=True)
def methods():
    """The guide's methods, registered for one test."""
    before = dict(METHODS)
    yield {**guide.methods(), "feddyn": feddyn()}
    METHODS.clear()
    METHODS.update(before)


def feddyn():
    """D. A. E. Acar et al., "Federated Learning Based on Dynamic Regularization", ICLR 2021."""

    @method("feddyn")
    def feddyn(alpha: float = 0.1, local_steps: int = 4, lr: float = LR) -> Algorithm:
        def step(x, gradient, context):
            drift = alpha * (x.w - context.start.w) - context.memory["h"]
            return x.replace(w=x.w - lr * (gradient + drift))

        def send(context, update, memory):
            return dense({"w": update.delta_w}), {"h": memory["h"] - alpha * update.delta_w}

        def broadcast(context, mean, memory):
            h = memory["h"] - alpha * context.merged_share * mean.w
            return dense({"w": mean.w[None] - h / alpha}), {"h": h}

        phase = Phase(local_steps, step, send, lambda d: 32 * d, broadcast=broadcast)
        memories = {"client_memory": ("h",), "server_memory": ("h",)}
        return Algorithm(always(phase), state=("w",), weights="equal", **memories)

    return feddyn


def small(make, **settings):
    """The method with few steps, if it has these settings."""
    known = METHODS[make().name].settings
    return make(**{**{k: v for k, v in SMALL.items() if k in known}, **settings})


def federation(algorithm, problem, batch_size=None):
    options = Options(
        batch_size=batch_size, participation=0.6, seed=2, loss=mse_loss, device="cpu",
        max_norm_ratio=None,
    )  # fmt: skip
    return prepare(problem.model, problem.clients, None, algorithm, options)


def trained(fed, engine=Reference, rounds=ROUNDS):
    extra = {Reference: (), Forked: (fed.algorithm, 2), Stacked: (fed.algorithm,)}[engine]
    fed = replace(fed, engine=engine(fed.task, *extra))
    snapshot = fed.initial_snapshot()
    for _ in range(rounds):
        snapshot, _ = fed.run_round(snapshot)
    return snapshot


def cohorts(fed):
    return [fed.cohort(t) for t in range(1, ROUNDS + 1)]


def assert_close(ours, theirs):
    np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("engine", ENGINES)
def test_fednova_agrees_with_its_paper(engine, methods, monkeypatch):
    """Theorem 2: W <- W - tau_eff sum_n p_n lr d_n, where d_n is a client's mean gradient."""
    monkeypatch.setattr(forked, "MIN_PARALLEL_SECONDS", -1.0)
    problem = ridge(0, clients=CLIENTS)
    fed = federation(methods["fednova"](epochs=2, lr=LR), problem, BATCH)
    steps = [fed.task.num_steps(n, fed.algorithm.phase(1).local_steps) for n in range(CLIENTS)]
    assert len(set(steps)) > 2
    W = problem.w0.numpy()
    for t, cohort in enumerate(cohorts(fed), 1):
        ds = []
        for n in cohort:
            w, (x, y) = W, (part.numpy() for part in problem.clients[n])
            rows = fed.task.batches(t, n, fed.algorithm.phase(t).local_steps)
            for chosen in [slice(None)] * steps[n] if rows is None else rows:
                w = w - LR * gradient_of(x[chosen], y[chosen, 0])(w)
            ds.append((W - w) / steps[n])
        tau = mean_of(cohort, [steps[n] for n in cohort], problem.sizes)
        W = W - tau * mean_of(cohort, ds, problem.sizes)
    assert_close(trained(fed, engine).state.w, W)


@pytest.mark.parametrize("engine", ENGINES)
def test_feddyn_agrees_with_its_paper(engine, methods, monkeypatch):
    """Algorithm 1, with the gradients' sum h on the server and one on each client."""
    monkeypatch.setattr(forked, "MIN_PARALLEL_SECONDS", -1.0)
    problem, alpha = ridge(0, clients=CLIENTS), 0.3
    fed = federation(methods["feddyn"](alpha=alpha), problem)
    W, h, hs = problem.w0.numpy(), np.zeros(12), [np.zeros(12)] * CLIENTS
    for cohort in cohorts(fed):
        ws = []
        for n in cohort:
            w = W
            for _ in range(4):
                w = w - LR * (problem.gradients[n](w) - hs[n] + alpha * (w - W))
            hs[n] = hs[n] - alpha * (w - W)
            ws.append(w)
        h = h - alpha * sum(w - W for w in ws) / CLIENTS
        W = sum(ws) / len(ws) - h / alpha
    end = trained(fed, engine)
    assert_close(end.state.w, W)
    assert_close(end.server_memory["h"][0], h)
    for n, memory in end.client_memory.items():
        assert_close(memory["h"][0], hs[n])


def test_the_majority_of_the_signs_decides(methods):
    problem = ridge(0, clients=CLIENTS)
    fed = federation(methods["majority_vote"](step_size=0.1, local_steps=3, lr=LR), problem)
    W = problem.w0.numpy()
    for cohort in cohorts(fed):
        moves = [local_sgd(problem.gradients[n], W, 3, LR) - W for n in cohort]
        W = W + 0.1 * np.where(sum(np.sign(move) for move in moves) >= 0, 1.0, -1.0)
    end = trained(fed)
    assert_close(end.state.w, W)
    assert end.traffic.uplink_bytes <= 0.6 * ROUNDS * 50  # a header and 2 bytes of signs


def test_a_coder_of_ones_own_travels_in_frames(methods):
    algorithm, problem = small(methods["ternary_fedavg"]), ridge(1, clients=CLIENTS, d=103)
    fed = federation(algorithm, problem, BATCH)
    ours, theirs = trained(replace(fed, wire=ENCODED)), trained(fed)
    assert torch.equal(ours.state.w, theirs.state.w)
    assert ours.traffic == theirs.traffic
    per_client = ours.traffic.uplink_bytes / ROUNDS / 0.6
    assert 4 + 21 < per_client < 4 + 21 + 50  # the scale, five values per byte, and a header


@pytest.mark.parametrize("name", [*guide.NAMES, "feddyn"])
def test_every_engine_gives_the_same_result(name, methods, monkeypatch):
    monkeypatch.setattr(forked, "MIN_PARALLEL_SECONDS", -1.0)
    algorithm = for_rounds(small(methods[name], lr=cosine(LR)), 4)
    fed = federation(algorithm, ridge(1, clients=CLIENTS), BATCH)
    reference, processes, stacked = (trained(fed, engine, 4) for engine in ENGINES)
    assert torch.equal(reference.state.w, processes.state.w)
    assert reference.traffic == processes.traffic == stacked.traffic
    assert_close(stacked.state.w, reference.state.w.numpy())


@pytest.mark.parametrize("name", ["my_fedprox", "fedavgm", "fednova", "feddyn"])
def test_it_can_be_compressed(name, methods):
    """Also with payloads, and if it divides by what it remembers."""
    whole = compressed(small(methods[name]), density=1, down_density=1, bits=32)
    problem = ridge(1, clients=CLIENTS)
    ours, theirs = (
        trained(federation(x, problem, BATCH), rounds=4) for x in (whole, small(methods[name]))
    )
    assert torch.equal(ours.state.w, theirs.state.w)
