"""FedAvg, FedProx, SCAFFOLD, FedOpt, SparseLoCo: against their oracles on every engine."""

import importlib
import math
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
import torch
from torch.nn.functional import mse_loss

import fedsift
from fedsift import algorithms
from fedsift.codec.update import dense
from fedsift.engine import Forked, Reference, Stacked
from fedsift.engine.processes import forked
from fedsift.simulation import Options, prepare
from fedsift.task import Epochs
from oracles.fedavg import fedavg
from oracles.fedopt import fedopt
from oracles.fedprox import fedprox
from oracles.scaffold import scaffold
from oracles.sparseloco import sparseloco
from problems import gradient_of, ridge

CLIENTS, ROUNDS, BATCH, EPOCHS = 5, 10, 4, 2
PARTIAL = {"participation": 0.6, "seed": 2}
SERVER = {"server_lr": 0.1, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3}

LOCO = {"density": 0.5, "decay": 0.9, "outer_lr": 0.8, "beta1": 0.9, "beta2": 0.99, "eps": 1e-6}


@dataclass(frozen=True)
class Case:
    """A method, its oracle, the settings of both, and the mini-batches; None takes all samples."""

    name: str
    oracle: object
    settings: dict
    batch_size: int | None = None
    epochs: int | None = None
    local_steps: int = 4

    def algorithm(self):
        steps = {"epochs": self.epochs} if self.epochs else {"local_steps": self.local_steps}
        return algorithms.find(self.name)(**steps, lr=0.01, **self.settings)


CASES = {
    "fedavg": Case("fedavg", fedavg, {}),
    "fedavg, momentum": Case("fedavg", fedavg, {"momentum": 0.8}),
    "fedavg, epochs": Case("fedavg", fedavg, {"momentum": 0.5}, BATCH, EPOCHS),
    "fedprox": Case("fedprox", fedprox, {"mu": 0.7}),
    "scaffold": Case("scaffold", scaffold, {"server_lr": 0.8}),
    "sparseloco": Case("sparseloco", sparseloco, LOCO),
    **{f"fedopt, {s}": Case("fedopt", fedopt, {"server": s, **SERVER}) for s in (
        "adam", "yogi", "adagrad")},
}  # fmt: skip


def federation(case, problem):
    algorithm = case.algorithm()
    options = Options(
        batch_size=case.batch_size, dropout=0.0, min_clients=0, wire="count", loss=mse_loss,
        device="cpu", max_norm_ratio=None, **PARTIAL,
    )  # fmt: skip
    return prepare(problem.model, problem.clients, None, algorithm, options)


def trained(fed):
    snapshot = fed.initial_snapshot()
    for _ in range(ROUNDS):
        snapshot, _ = fed.run_round(snapshot)
    return snapshot


def batches(fed, case, client, cohorts):
    """Every mini-batch of a client, in the order of its steps."""
    x, y = (part.numpy() for part in fed.task.clients[client])
    steps = Epochs(case.epochs) if case.epochs else case.local_steps
    for t, cohort in enumerate(cohorts, 1):
        if client in cohort:
            rows = fed.task.batches(t, client, steps)
            whole = [slice(None)] * fed.task.num_steps(client, steps)
            yield from ((x[each], y[each, 0]) for each in (whole if rows is None else rows))


def expected(fed, case, problem):
    """What the oracle returns for the same cohorts and mini-batches."""
    cohorts = [fed.cohort(t) for t in range(1, ROUNDS + 1)]
    calls = [batches(fed, case, n, cohorts) for n in range(CLIENTS)]
    gradients = [lambda w, calls=calls[n]: gradient_of(*next(calls))(w) for n in range(CLIENTS)]
    steps = Epochs(case.epochs) if case.epochs else case.local_steps
    equal = fed.algorithm.weights == "equal"
    return case.oracle(
        gradients, [1.0] * CLIENTS if equal else problem.sizes, problem.w0.numpy(), cohorts,
        local_steps=[fed.task.num_steps(n, steps) for n in range(CLIENTS)], lr=0.01,
        **case.settings,
    )  # fmt: skip


def assert_close(ours, theirs):
    np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("engine", [Reference, Forked, Stacked])
@pytest.mark.parametrize("name", CASES)
def test_ten_rounds_agree_to_ten_digits_on_every_engine(name, engine, monkeypatch):
    monkeypatch.setattr(forked, "MIN_PARALLEL_SECONDS", -1.0)
    case, problem = CASES[name], ridge(0, clients=CLIENTS)
    fed = federation(case, problem)
    found = expected(fed, case, problem)
    extra = {Reference: (), Forked: (fed.algorithm, 2), Stacked: (fed.algorithm,)}[engine]
    end = trained(replace(fed, engine=engine(fed.task, *extra)))
    if case.oracle is scaffold:
        W, c, cs = found
        assert_close(end.state.w, W)
        assert_close(end.state.c, c)
        for client, memory in end.client_memory.items():
            assert_close(memory["c"][0], cs[client])
    elif case.oracle is fedopt:
        assert_close(end.state.w, found.W)
        assert_close(end.server_memory["m"][0], found.m)
        assert_close(end.server_memory["v"][0], found.v)
    else:
        assert_close(end.state.w, found)


