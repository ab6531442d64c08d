"""Bad input: one line from Python and on the command line, and nothing is written."""

import re
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

import fedsift
from fedsift import algorithms
from fedsift.cli import main

X = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()
GOOD = (X[:20], Y[:20])
TEST = (X[40:], Y[40:])
METHOD = algorithms.fedadam(lr=0.01, local_steps=2)


def with_value(value, row=3, column=1):
    x = X[:20].clone()
    x[row, column] = value
    return x


class Items(Dataset):
    """A Dataset of items that a function makes."""

    def __init__(self, item):
        self.item = item

    def __len__(self):
        return 20

    def __getitem__(self, row):
        return self.item(row)


def fails(*_):
    raise OSError("disk\nand more lines")


class Frame:
    """Like a data frame of pandas."""

    def to_numpy(self):
        return X.numpy()


class Complex(nn.Linear):
    def __init__(self):
        super().__init__(4, 2)
        self.turn = nn.Parameter(torch.ones(2, dtype=torch.complex64))


def clients(*data):
    return {"clients": list(data)}


COLUMN = {"loss": functional.mse_loss, "model": nn.Linear(4, 1), "test": None}
REFUSED = {
    "no clients": (clients(), "at least one client"),
    "clients in a dict": ({"clients": {"a": GOOD, "b": GOOD}}, "a list"),
    "clients in a generator": ({"clients": (x for x in [GOOD])}, "a list"),
    "one pair for all clients": ({"clients": GOOD}, "client 0 must be a pair (x, y)"),
    "a client without samples": (clients(GOOD, (X[:0], Y[:0])), "client 1 has no samples"),
    "other numbers of x and y": (clients(GOOD, (X[:5], Y[:4])), "5 samples and 4 labels"),
    "another shape": (
        clients(GOOD, (X[:20, :3], Y[:20])),
        "client 1, samples of shape (3,) and dtype torch.float32 (those of client 0 have shape "
        "(4,))",
    ),
    "NaN in x": (
        clients(GOOD, (with_value(np.nan), Y[:20])),
        "client 1 has NaN or infinity in x, first in sample 3",
    ),
    "NaN in the first sample": (
        clients((with_value(np.nan, 0), Y[:20])),
        "client 0 has NaN or infinity in x, first in sample 0",
    ),
    "infinity in x": (clients((with_value(np.inf), Y[:20])), "first in sample 3"),
    "NaN in y": (
        {**COLUMN, **clients((X[:20], with_value(np.nan, 19)[:, 1:2]))},
        "client 0 has NaN or infinity in y, first in sample 19",
    ),
    "NaN in the test set": (
        {"test": (with_value(np.nan), Y[:20])},
        "the test set has NaN or infinity in x, first in sample 3",
    ),
    "integers as x": (clients(((10 * X).int(), Y)), "dtype torch.int32"),
    "float16 as x": (clients((X.half(), Y)), "the model's parameters are torch.float32"),
    "float labels": (clients((X, Y.float())), "convert them with y.long() or, in NumPy, y.asty"),
    "boolean labels": (clients((X, Y.bool())), "convert them with y.long()"),
    "labels in a column": (clients((X, Y[:, None])), "labels of shape (2, 1)"),
    "labels in a row for a column of outputs": (
        {**COLUMN, **clients((X, X[:, 0]))},
        "the loss of client 0 compares each output with the labels of all samples: the output has "
        "shape (n, 1) and y has shape (n,); give y the shape (n, 1), with y[:, None]",
    ),
    "a loss of one's own that compares each output with all labels": (
        {**COLUMN, **clients((X, X[:, 0])), "loss": lambda o, y: (o - y).square().mean()},
        "the loss of client 0 compares each output with the labels of all samples",
    ),
    "a column of labels for a row of outputs": (
        {
            "model": nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)),
            "test": None,
            "loss": functional.l1_loss,
            **clients((X, X[:, :1])),
        },
        "the output has shape (n,) and y has shape (n, 1); give y the shape (n,), with y[:, 0]",
    ),
    "labels from 1": (clients(GOOD, (X, Y + 1)), "client 1 has the label 2, but"),
    "a negative label": ({"test": (X, Y - 1)}, "the test set has the label -1"),
    "objects": (clients((np.array([[None] * 4] * 20), Y[:20])), "an array of type object"),
    "text": (clients((X[:2], np.array(["a", "b"]))), "an array of type <U1"),
    "other byte order": (clients((X.numpy().astype(">f4"), Y)), "an array of type >f4"),
    "lists": (clients((X.tolist(), Y.tolist())), "tensors or NumPy arrays, got float"),
    "a data frame": (clients((Frame(), Y)), "NumPy arrays, got Frame: convert it with .to_numpy()"),
    "a DataLoader": (clients(DataLoader(TensorDataset(X, Y))), "a torch Dataset, got DataLoader"),
    "a Dataset that fails": (clients(Items(fails)), "the Dataset of client 0 fails: OSError: disk"),
    "a Dataset of dicts": (clients(Items(lambda n: {"x": X[n]})), "must be pairs (x, y), got dict"),
    "a Dataset of other shapes": (
        clients(Items(lambda n: (X[n][: 1 + n % 4], Y[n]))),
        "stack expects each tensor to be equal size",
    ),
    "a test set without labels": ({"test": X}, "the test set must be a pair (x, y)"),
    "no parameters": ({"model": nn.Flatten()}, "no trainable parameters"),
    "frozen parameters": ({"model": nn.Linear(4, 2).requires_grad_(False)}, "no trainable"),
    "parameters without values": ({"model": nn.Linear(4, 2, device="meta")}, "on the meta device"),
    "complex parameters": ({"model": Complex()}, "parameters of several dtypes"),
    "another model": ({"model": nn.Linear(5, 2)}, "the model fails on client 0"),
    "a loss per sample": ({"loss": nn.CrossEntropyLoss(reduction="none")}, "got shape (2,)"),
    "a loss that is a float": ({"loss": lambda output, y: 1.0}, "got float"),
    "a loss without gradient": (
        {"loss": lambda output, y: (output.argmax(1) != y).float().mean()},
        "the loss has no gradient",
    ),
    "a loss that fails": ({"loss": fails}, "the loss fails on client 0"),
}
"""Rows for Python and for the command line."""

