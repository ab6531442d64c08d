"""Models as people write them: every engine computes what PyTorch computes."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.functional import cross_entropy

from fedsift import algorithms
from fedsift.engine import Forked, Reference, Stacked
from fedsift.engine.processes import forked
from fedsift.simulation import Options, prepare
from fedsift.vector import Layout

CLIENTS, SAMPLES, CLASSES = 3, 20, 4


class Viewing(nn.Module):
    """The CNN of many tutorials, which views what its convolution gives as rows."""

    def __init__(self):
        super().__init__()
        self.convolution, self.linear = nn.Conv2d(3, 6, 3), nn.Linear(54, CLASSES)

    def forward(self, x):
        pooled = functional.max_pool2d(functional.relu(self.convolution(x)), 2)
        return self.linear(pooled.view(-1, 54))


class ViewingASequence(nn.Module):
    """The same with a sequence, in which the batch could be innermost."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.MaxPool2d(2))
        self.linear = nn.Linear(54, CLASSES)

    def forward(self, x):
        return self.linear(self.features(x).view(len(x), -1))


class ViewingImages(nn.Module):
    """A linear layer on an image's pixels."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(192, CLASSES)

    def forward(self, x):
        return self.linear(x.view(len(x), -1))


class Tapping(nn.Module):
    """It uses what is between the layers of a sequence."""

    def __init__(self):
        super().__init__()
        layers = nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
        self.features, self.linear = nn.Sequential(*layers), nn.Linear(102, CLASSES)

    def forward(self, x):
        seen = []
        for layer in self.features:
            x = layer(x)
            seen.append(x)
        return self.linear(torch.cat([x.flatten(1), seen[0].mean((2, 3))], 1))


class Slicing(Tapping):
    """The same with a part of the sequence."""

    def forward(self, x):
        convolved = self.features[:1](x)
        pooled = self.features[1:](convolved)
        return self.linear(torch.cat([pooled.flatten(1), convolved.mean((2, 3))], 1))


class Scaled(nn.Module):
    """It has a parameter that is a single number."""

    def __init__(self):
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.tensor(2.0)), nn.Linear(192, CLASSES)

    def forward(self, x):
        return self.scale * self.linear(x.flatten(1))


class TwoOutputs(ViewingImages):
    """It gives two things, which its loss knows."""

    def forward(self, x):
        return super().forward(x.contiguous()), x.mean()


class SparseGradients(nn.Module):
    """Its embedding's gradient is a sparse tensor."""

    def __init__(self):
        super().__init__()
        self.embedding, self.linear = nn.Embedding(9, 5, sparse=True), nn.Linear(5, CLASSES)

    def forward(self, x):
        return self.linear(self.embedding((x.flatten(1)[:, 0] > 0).long()))


MODELS = (
    Viewing, ViewingASequence, ViewingImages, Tapping, Slicing, Scaled, TwoOutputs, SparseGradients,
)  # fmt: skip


def loss_of(output, labels):
    return cross_entropy(output[0] if isinstance(output, tuple) else output, labels)


def made(model, data, loss=cross_entropy):
    return prepare(
        model, data, data[0], algorithms.fedadam(local_steps=2), Options(batch_size=None,
        participation=1.0, dropout=0.0, min_clients=0, wire="count", loss=loss, seed=0,
        device="cpu"),
    )  # fmt: skip


@pytest.fixture(params=MODELS, ids=lambda model: model.__name__)
def federation(request):
    torch.manual_seed(0)
    data = [
        (torch.randn(SAMPLES, 3, 8, 8), torch.randint(0, CLASSES, (SAMPLES,)))
        for _ in range(CLIENTS)
    ]
    return made(request.param(), data, loss_of)


def after_two_rounds(federation, engine):
    federation, snapshot = replace(federation, engine=engine), federation.initial_snapshot()
    for _ in range(2):
        snapshot, _ = federation.run_round(snapshot)
    return snapshot.state.w


def test_the_loss_is_pytorchs(federation):
    task = federation.task
    _, loss = Reference(task).evaluate(Layout.of(task.model).read(task.model))
    data, labels = task.test
    assert loss == pytest.approx(loss_of(task.model(data), labels).item(), rel=1e-5)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # sparse tensors in vmap
def test_every_engine_trains_the_same(federation, monkeypatch):
    monkeypatch.setattr(forked, "MIN_PARALLEL_SECONDS", -1.0)
    task, method = federation.task, federation.algorithm
    expected = after_two_rounds(federation, Reference(task))
    assert torch.equal(after_two_rounds(federation, Forked(task, method, 2)), expected)
    stacked = after_two_rounds(federation, Stacked(task, method))
    torch.testing.assert_close(stacked, expected, rtol=1e-4, atol=1e-6)
    assert not torch.equal(expected, federation.initial_snapshot().state.w)


def test_a_gpu_requires_samples_of_one_shape():
    data = [(torch.randn(5, length, 3), torch.zeros(5, 2, dtype=torch.int64)) for length in (2, 4)]
    model = nn.Sequential(nn.Linear(3, 2))
    federation = made(model, data)
    with pytest.raises(ValueError, match="must have the same shape"):
        Stacked(federation.task, federation.algorithm)


class RandomInTests(ViewingImages):
    """It drops out even when it is tested."""

    def forward(self, x):
        return super().forward(functional.dropout(x.contiguous()))


@pytest.mark.parametrize("engine", [Reference, lambda task: Stacked(task, algorithms.fedadam())])
def test_the_evaluation_of_a_random_model_is_reproducible(engine):
    data = [(torch.randn(SAMPLES, 3, 8, 8), torch.randint(0, CLASSES, (SAMPLES,)))]
    task = made(RandomInTests(), data).task
    w = task.layout.read(task.model)
    before = torch.random.get_rng_state()
    assert engine(task).evaluate(w) == engine(task).evaluate(w)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("engine", [Reference, lambda task: Stacked(task, algorithms.fedadam())])
def test_the_classes_of_cross_entropy_are_on_the_second_axis(engine):
    torch.manual_seed(0)
    x = torch.randn(SAMPLES, CLASSES, CLASSES)
    labels = torch.zeros(SAMPLES, CLASSES, dtype=torch.int64)
    task = made(nn.Conv1d(CLASSES, CLASSES, 1), [(x, labels)]).task
    accuracy, _ = engine(task).evaluate(task.layout.read(task.model))
    found = task.model(x).argmax(1)
    assert accuracy == pytest.approx((found == 0).float().mean().item())


def test_weights_are_not_written_into_another_model():
    layout = Layout.of(nn.Linear(1, 2))
    with pytest.raises(ValueError, match="names or shapes differ from those of the trained model"):
        layout.write(torch.zeros(layout.d), nn.Linear(3, 2))
