"""Every method's step can be recorded as one CUDA graph: tried as far as a CPU allows.

The same with real graphs is in test_gpu.py.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn

import guide
from engine.graphs import count_graphs
from fedsift import algorithms
from fedsift.algorithms import METHODS, find, registry, settings_of
from fedsift.engine import Reference, Stacked
from fedsift.simulation import Options, prepare

SMALL = {"local_steps": 2, "density": 0.2, "warmup_rounds": 2, "sample_steps": 2, "lr": 0.01}
ROUNDS = 3


@pytest.fixture
def graphs(monkeypatch):
    return count_graphs(monkeypatch, is_pretended=True)


def federation(algorithm):
    """Clients with different numbers of samples, some with fewer than a batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    clients = [(torch.randn(n, 6).double(), torch.arange(n) % 3) for n in (5, 20, 9, 14, 30)]
    options = Options(batch_size=8, participation=0.6, seed=2, device="cpu")
    return prepare(model, clients, None, algorithm, options)


def trained(fed, engine):
    fed = replace(fed, engine=engine)
    snapshot = fed.initial_snapshot()
    for _ in range(ROUNDS):
        snapshot, _ = fed.run_round(snapshot)
    return snapshot


def assert_trains_like_the_reference(algorithm):
    fed = federation(algorithm)
    ours, theirs = trained(fed, Stacked(fed.task, fed.algorithm)), trained(fed, Reference(fed.task))
    for x, y in zip(ours.state, theirs.state, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-11)
    assert ours.traffic == theirs.traffic


@pytest.mark.parametrize("name", [*METHODS, "compressed-fedprox", "compressed-fedadam"])
def test_every_method_takes_one_graph_per_step(name, graphs):
    known = settings_of(name)
    assert_trains_like_the_reference(find(name)(**{k: v for k, v in SMALL.items() if k in known}))
    graphs.assert_one_per_step()


@pytest.mark.parametrize("name", guide.NAMES)
def test_a_method_of_the_guide_takes_one_graph_per_step(name, graphs, monkeypatch):
    monkeypatch.setattr(registry, "METHODS", dict(METHODS))
    make = guide.methods()[name]
    known = registry.METHODS[make().name].settings
    assert_trains_like_the_reference(make(**{k: v for k, v in SMALL.items() if k in known}))
    graphs.assert_one_per_step()


LOOKS = {
    "at a value": lambda w: w if w.max() > 0 else 2 * w,
    "at a number": lambda w: w * w.abs().max().item() ** 0,
    "at a mask": lambda w: w[w > 0].sum() * 0 + w,
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_a_step_that_looks_at_values_trains_without_a_graph(look, graphs):
    algorithm = algorithms.fedavg(local_steps=2, lr=0.01)

    def step(x, gradient, context):
        return x.replace(w=look(x.w - 0.01 * gradient))

    phase = replace(algorithm.phase(1), step=step)
    assert_trains_like_the_reference(replace(algorithm, phase=lambda round: phase))
    assert graphs.captured == graphs.replayed == 0 < graphs.steps
