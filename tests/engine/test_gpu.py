"""The GPU engine on a GPU, with its graphs, trains what the reference engine trains there.

In float64, so that a difference is a mistake and not rounding; ResNet-18 in float32.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

import fedsift
import guide
from engine.graphs import count_graphs
from fedsift import algorithms, models, schedules
from fedsift.algorithms import METHODS, find, registry, settings_of
from fedsift.algorithms.buffers import BUFFERS
from fedsift.engine import Reference, Stacked
from fedsift.engine.gpu import graph
from fedsift.simulation import Options, prepare

DEVICE = "cuda"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SMALL = {"local_steps": 2, "density": 0.2, "warmup_rounds": 2, "sample_steps": 2, "lr": 0.01}
SIZES = 5, 20, 9, 14, 30


def perceptron():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def normalized():
    torch.manual_seed(0)
    layers = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)
    return nn.Sequential(*layers).double()


def samples():
    draw = torch.Generator().manual_seed(0)
    return [
        (torch.randn(n, 6, generator=draw, dtype=torch.float64), torch.arange(n) % 3) for n in SIZES
    ]


def federation(method, make=perceptron, clients=None, **options):
    options = {"batch_size": 8, "participation": 0.6, "seed": 2, "device": DEVICE, **options}
    clients = clients or samples()
    return prepare(make(), clients, clients[0], method, Options(**options))


def small(name, **settings):
    known = settings_of(name)
    return find(name)(**{k: v for k, v in SMALL.items() if k in known}, **settings)


def trained(fed, engine, rounds=3):
    fed = replace(fed, engine=engine)
    snapshot = fed.initial_snapshot()
    for _ in range(rounds):
        snapshot, _ = fed.run_round(snapshot)
    return snapshot


def vectors(snapshot):
    """Everything a method keeps between rounds, by name."""
    clients = {f"{n} {k}": x for n, m in snapshot.client_memory.items() for k, x in m.items()}
    return dict(snapshot.state.items()) | dict(snapshot.server_memory) | clients


def assert_close(fed, rtol=1e-9, atol=1e-11):
    """The stack's vectors, and its bytes, are those of one client after another."""
    ours = trained(fed, Stacked(fed.task, fed.algorithm))
    theirs = trained(fed, Reference(fed.task))
    found, expected = vectors(ours), vectors(theirs)
    assert found.keys() == expected.keys()
    for name, x in found.items():
        torch.testing.assert_close(x, expected[name], rtol=rtol, atol=atol, msg=name)
    assert ours.traffic == theirs.traffic
    assert found["w"].is_cuda
    assert not torch.equal(found["w"], fed.initial_snapshot().state.w)


@pytest.fixture
def graphs(monkeypatch):
    return count_graphs(monkeypatch)


@pytest.mark.parametrize("name", [*METHODS, "compressed-fedprox", "compressed-fedadam"])
def test_every_method_trains_like_the_reference(name, graphs):
    assert_close(federation(small(name)))
    graphs.assert_one_per_step()


@pytest.mark.parametrize("name", guide.NAMES)
def test_a_method_of_the_guide_trains_like_the_reference(name, graphs, monkeypatch):
    monkeypatch.setattr(registry, "METHODS", dict(METHODS))
    make = guide.methods()[name]
    known = registry.METHODS[make().name].settings
    assert_close(federation(make(**{k: v for k, v in SMALL.items() if k in known})))
    graphs.assert_one_per_step()


@pytest.mark.parametrize("buffers", BUFFERS)
def test_statistics_of_a_small_model(buffers):
    assert_close(federation(small("fedadam"), normalized, buffers=buffers))


def noisy(x):
    return x + 0.1 * torch.randn_like(x)


def test_batches_that_are_transformed():
    assert_close(federation(small("fedavg"), transform=noisy))


