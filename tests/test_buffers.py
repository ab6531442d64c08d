"""Buffers that training changes: averaged, kept by each client, or frozen; equal on all engines."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

import fedsift
from fedsift import algorithms, simulate
from fedsift.algorithms import METHODS, settings_of
from fedsift.algorithms.buffers import OWN
from fedsift.algorithms.method import Context
from fedsift.cli import main
from fedsift.codec.frame import Spec, decode, encode
from fedsift.codec.limits import Limits
from fedsift.codec.update import Update, dense
from fedsift.engine import Forked, Reference, Stacked
from fedsift.federation.round import apply_broadcast
from fedsift.simulation import Options, initial_snapshot, prepare, run_rounds
from fedsift.task import check_task
from fedsift.vector import Layout

CLASSES = 3
NORMAL = ("1.", "6.")
"""The normalization layers of the convolutional model."""
SGD = algorithms.fedsgd(local_steps=2, lr=0.1)


def convolutional() -> nn.Module:
    """It has both kinds of batch normalization."""
    torch.manual_seed(1)
    features = nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)
    head = nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES)
    return nn.Sequential(*features, *head)


def dense_layers() -> nn.Module:
    """PyTorch can batch its operations over the clients."""
    torch.manual_seed(1)
    layers = nn.Linear(72, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, CLASSES)
    return nn.Sequential(nn.Flatten(), *layers)


class MovingAverage(nn.Module):
    """Its buffers are replaced, and not overwritten; one of them is an integer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(72, CLASSES)
        self.register_buffer("mean", torch.zeros(72))
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("constant", torch.ones(72))

    def forward(self, x):
        x = x.flatten(1)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            self.seen = self.seen + 1
        return self.linear(x * self.constant - self.mean)


def spectral() -> nn.Module:
    """Its buffers have converged, so that a single pass does not change their values."""
    torch.manual_seed(1)
    linear = nn.utils.parametrizations.spectral_norm(nn.Linear(72, CLASSES))
    return nn.Sequential(nn.Flatten(), linear)


MODELS = {f.__name__: f for f in (convolutional, dense_layers, MovingAverage, spectral)}


def data(client: int, scale: float = 1.0, samples: int = 20) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(client)
    x = scale * torch.randn(samples, 2, 6, 6, generator=draw) + client
    return x, torch.randint(CLASSES, (samples,), generator=draw)


CLIENTS = [data(0), data(1, scale=3.0), data(2, samples=12)]


def federation(model, algorithm=SGD, clients=CLIENTS, batch_size=8, **options):
    chosen = Options(batch_size, 1.0, 0.0, 0, "count", functional.cross_entropy, 0, "cpu")
    return prepare(model, clients, data(9), algorithm, replace(chosen, **options))


def plain_training(model, x, y, steps):
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("momentum", [0.1, None])
def test_averaging_over_one_client_is_plain_training(momentum):
    model, expected = convolutional(), convolutional()
    for layer in (model[1], model[6], expected[1], expected[6]):
        layer.momentum = momentum
    x, y = data(0)
    result = simulate(model, [(x, y)], (x, y), SGD, rounds=3, batch_size=None)
    plain_training(expected, x, y, 6)
    trained = convolutional()
    result.load_into(trained)
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(trained.state_dict()[name], value, rtol=1e-4, atol=1e-6)
    accuracy = (expected.eval()(x).argmax(1) == y).float().mean()
    assert result.history[-1]["accuracy"] == pytest.approx(float(accuracy))


@pytest.mark.parametrize("buffers", ["average", "local"])
@pytest.mark.parametrize("name", MODELS)
def test_engines_agree(name, buffers):
    made = federation(MODELS[name](), algorithms.fedadam(local_steps=3), buffers=buffers)
    ends = []
    task, algorithm = made.task, made.algorithm
    for engine in (Reference(task), Forked(task, algorithm, 1), Stacked(task, algorithm)):
        each = replace(made, engine=engine)
        *_, (last, record) = run_rounds(each, initial_snapshot(each), 2)
        own = [last.client_memory[n][OWN] for n in last.client_memory if last.client_memory[n]]
        ends.append([*last.state, each.model_weights(last), *own])
        assert record["accuracy"] is not None
    for theirs, exact in zip(ends[1:], (True, False), strict=True):
        for x, y in zip(ends[0], theirs, strict=True):
            torch.testing.assert_close(x, y, **({"rtol": 0, "atol": 0} if exact else {}))


