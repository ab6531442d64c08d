"""Your own data, model and loss on the command line."""

import json
import tomllib

import pytest
from commands import metrics_of, without_seconds

from fedsift.advise.calibration import calibration_task
from fedsift.cli import main
from fedsift.runs import RunConfig

MODULE = """
import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset


def load(seed=0, num_clients=3):
    truth = np.random.default_rng(1).normal(size=(5, 3))

    def draw(n):
        x = np.random.normal(size=(n, 5)).astype(np.float32)
        return x, (x @ truth).argmax(1)

    return [draw(20 + 5 * n) for n in range(num_clients)], draw(50)


def regression():
    x = {"x": torch.randn(40, 5)}
    y = x["x"][:, :1]
    return [(x, y), (x, y)], (x, y)


class Items(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, row):
        return torch.full((5,), float(row)), row % 3


def items(num_clients):
    return [Items() for _ in range(num_clients)], None


def mlp():
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))


class Line(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 1)

    def forward(self, x):
        return self.layer(x)


def number():
    return 5


def nobody():
    return [], None


def fails():
    raise KeyError("a bug")


def untensored():
    return [("x", "y")], None
"""
RUN = ("--data", "own_parts:load", "--model", "own_parts:mlp", "--local-steps", "3")


@pytest.fixture(autouse=True)
def own_parts(cwd):
    (cwd / "own_parts.py").write_text(MODULE)


def test_a_run_on_own_data_is_recorded_resumed_and_reported(cwd, capsys):
    assert main(["run", *RUN, "--rounds", "4", "--seed", "3", "--out", "whole"]) == 0
    assert "own_parts:load" in capsys.readouterr().out
    assert main(["run", *RUN, "--rounds", "2", "--seed", "3", "--out", "half"]) == 0
    config = cwd / "half" / "config.toml"
    recorded = tomllib.loads(config.read_text())
    assert (recorded["dataset"], recorded["partition"]) == ("own_parts:load", "own")
    assert recorded["clients"] == 3
    config.write_text(config.read_text().replace("rounds = 2", "rounds = 4"))
    assert main(["resume", "half"]) == 0
    assert without_seconds(metrics_of(cwd / "half")) == without_seconds(metrics_of(cwd / "whole"))
    assert main(["report", "half", "whole", "-o", "both.html"]) == 0
    assert "own_parts:load" in (cwd / "both.html").read_text()


def test_the_function_gets_the_number_of_clients_and_may_return_datasets(cwd):
    words = ["--data", "own_parts:items", "--model", "own_parts:mlp", "--local-steps", "2"]
    assert main(["run", *words, "--clients", "4", "--rounds", "1", "--out", "a"]) == 0
    summary = json.loads((cwd / "a" / "summary.json").read_text())
    assert (summary["clients"], summary["final_accuracy"]) == (4, None)


def test_workers_fetch_the_items_of_datasets_and_may_change(cwd, capsys):
    words = ["run", "--data", "own_parts:items", "--model", "own_parts:mlp", "--local-steps", "2"]
    words += ["--clients", "2", "--rounds", "2"]
    assert main([*words, "--num-workers", "1", "--out", "a"]) == 0
    assert main([*words, "--out", "b"]) == 0
    assert without_seconds(metrics_of(cwd / "a")) == without_seconds(metrics_of(cwd / "b"))
    config = cwd / "a" / "config.toml"
    assert "num_workers = 1\n" in config.read_text()
    changed = config.read_text().replace("num_workers = 1", "num_workers = 0")
    config.write_text(changed.replace("rounds = 2", "rounds = 3"))
    assert main(["resume", "a"]) == 0
    capsys.readouterr()
    assert main([*words, "--num-workers", "-1"]) == 2
    assert "num-workers must be a whole number of at least 0" in capsys.readouterr().err


