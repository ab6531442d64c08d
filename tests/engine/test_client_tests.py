"""The accuracy on each client, from the classes of its data."""

import numpy as np
import pytest
import torch
from torch import nn

import fedsift
from fedsift.algorithms import fedavg
from fedsift.errors import ConfigError
from fedsift.runs import RunConfig
from fedsift.runs.parts import parts_of
from fedsift.simulation import Options, prepare

DRAW = torch.Generator().manual_seed(0)


def samples(counts):
    """Samples of three overlapping classes, this many of each."""
    y = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    return y[:, None] + 0.7 * torch.randn(len(y), 2, generator=DRAW), y


CLIENTS = [samples([30, 0, 0]), samples([10, 10, 0]), samples([5, 10, 25])]
TEST = samples([40, 50, 60])


def trained(**more):
    torch.manual_seed(0)
    method = fedavg(local_steps=5, lr=0.2)
    return fedsift.simulate(nn.Linear(2, 3), CLIENTS, TEST, method, rounds=3, **more)


def test_by_class_is_the_accuracy_on_test_samples_drawn_like_the_clients_data():
    result = trained(client_tests="by-class")
    model = nn.Linear(2, 3)
    result.load_into(model)
    x, y = TEST
    correct = (model(x).argmax(1) == y).numpy()
    last = result.history[-1]
    for (_, own), accuracy in zip(CLIENTS, last["client_accuracy"], strict=True):
        weight = np.array([(own == label).sum() / (y == label).sum() for label in y])
        assert accuracy == pytest.approx((weight * correct).sum() / weight.sum(), rel=1e-6)
    assert last["client_accuracy_worst"] == min(last["client_accuracy"])
    assert all("client_accuracy" in record for record in result.history)


def test_measuring_the_clients_changes_nothing_else():
    with_tests, without = trained(client_tests="by-class"), trained()
    assert torch.equal(with_tests.state.w, without.state.w)
    for a, b in zip(with_tests.history, without.history, strict=True):
        assert a["accuracy"] == b["accuracy"]
        assert a["uplink_bytes"] == b["uplink_bytes"]


def test_a_client_is_tested_with_its_own_layers():
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 3))
    shifted = [(x + 100 * n, y) for n, (x, y) in enumerate(CLIENTS)]
    method = fedavg(local_steps=5, lr=0.2)
    more = {"rounds": 2, "buffers": "local", "client_tests": "by-class"}
    result = fedsift.simulate(model, shifted, TEST, method, **more)
    x, y = TEST
    for client, (_, own) in enumerate(shifted):
        result.load_into(model, client=client)
        with torch.no_grad():
            correct = (model.eval()(x).argmax(1) == y).float()
        shares = [(own == c).float().mean() * correct[y == c].mean() for c in range(3)]
        assert result.history[-1]["client_accuracy"][client] == pytest.approx(float(sum(shares)))


REFUSED = {
    "another name": ({"client_tests": "by-label"}, TEST, "choose one of: by-class"),
    "no test set": ({"client_tests": "by-class"}, None, "needs a test set and class labels"),
    "a class without tests": (
        {"client_tests": "by-class"},
        samples([0, 9, 9]),
        "client 0 has only",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_measured_by_class_is_refused(case):
    options, test, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        prepare(nn.Linear(2, 3), CLIENTS, test, fedavg(), Options(**options))


def test_a_regression_has_no_classes():
    clients, loss = [(x, x) for x, _ in CLIENTS], nn.functional.mse_loss
    options = Options(client_tests="by-class", loss=loss)
    with pytest.raises(ValueError, match="class labels of all data"):
        prepare(nn.Linear(2, 2), clients, clients[0], fedavg(), options)


def test_on_the_command_line_it_is_for_data_with_classes():
    assert parts_of(RunConfig.from_values({"client_tests": True})).client_tests == "by-class"
    config = RunConfig.from_values(
        {"dataset": "python-stdlib", "partition": "documents", "client_tests": True}
    )
    with pytest.raises(ConfigError, match="differ in more than that"):
        parts_of(config)