@pytest.mark.parametrize("name", ["convolutional", "dense_layers"])
def test_frozen_statistics_stay_as_they_are(name):
    model = MODELS[name]()
    plain_training(model, *data(5), 3)
    made = federation(model, buffers="frozen")
    assert made.task.layout == Layout.of(model)
    ends = []
    for engine in (Reference(made.task), Stacked(made.task, made.algorithm)):
        each = replace(made, engine=engine)
        *_, (last, record) = run_rounds(each, initial_snapshot(each), 2)
        ends.append((last.state.w, record["loss"]))
        assert all(
            torch.equal(x, y)
            for x, y in zip(made.task.model.buffers(), model.buffers(), strict=True)
        )
    torch.testing.assert_close(ends[0][0], ends[1][0])
    assert ends[0][1] == pytest.approx(ends[1][1], rel=1e-5)


def test_local_is_fedbn():
    """Two clients with different scales, trained with plain PyTorch as FedBN's Algorithm 1 says."""
    clients, rounds = [data(0), data(1, scale=10.0)], 3
    result = simulate(
        convolutional(), clients, data(9), SGD, rounds, batch_size=None, buffers="local"
    )
    models = [convolutional() for _ in clients]
    for _ in range(rounds):
        for model, (x, y) in zip(models, clients, strict=True):
            plain_training(model, x, y, 2)
        states = [model.state_dict() for model in models]
        shared = {k: (states[0][k] + states[1][k]) / 2 for k in states[0] if k[:2] not in NORMAL}
        for model in models:
            model.load_state_dict(shared, strict=False)
    fed = federation(convolutional(), clients=clients, batch_size=None, buffers="local")
    for n, model in enumerate(models):
        ours = convolutional()
        result.load_into(ours, client=n)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-3, atol=1e-5)
    variances = [model[1].running_var for model in models]
    assert bool((variances[1] > 10 * variances[0]).all())
    both = torch.stack([fed.client_weights(result.snapshot, n) for n in range(2)])
    torch.testing.assert_close(result.weights, both.mean(0))
    untouched = convolutional()
    result.layout.write(torch.cat([result.state.w, result.state.b]), untouched)
    for name, value in convolutional().state_dict().items():
        assert torch.equal(untouched.state_dict()[name], value) == (name[:2] in NORMAL)


def test_the_bytes_are_those_of_the_statistics():
    made = federation(convolutional(), algorithms.sift(local_steps=2), wire="real")
    frames = []
    made = replace(
        made, on_upload=lambda specs, update, sizes: frames.append((specs, update, sizes))
    )
    after, _ = made.run_round(made.initial_snapshot())
    n = made.task.layout.buffers.d
    assert n == 2 * (4 + 8) + 2
    for (spec,), update, (size,) in frames:
        without = Update(tuple(p for p in update.parts if "b" not in p.values), update.weights)
        assert size == len(encode(update, spec)) == len(encode(without, spec)) + 4 * n + 3
    local = federation(convolutional(), algorithms.sift(local_steps=2), buffers="local")
    kept, _ = local.run_round(local.initial_snapshot())
    assert after.traffic.uplink_bytes > kept.traffic.uplink_bytes + 4 * n


@pytest.mark.parametrize("buffers", ["average", "local"])
@pytest.mark.parametrize("name", METHODS)
def test_no_method_has_to_know_of_buffers(name, buffers):
    few = {"local_steps": 2, "density": 0.2, "warmup_rounds": 1}
    algorithm = METHODS[name](**{k: v for k, v in few.items() if k in settings_of(name)})
    counted, real = (
        simulate(dense_layers(), CLIENTS, data(9), algorithm, 2, batch_size=8, buffers=buffers,
                 participation=0.7, wire=wire)
        for wire in ("count", "real")
    )  # fmt: skip
    assert all(torch.equal(x, y) for x, y in zip(counted.state, real.state, strict=True))
    assert not torch.equal(
        real.layout.split(real.weights)[1], real.layout.read_buffers(dense_layers())
    )


