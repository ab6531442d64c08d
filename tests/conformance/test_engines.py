"""Every registered method on every engine of a CPU, with equal bits.

The same methods run on Flower with a simulation's bits in tests/flower/test_strategy.py, under
torchrun in tests/engine/test_torchrun.py, as stacks in tests/engine/test_engine.py, and on a GPU in
tests/engine/test_gpu.py.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn

from fedsift.algorithms import METHODS, find, settings_of
from fedsift.engine import Forked, Reference
from fedsift.engine.processes import forked
from fedsift.simulation import Options, prepare

ROUNDS = 3
SMALL = {"local_steps": 2, "density": 0.2, "warmup_rounds": 2, "sample_steps": 2, "lr": 0.01}


def federation(name):
    """Clients with different numbers of samples, of which some take part in each round."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    clients = [(torch.randn(n, 6), torch.arange(n) % 3) for n in (5, 20, 9, 14, 30)]
    algorithm = find(name)(**{k: v for k, v in SMALL.items() if k in settings_of(name)})
    options = Options(batch_size=8, participation=0.6, seed=2, device="cpu")
    return prepare(model, clients, None, algorithm, options)


def trained(fed, engine):
    fed = replace(fed, engine=engine)
    snapshot, reports = fed.initial_snapshot(), []
    for _ in range(ROUNDS):
        snapshot, report = fed.run_round(snapshot)
        reports.append(report)
    return snapshot, reports, fed.model_weights(snapshot)


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(x, theirs[name]) for name, x in ours.items())


@pytest.mark.parametrize("name", [*METHODS, "compressed-fedprox", "compressed-fedadam"])
def test_processes_give_the_bits_of_the_reference(name, monkeypatch):
    monkeypatch.setattr(forked, "MIN_PARALLEL_SECONDS", -1.0)
    fed = federation(name)
    ours, reports, weights = trained(fed, Forked(fed.task, fed.algorithm, 2))
    theirs, expected, wanted = trained(fed, Reference(fed.task))
    assert reports == expected
    assert [report.clients for report in reports] == [3] * ROUNDS
    assert ours.traffic == theirs.traffic
    assert torch.equal(weights, wanted)
    assert_same(dict(ours.state.items()), dict(theirs.state.items()))
    assert_same(ours.server_memory, theirs.server_memory)
    assert set(ours.client_memory) == set(theirs.client_memory)
    for client in ours.client_memory:
        assert_same(ours.client_memory[client], theirs.client_memory[client])
    assert not torch.equal(weights, fed.task.layout.read(fed.task.model))
