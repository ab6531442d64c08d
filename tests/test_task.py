"""Batches are sampled without replacement, and unusable models and data are refused in one line."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from fedsift import simulate
from fedsift.algorithms import fedadam_ssm
from fedsift.task import Task, check_model, check_task
from fedsift.vector import Layout


def data(size=6, features=3, classes=2):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(size, features, generator=draw)
    return x, torch.randint(classes, (size,), generator=draw)


def task(**changes):
    model = nn.Linear(3, 2)
    return replace(Task(model, cross_entropy, [data()], data(), 4, 0, Layout.of(model)), **changes)


def test_a_task_that_can_be_trained_is_accepted():
    check_task(task())
    check_task(task(test=None))
    check_task(task(loss=mse_loss, clients=[(data()[0], torch.zeros(6, 2))], test=None))


LOSSES = {
    "both flat": lambda output, y: (output.flatten() - y.flatten()).abs().mean(),
    "output squeezed": lambda output, y: mse_loss(output.squeeze(1), y),
    "output squeezed if needed": lambda output, y: mse_loss(output.squeeze(), y),
    "labels as a column": lambda output, y: mse_loss(output, y.unsqueeze(1)),
    "every pair": lambda output, y: (output[:, 0][:, None] - y[None]).abs().mean(),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_a_loss_may_bring_output_and_labels_to_one_shape(loss):
    model, (x, _) = nn.Linear(3, 1), data()
    given = {"model": model, "layout": Layout.of(model), "clients": [(x, x[:, 0])], "test": None}
    check_task(task(loss=loss, **given))


def with_labels(labels):
    x, _ = data(len(labels))
    return x, labels


REFUSED = {
    "wrong test samples": (
        {"test": data(features=5)},
        r"the model fails on the test set, samples of shape \(5,\) .*client 0 have shape \(3,\)",
    ),
    "float64 samples": (
        {"clients": [(data()[0].double(), data()[1])]},
        r"client 0, samples of shape \(3,\) and dtype torch.float64 .*parameters are torch.float32",
    ),
    "int32 labels": (
        {"clients": [(data()[0], data()[1].int())]},
        r"the loss fails on client 0, labels .* torch.int32 \(.*y.long\(\).*y.astype\(int\)\)",
    ),
    "int32 labels of the test set": (
        {"test": (data()[0], data()[1].int())},
        r"the loss fails on the test set, labels .* torch.int32",
    ),
    "a label too large": (
        {"clients": [data(), with_labels(torch.tensor([0, 1, 0, 2]))]},
        "client 1 has the label 2, but the model's output has 2 classes: labels must be 0 to 1",
    ),
    "a negative label": (
        {"test": with_labels(torch.tensor([0, 1, -1]))},
        "the test set has the label -1",
    ),
    "a loss per sample": (
        {"loss": lambda output, y: output[:, 0]},
        r"must return a tensor with a single number, got shape \(2,\)",
    ),
    "a loss that is a float": (
        {"loss": lambda output, y: 1.0},
        "must return a tensor with a single number, got float",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_data_that_the_model_or_loss_cannot_take_are_refused_in_one_line(name):
    changes, message = REFUSED[name]
    with pytest.raises(ValueError, match=message) as refused:
        check_task(task(**changes))
    assert "\n" not in str(refused.value)


def test_labels_that_cross_entropy_ignores_are_accepted():
    check_task(task(clients=[with_labels(torch.tensor([0, 1, -100]))]))
    check_task(task(clients=[with_labels(torch.tensor([0, 1], dtype=torch.uint8))]))


@pytest.mark.parametrize("model", [nn.LazyLinear(2), nn.Sequential(nn.ReLU(), nn.LazyLinear(2))])
def test_a_lazy_layer_is_refused(model):
    with pytest.raises(ValueError, match="lazy layer has no shape yet"):
        simulate(model, [data()], rounds=1)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_initial_weights_that_are_not_finite_are_refused(value):
    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, value)
    with pytest.raises(ValueError, match="initial weights are not finite: 'weight'"):
        simulate(model, [data()], rounds=1)


def test_a_frozen_mask_may_contain_infinity():
    model = nn.Linear(3, 2)
    model.mask = nn.Parameter(torch.full((2,), -float("inf")), requires_grad=False)
    check_model(model)


def test_the_random_state_and_the_model_are_not_changed():
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 2))
    made = task(model=model, layout=Layout.of(model))
    before = torch.random.get_rng_state()
    check_task(made)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert model.training


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_models_of_every_dtype_can_be_trained(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(2))
    x, y = data()
    model(x)
    model.to(dtype)
    method = fedadam_ssm(density=0.3, local_steps=2)
    options = {"batch_size": 4, "rounds": 2, "algorithm": method}
    counted, real = (
        simulate(model, [(x.to(dtype), y.int().numpy())] * 2, (x.double(), y), wire=wire, **options)
        for wire in ("count", "real")
    )
    assert counted.state.w.dtype == counted.state.b.dtype == dtype
    assert torch.equal(counted.weights, real.weights)
    assert counted.history[-1]["uplink_bytes"] == real.history[-1]["uplink_bytes"]
    if dtype != torch.float64:
        with pytest.raises(ValueError, match=rf"dtype torch.float32 .*parameters are {dtype}"):
            simulate(model, [(x, y)], **options)