def test_a_negative_variance_is_clamped_and_an_absurd_one_refused():
    made = federation(convolutional())
    layout, state = made.task.layout, made.initial_snapshot().state
    parts = dense({"b": torch.full((1, layout.buffers.d), -5.0)})
    context = Context.of(made.task, 1, state)
    after, _ = apply_broadcast(made.algorithm, context, state, parts)
    layers = layout.buffers.layers
    assert bool((after.b[layers["1.running_var"]] == 0).all())
    assert bool((after.b[layers["1.running_mean"]] == -5).all())
    spec = Spec(layout)
    absurd = Update(dense({"b": torch.full((1, layout.buffers.d), 1e13)}), (1.0,))
    with pytest.raises(fedsift.codec.FrameError, match="a value"):
        decode(encode(absurd, spec), layout, Limits())
    with pytest.raises(fedsift.codec.FrameError, match="wrong length of b"):
        decode(encode(Update(parts, (1.0,)), spec), layout.without_buffers())


def test_only_buffers_that_training_changes_are_trained():
    made = federation(MovingAverage())
    assert made.task.layout.buffers.names == ("mean", "seen")
    assert check_task(federation(nn.Sequential(nn.Flatten(), nn.Linear(72, 3))).task) == ()


def test_what_cannot_be_trained_is_refused_in_one_line():
    with pytest.raises(ValueError, match="the buffer 'mean', which is not one of a normalization"):
        federation(MovingAverage(), buffers="frozen")
    with pytest.raises(ValueError, match="unknown buffers 'mean'; choose one of: average, local"):
        federation(dense_layers(), buffers="mean")
    with pytest.raises(ValueError, match=r"client 1, .*: Expected more than 1 value per channel"):
        federation(dense_layers(), clients=[data(0), data(1, samples=1)])
    with pytest.raises(ValueError, match="'running_mean' of a lazy layer has no shape yet"):
        federation(nn.LazyBatchNorm1d(affine=False))


def test_poisoned_statistics_are_rejected():
    made = federation(convolutional(), clients=[data(n) for n in range(5)])
    train = made.engine.train

    def with_a_hostile_client(job):
        for result in train(job):
            if result.client == 3:
                b = torch.full((1, made.task.layout.buffers.d), 1e9)
                parts = (*result.update.parts[:1], *dense({"b": b}))
                yield replace(result, update=Update(parts, result.update.weights))
            else:
                yield result

    made.engine.train = with_a_hostile_client
    after, report = made.run_round(made.initial_snapshot())
    assert report.rejected == 1
    assert "its update of B is" in report.problems["3"]
    assert float(after.state.b.abs().max()) < 10


@pytest.mark.parametrize("buffers", ["average", "local"])
def test_a_resumed_run_ends_with_the_same_bits(buffers, tmp_path, monkeypatch):
    (tmp_path / "normalized_models.py").write_text(
        "from torch import nn\n\n"
        "def small():\n"
        "    layers = nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10)\n"
        "    return nn.Sequential(nn.Flatten(), *layers)\n"
    )
    monkeypatch.chdir(tmp_path)
    words = ["run", "--model", "normalized_models:small", "--buffers", buffers, "--clients", "4"]
    words += ["--participation", "0.5", "--local-steps", "2", "--density", "0.1"]
    assert main([*words, "--rounds", "4", "--out", "whole"]) == 0
    assert main([*words, "--rounds", "2", "--out", "half"]) == 0
    config = tmp_path / "half" / "config.toml"
    config.write_text(config.read_text().replace("rounds = 2", "rounds = 4"))
    assert main(["resume", "half"]) == 0
    for name in ("checkpoint.safetensors", "model.safetensors"):
        whole, half = (load_file(tmp_path / folder / name) for folder in ("whole", "half"))
        assert whole.keys() == half.keys()
        assert all(torch.equal(whole[key], half[key]) for key in whole)
    assert buffers == "local" or whole["2.num_batches_tracked"] == 8
