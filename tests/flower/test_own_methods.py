"""The methods of the guide on Flower: the bits of a simulation, in one process."""

import pytest
import torch
from inline import InlineGrid, InlineNode
from torch import nn

import fedsift
import guide
from fedsift.algorithms import METHODS, compressed
from fedsift.flower import FedSift, arrays_of, client_app, exchange

CLIENTS, ROUNDS, OPTIONS = 4, 3, {"batch_size": 8, "seed": 2, "participation": 0.6}
SMALL = {"local_steps": 2, "density": 0.2}


@pytest.fixture(autouse=True)
def methods(monkeypatch):
    monkeypatch.setattr(exchange, "POLL_SECONDS", 0.0)
    before = dict(METHODS)
    yield guide.methods()
    METHODS.clear()
    METHODS.update(before)


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def load_data(client, clients):
    x = torch.randn(8 + 6 * client, 6, generator=torch.Generator().manual_seed(client))
    return x, x[:, :3].argmax(1)


def on_flower(algorithm, path):
    app = client_app(make_model, load_data, algorithm, state_dir=path / "state")
    grid = InlineGrid(InlineNode(app, n, CLIENTS) for n in range(CLIENTS))
    strategy = FedSift(algorithm, CLIENTS, path / "run", wait=0.1, **OPTIONS)
    strategy.start(grid, arrays_of(make_model()), ROUNDS, 60.0)
    return strategy.run.snapshot.state


@pytest.mark.parametrize("name", [*guide.NAMES, "compressed fednova"])
def test_a_method_of_the_guide_gives_the_bits_of_a_simulation(name, methods, tmp_path):
    make = methods[name.removeprefix("compressed ")]
    known = METHODS[make().name].settings
    algorithm = make(**{k: v for k, v in SMALL.items() if k in known})
    if name not in methods:
        algorithm = compressed(algorithm, density=0.2)
    clients = [load_data(n, CLIENTS) for n in range(CLIENTS)]
    simulated = fedsift.simulate(
        make_model(), clients, algorithm=algorithm, rounds=ROUNDS, **OPTIONS
    )
    assert torch.equal(on_flower(algorithm, tmp_path).w, simulated.state.w)
    assert not torch.equal(simulated.state.w, simulated.layout.read(make_model()))