def test_a_regression_with_a_loss_and_dicts_shows_its_loss(cwd, capsys):
    words = ["--data", "own_parts:regression", "--model", "own_parts:Line"]
    loss = ["--loss", "torch.nn.functional:mse_loss"]
    assert main(["run", *words, *loss, "--lr", "0.01", "--rounds", "2", "--out", "a"]) == 0
    said = capsys.readouterr()
    last = without_seconds(metrics_of(cwd / "a"))[-1]["loss"]
    assert f"final test loss {last:.4g}" in " ".join(said.out.split())
    assert "accuracy" not in said.out
    assert not said.err


def test_a_comparison_on_own_data(cwd, capsys):
    words = [*RUN, "--rounds", "2", "--algorithms", "fedadam-ssm,fedsgd", "--target", "0.1"]
    assert main(["compare", *words, "--out", "c"]) == 0
    assert main(["compare", *words, "--out", "c"]) == 0  # finds the finished runs
    assert "own_parts:load" in capsys.readouterr().out


def test_advice_holds_out_a_fifth_of_each_client():
    values = {"data": "own_parts:load", "model": "own_parts:mlp"}
    task = calibration_task(RunConfig.from_values(values))
    assert [len(x) for x, _ in task.clients] == [16, 20, 24]
    assert len(task.test[0]) == 4 + 5 + 6
    items = calibration_task(RunConfig.from_values({**values, "data": "own_parts:items"}))
    assert [len(data) for data in items.clients] == [16] * 20
    assert len(items.test) == 80


REFUSED = {
    "no colon": (["--data", "own_parts"], ["package.module:function", "'own_parts'"]),
    "no module": (["--data", "not_there:load"], ["cannot import data", "not_there"]),
    "no function": (["--data", "own_parts:nope"], ["cannot import data", "nope"]),
    "a number": (["--data", "own_parts:number"], ["must return (clients, test)", "int"]),
    "no clients": (["--data", "own_parts:nobody"], ["at least one client"]),
    "an error": (["--data", "own_parts:fails"], ["KeyError", "a bug"]),
    "no tensors": (["--data", "own_parts:untensored"], ["client 0", "tensors"]),
    "a data set": ([*RUN[:2], "--dataset", "digits"], ["either data", "dataset"]),
    "a partition": ([*RUN[:2], "--partition", "iid"], ["partition", "own data"]),
    "theta": ([*RUN[:2], "--theta", "1"], ["theta"]),
    "other clients": (["--data", "own_parts:regression", "--clients", "3"], ["2 clients, not 3"]),
    "no model": ([*RUN[:2], "--model", "auto"], ["needs a model"]),
    "a model for images": ([*RUN[:2], "--model", "cnn"], ["1x28x28", "shape 5"]),
    "no loss": ([*RUN[:2], "--loss", "mse"], ["loss", "'mse'"]),
    "a failing loss": ([*RUN[:2], "--loss", "own_parts:number"], ["the loss fails"]),
}


@pytest.mark.parametrize(("words", "phrases"), REFUSED.values(), ids=REFUSED)
def test_bad_input_is_refused_in_one_line_and_nothing_is_written(words, phrases, cwd, capsys):
    model = [] if "--model" in words else ["--model", "own_parts:mlp"]
    before = sorted(path.name for path in cwd.iterdir())
    assert main(["run", *words, *model]) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1, said.err
    assert [phrase for phrase in phrases if phrase not in said.err] == [], said.err
    after = sorted(path.name for path in cwd.iterdir())
    assert set(after) - set(before) <= {"__pycache__"}


def test_a_run_that_learns_nothing_ends_with_advice(capsys):
    few = ["--clients", "2", "--rounds", "3", "--local-steps", "2"]
    assert main(["run", *few, "--lr", "100", "--out", "a"]) == 0
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.startswith("warning: the final accuracy, ")
    assert warning.endswith("is hardly better than guessing: try a smaller --lr than 100.0")
    assert main(["run", *few, "--lr", "0.01", "--out", "b"]) == 0
    assert not capsys.readouterr().err


def test_names_may_be_written_with_underscores(cwd):
    config = RunConfig.from_values({"dataset": "fashion_mnist", "model": "small_cnn"})
    assert (config.dataset, config.model) == ("fashion-mnist", "small-cnn")