ONLY_IN_PYTHON = {
    "a lazy layer": ({"model": nn.LazyLinear(2)}, "call the model once on a sample"),
    "the class of a model": ({"model": nn.Linear}, "the class 'Linear': call it to make one"),
    "no model": ({"model": None}, "model must be a torch.nn.Module, got None"),
    "a loss by name": ({"loss": "mse"}, "loss must be a function (output, y) -> number, got 'mse'"),
    "the class of a loss": ({"loss": nn.CrossEntropyLoss}, "got the class 'CrossEntropyLoss'"),
    "a metric per sample": ({"metrics": {"a": lambda output, y: output}}, "the metric 'a' fails"),
    "a metric that is None": ({"metrics": {"a": lambda output, y: None}}, "not 'NoneType'"),
    "a metric that compares each output with all labels": (
        {
            **clients((X, X[:, 0])),
            "test": (X, X[:, 0]),
            "model": nn.Linear(4, 1),
            "loss": lambda output, y: functional.mse_loss(output[:, 0], y),
            "metrics": {"error": lambda output, y: (output - y).abs().mean()},
        },
        "the metric 'error' compares each output with the labels of all samples",
    ),
    "a metric without a name": ({"metrics": {"": len}}, "the name of a metric must be a text"),
    "the name of a column": ({"metrics": {"rejected": len}}, "records have a column of that name"),
    "evaluate without numbers": ({"evaluate": lambda model: {"a": "b"}}, "'a' is not one"),
    "evaluate with a column": ({"evaluate": lambda model: {"loss": 1}}, "cannot be called 'loss'"),
    "evaluate that fails": ({"evaluate": fails}, "evaluate fails: disk"),
    "two of one name": (
        {"metrics": {"a": lambda output, y: 1}, "evaluate": lambda model: {"a": 1}},
        "metrics and evaluate both measure 'a'",
    ),
    "no evaluations": ({"evaluate_every": -1}, "evaluate_every must be a whole number"),
    "half a round": ({"rounds": 0.5}, "rounds must be a whole number"),
    "participation as text": ({"participation": "half"}, "participation must be in (0, 1]"),
    "unknown buffers": ({"buffers": "mean"}, "unknown buffers 'mean'; choose one of: average"),
    "unknown weights": ({"weights": "samples"}, "weights must be batch, examples or equal"),
    "an unknown device": ({"device": "tpu"}, "unknown device 'tpu'; choose auto, cpu or cuda"),
    "a method by name": ({"algorithm": "fedadam"}, "made by a function of fedsift.algorithms"),
    "a method that is not called": ({"algorithm": algorithms.fedadam}, "add parentheses"),
    "true for client_tests": ({"client_tests": True}, "client_tests must be a list with the test"),
    "a transform that fails": ({"transform": fails}, "the transform fails on client 0: disk"),
    "a transform without result": ({"transform": lambda x: None}, "must return tensors"),
    "a transform with fewer samples": ({"transform": lambda x: x[:1]}, "as many samples"),
    "a start that is a path": ({"start": "runs/a"}, "start must be a Result or a Snapshot"),
    "on_round that is no function": ({"on_round": 3}, "3 is not a callable object"),
}


def simulate(folder, **given):
    usual = {"model": nn.Linear(4, 2), "clients": [GOOD, GOOD], "test": TEST, "out": folder}
    return fedsift.simulate(**{**usual, "algorithm": METHOD, "rounds": 2, **given})


@pytest.mark.parametrize("name", [*REFUSED, *ONLY_IN_PYTHON])
def test_python_refuses_it_in_one_line(name, tmp_path, capsys):
    given, message = (REFUSED | ONLY_IN_PYTHON)[name]
    with pytest.raises((ValueError, TypeError), match=re.escape(message)) as problem:
        simulate(tmp_path / "run", **given)
    assert "\n" not in str(problem.value)
    assert capsys.readouterr().err == ""
    assert list(tmp_path.iterdir()) == []