class Noisy(Dataset):
    """Random items, made on the CPU."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, row):
        return self.x[row] + 0.1 * torch.randn(6), int(self.y[row])


@pytest.mark.parametrize("workers", [0, 2])
def test_clients_that_are_datasets(workers):
    clients = [Noisy(x, y) for x, y in samples()]
    assert_close(federation(small("fedavg"), clients=clients, num_workers=workers))


class Named(nn.Linear):
    """Its inputs have names."""

    def forward(self, left, right):
        return super().forward(torch.cat([left, right], 1))


def test_own_data_and_measurements(tmp_path):
    """Dicts of NumPy arrays, metrics, tests of clients, and a folder that is continued."""

    def simulated(device, rounds=4, **given):
        torch.manual_seed(0)
        return fedsift.simulate(
            Named(6, 3).double(), clients, clients[0], small("fedavg"), rounds, batch_size=8,
            device=device, metrics={"error": nn.functional.cross_entropy}, client_tests=clients,
            evaluate=lambda model: {"norm": model.weight.norm()}, evaluate_every=2, **given,
        )  # fmt: skip

    arrays = [(x.numpy(), y.numpy()) for x, y in samples()]
    clients = [({"left": x[:, :2], "right": x[:, 2:]}, y) for x, y in arrays]
    ours, theirs = simulated(DEVICE, out=tmp_path / "run"), simulated("cpu")
    assert ours.weights.device.type == DEVICE
    for found, expected in zip(ours.history, theirs.history, strict=True):
        assert found.keys() == expected.keys()
        for name in {"error", "norm", "client_accuracy_worst"} & found.keys():
            assert found[name] == pytest.approx(expected[name], rel=1e-9)
    assert simulated(DEVICE, out=tmp_path / "run").history == ours.history
    half = simulated(DEVICE, on_round=lambda record, model: record["round"] == 2)
    assert torch.equal(simulated(DEVICE, start=half).weights, ours.weights)


def test_clients_that_take_different_numbers_of_steps():
    assert_close(federation(algorithms.fedavg(epochs=1, lr=0.01, momentum=0.5)))


def assert_near(fed, tolerance, rounds=1):
    """In float32 the stack has the reference's changes up to this relative error."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):  # of the reference
        ours, theirs = (
            vectors(trained(fed, engine, rounds))
            for engine in (Stacked(fed.task, fed.algorithm), Reference(fed.task))
        )
    start = dict(fed.initial_snapshot().state.items())
    for name, x in theirs.items():
        change = x - start.get(name, torch.zeros_like(x))
        assert (ours[name] - x).norm() <= tolerance * change.norm(), name
    return ours


@pytest.mark.parametrize(
    "name", ["fedadam", "fedavg", "fedprox", "scaffold", "fedopt", "decomfl", "e3sfc"]
)
def test_methods_in_float32(name, graphs):
    """Here the layers' kernels run, which know float32 only. None of these methods has a mask."""
    clients = [(x.float(), y) for x, y in samples()]
    assert_near(federation(small(name), lambda: perceptron().float(), clients), 1e-2, 3)
    graphs.assert_one_per_step()


@pytest.mark.parametrize("buffers", BUFFERS)
def test_resnet18_with_batch_normalization(buffers):
    """A small learning rate: its gradients are large, and double a rounding error in each step."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(3, 16, 3, 32, 32, generator=draw)
    clients = [(each, torch.arange(16) % 10) for each in x]
    fed = federation(
        algorithms.fedsgd(local_steps=2, lr=1e-4), models.resnet.resnet18_bn, clients,
        buffers=buffers, participation=1.0,
    )  # fmt: skip
    names = assert_near(fed, 0.05).keys()
    assert any("own" in name for name in names) == (buffers == "local")


@pytest.mark.parametrize("name", ["fedadam-ssm", "fedavg", "decomfl"])
def test_a_new_learning_rate_captures_no_new_graph(name, monkeypatch):
    captured, capture = [], graph.capture
    monkeypatch.setattr(graph, "capture", lambda take: captured.append(take) or capture(take))
    settings = {k: v for k, v in SMALL.items() if k in settings_of(name)}
    method = find(name)(**settings | {"lr": schedules.cosine(0.05, 0.001, rounds=4)})
    fed = federation(method, participation=1.0, clients=[samples()[-1]] * 3)
    fed = replace(fed, engine=Stacked(fed.task, fed.algorithm))
    snapshot, counts = fed.initial_snapshot(), []
    for _ in range(4):
        snapshot, _ = fed.run_round(snapshot)
        counts.append(len(captured))
    assert counts == counts[:1] * 4
    assert all(step.graph is not None for step in fed.engine.steps.values())
    expected = trained(fed, Reference(fed.task), 4).state.w
    torch.testing.assert_close(snapshot.state.w, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ["fedadam-ssm", "sift", "scaffold", "decomfl"])
def test_two_halves_have_the_bits_of_the_whole(name):
    def simulated(rounds, start=None):
        torch.manual_seed(0)
        return fedsift.simulate(
            models.convnets.small_cnn(), clients, algorithm=small(name), rounds=rounds,
            batch_size=8, device=DEVICE, start=start, participation=0.6, loss=cross_entropy,
        )  # fmt: skip

    draw = torch.Generator().manual_seed(0)
    x = torch.randn(5, 20, 1, 8, 8, generator=draw)
    clients = [(each, torch.arange(20) % 10) for each in x]
    whole, halves = simulated(4), simulated(4, start=simulated(2))
    assert all(torch.equal(a, b) for a, b in zip(whole.state, halves.state, strict=True))
