"""sift where things go wrong: residuals that are lost, and clients that come and go."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import mse_loss

import fedsift
from fedsift import algorithms
from fedsift.federation.memories import InMemory
from fedsift.simulation import Options, prepare
from problems import ridge

SETTINGS = {"density": 0.05, "down_density": 0.2, "local_steps": 10, "lr": 0.004}


def loss(problem, w):
    pairs = [(mse_loss(x @ w[:, None], y), len(x)) for x, y in problem.clients]
    return float(sum(each * n for each, n in pairs) / sum(n for _, n in pairs))


def after_rounds(federation, snapshot, rounds):
    for _ in range(rounds):
        snapshot, _ = federation.run_round(snapshot)
    return snapshot


@pytest.mark.parametrize("seed", range(3))
def test_training_recovers_from_lost_residuals(seed):
    problem = ridge(seed, clients=8, d=60, dtype=torch.float32)
    federation = prepare(
        problem.model, problem.clients, None, algorithms.sift(**SETTINGS), Options(batch_size=None,
        participation=1.0, dropout=0.0, min_clients=0, wire="count", loss=mse_loss, seed=0,
        device="cpu"),
    )  # fmt: skip
    before = after_rounds(federation, federation.initial_snapshot(), 20)
    remembered = {n: kept for n, kept in before.client_memory.items() if n % 2}
    assert any(bool(kept["residual"].any()) for kept in remembered.values())
    forgetful = replace(before, client_memory=InMemory(remembered))  # the others begin with zeros
    whole, broken = (after_rounds(federation, each, 12) for each in (before, forgetful))
    assert not torch.equal(whole.state.w, broken.state.w)
    # Twelve rounds later, both have reduced the loss equally.
    start, without, with_loss = (loss(problem, x.state.w) for x in (before, whole, broken))
    assert without < start / 2
    assert with_loss < start / 2
    assert with_loss < without + 0.1 * start


def test_training_works_with_partial_participation_and_dropout():
    problem = ridge(0, clients=8, d=60, dtype=torch.float32)
    options = {"batch_size": None, "loss": mse_loss, "algorithm": algorithms.sift(**SETTINGS)}
    first = loss(problem, problem.w0)
    for whims in ({}, {"participation": 0.5}, {"dropout": 0.3}):
        result = fedsift.simulate(problem.model, problem.clients, rounds=60, **options, **whims)
        assert loss(problem, result.state.w) < first / 10, whims