ROW = {}
"""The row whose data, model and loss the functions below return."""


def data_of_row():
    return ROW["clients"], ROW["test"]


def model_of_row():
    return ROW.get("model", nn.Linear(4, 2))


def loss_of_row(output, y):
    return ROW["loss"](output, y)


NOT_A_LIST = "must return a list with the data of at least one client, got"
FAILS = f"model '{__name__}:model_of_row' fails on samples of shape 4: "
SAID_OTHERWISE = {
    "no clients": NOT_A_LIST,
    "clients in a dict": NOT_A_LIST,
    "clients in a generator": NOT_A_LIST,
    "integers as x": FAILS,
    "float16 as x": FAILS,
    "parameters without values": FAILS,
    "another model": FAILS,
}
"""Messages of the command line, which knows the names of the functions."""


@pytest.mark.parametrize("name", REFUSED)
def test_the_command_line_refuses_it_in_one_line(name, tmp_path, capsys, monkeypatch):
    given, message = REFUSED[name]
    monkeypatch.chdir(tmp_path)
    ROW.clear()
    ROW.update({"clients": [GOOD, GOOD], "test": TEST, "loss": None, **given})
    words = ["--data", f"{__name__}:data_of_row", "--model", f"{__name__}:model_of_row"]
    if ROW["loss"]:
        words += ["--loss", f"{__name__}:loss_of_row"]
    assert main(["run", *words, "--rounds", "2"]) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert said.err.startswith("fedsift: ")
    assert SAID_OTHERWISE.get(name, message) in said.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("filter", ["error", "ignore", "once"])
@pytest.mark.parametrize("seed", range(20))
def test_a_column_of_labels_is_explained_for_all_weights_and_filters_of_warnings(filter, seed):
    torch.manual_seed(seed)
    given, message = REFUSED["a column of labels for a row of outputs"]
    model = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))
    with warnings.catch_warnings():
        warnings.simplefilter(filter)
        with pytest.raises(ValueError, match=re.escape(message)):
            simulate(None, **{**given, "model": model})


@pytest.mark.parametrize("out", ["a file", "a file/below", "/proc/nowhere"])
def test_a_folder_that_cannot_be_made_is_refused(out, tmp_path, capsys):
    (tmp_path / "a file").touch()
    with pytest.raises(ValueError, match=r"a folder|the folder"):
        simulate(tmp_path / out)
    assert main(["run", "--rounds", "1", "--clients", "2", "--out", str(tmp_path / out)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["a file"]


class Tied(nn.Module):
    """Two layers share their weights."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.last(self.second(self.first(x).tanh()).tanh())


class WithIntegers(nn.Linear):
    def __init__(self):
        super().__init__(4, 2)
        self.steps = nn.Parameter(torch.zeros(2, dtype=torch.int32), requires_grad=False)


class Masked(nn.Linear):
    """It knows what to do with missing values."""

    def forward(self, x):
        return super().forward(x.nan_to_num())


ACCEPTED = {
    "float64 as x": (clients((X.double().numpy(), Y.numpy())), 10),
    "int32 labels": (clients((X.numpy(), Y.numpy().astype(np.int32))), 10),
    "uint16 labels": (clients((X.numpy(), Y.numpy().astype(np.uint16))), 10),
    "missing values": ({"model": Masked(4, 2), **clients((with_value(np.nan), Y[:20]))}, 10),
    "tied weights": ({"model": Tied()}, 34),
    "a model in evaluation mode": ({"model": nn.Linear(4, 2).eval()}, 10),
    "parameters of integers": ({"model": WithIntegers()}, 10),
    "DataParallel": ({"model": nn.DataParallel(nn.Linear(4, 2))}, 10),
    "a loss without gradient, for a method that needs none": (
        {
            "loss": lambda output, y: (output.argmax(1) != y).float().mean(),
            "algorithm": algorithms.decomfl(local_steps=1),
        },
        10,
    ),
}


@pytest.mark.parametrize(("given", "parameters"), ACCEPTED.values(), ids=ACCEPTED)
@pytest.mark.filterwarnings("ignore:the final accuracy", "ignore:the test loss")
def test_what_looks_unusual_works(given, parameters, tmp_path):
    result = simulate(None, **given)
    assert result.state.w.shape == (parameters,)
    assert result.history[-1]["loss"] is not None


def test_a_learning_rate_that_is_too_large_is_said():
    with pytest.warns(UserWarning, match="try a smaller lr than 1000000"):
        simulate(
            None, model=nn.Linear(4, 2), algorithm=algorithms.fedsgd(lr=1e6),
            clients=[(X[:20], 1 - Y[:20])],
        )  # fmt: skip
    line = {"model": nn.Linear(4, 1), "loss": functional.mse_loss, "test": None}
    with pytest.raises(fedsift.errors.Diverged, match="try a smaller lr"):
        simulate(
            None, **line, clients=[(X, X[:, :1])], algorithm=algorithms.fedsgd(lr=1e20), rounds=9
        )