def test_sparseloco_agrees_when_there_are_several_chunks_and_blocks(monkeypatch):
    """Twelve coordinates are less than a chunk: here chunks and blocks are shorter than that."""
    module = importlib.import_module("fedsift.algorithms.sparseloco")
    sizes = {"chunk": 8, "block": 4}
    for name, size in sizes.items():
        monkeypatch.setattr(module, name.upper(), size)
    problem = ridge(0, clients=CLIENTS)
    fed = federation(CASES["sparseloco"], problem)
    several = replace(CASES["sparseloco"], oracle=partial(sparseloco, **sizes))
    assert_close(trained(fed).state.w, expected(fed, several, problem))


def simulated(algorithm, dtype=torch.float32, **options):
    problem = ridge(1, clients=CLIENTS, dtype=dtype)
    options = {"rounds": 6, "batch_size": BATCH, "loss": mse_loss, **PARTIAL, **options}
    return fedsift.simulate(problem.model, problem.clients, algorithm=algorithm, **options)


def test_fedprox_without_its_term_is_fedavg_bit_for_bit():
    ours = simulated(algorithms.fedprox(mu=0.0, local_steps=4, lr=0.01))
    theirs = simulated(algorithms.fedavg(local_steps=4, lr=0.01))
    assert torch.equal(ours.state.w, theirs.state.w)


def test_scaffold_with_zero_variates_is_fedavg_bit_for_bit():
    algorithm = algorithms.scaffold(local_steps=4, lr=0.01)
    phase = algorithm.phase(1)

    def send(context, update, memory):
        zero = torch.zeros_like(update.delta_w)
        return dense({"w": update.delta_w, "c": zero}), {"c": zero}

    ours = simulated(replace(algorithm, phase=lambda t: replace(phase, send=send)))
    theirs = simulated(algorithms.fedavg(local_steps=4, lr=0.01), weights="equal")
    assert torch.equal(ours.state.w, theirs.state.w)
    with_variates = simulated(algorithm)
    assert not torch.equal(with_variates.state.w, theirs.state.w)


def test_fedavg_of_equal_weights_and_fedsgd_differ_in_their_weights_only():
    ours = simulated(algorithms.fedavg(local_steps=4, lr=0.01), weights="batch")
    theirs = simulated(algorithms.fedsgd(local_steps=4, lr=0.01))
    assert torch.equal(ours.state.w, theirs.state.w)


def test_fedopts_adam_with_a_large_tau_is_a_scaled_fedavg():
    """v stays at tau^2, so a step is server_lr / (2 tau) times the mean change."""
    tau, beta2 = 1e5, math.nextafter(1.0, 0.0)
    settings = {"local_steps": 4, "lr": 0.01}
    scaled = algorithms.fedopt("adam", 2 * tau, beta1=0.0, beta2=beta2, tau=tau, **settings)
    ours, theirs = (simulated(m, torch.float64) for m in (scaled, algorithms.fedavg(**settings)))
    torch.testing.assert_close(ours.state.w, theirs.state.w, rtol=1e-8, atol=1e-8)


def test_both_of_scaffolds_variates_are_counted():
    methods = (algorithms.fedavg(local_steps=1), algorithms.scaffold(local_steps=1))
    one, two = (simulated(method, rounds=4).history[-1] for method in methods)
    assert two["uplink_bits_paper"] == 2 * one["uplink_bits_paper"]
    d, header = 12, 4
    messages = {"uplink_bytes": 4 * PARTIAL["participation"], "downlink_bytes": 4}
    for key, number in messages.items():
        assert 4 * d <= (two[key] - one[key]) / number <= 4 * d + header


def test_momentum_lasts_for_a_round():
    result = simulated(algorithms.fedavg(local_steps=2, lr=0.01, momentum=0.9))
    assert result.state.names == ("w",)


@pytest.mark.parametrize("value", [0, 1.5])
def test_a_number_of_epochs_is_checked(value):
    with pytest.raises(ValueError, match="epochs must be a whole number of at least 1"):
        algorithms.fedavg(epochs=value)


def test_epochs_and_local_steps_exclude_each_other():
    with pytest.raises(ValueError, match=r"^fedavg takes local_steps or epochs, not both$"):
        algorithms.fedavg(local_steps=5, epochs=2)
    thirty = algorithms.fedavg(local_steps=30).phase(1)
    assert algorithms.fedavg().phase(1).local_steps == thirty.local_steps
