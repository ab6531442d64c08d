"""The GPU engine tries the fastest way first and ends with one that works."""

import logging
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fedsift import algorithms
from fedsift.cli.exit_codes import report_problem
from fedsift.engine import Reference, Stacked
from fedsift.engine.gpu import graph, ways
from fedsift.errors import OutOfMemory
from fedsift.progress import round_progress
from fedsift.simulation import Options, prepare

COPY = "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless it is pinned"


class Curious(nn.Linear):
    """Its forward pass depends on the data, which neither vmap nor a graph can follow."""

    def forward(self, x):
        return super().forward(x if x.sum() > 0 else -x)


def federation(model, method=None, clients=3, **options):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(clients, 12, 5, generator=draw)
    y = torch.randint(0, 4, (clients, 12), generator=draw)
    wanted = {
        "batch_size": 4, "loss": cross_entropy, "seed": 0, "device": "cpu", "participation": 1.0,
        "dropout": 0.0, "min_clients": 0, "wire": "count", **options,
    }  # fmt: skip
    data = list(zip(x, y, strict=True))
    method = method or algorithms.fedadam(local_steps=2, lr=0.01)
    return prepare(model, data, data[0], method, Options(**wanted))


def after_two_rounds(fed, engine):
    fed = replace(fed, engine=engine)
    snapshot = fed.initial_snapshot()
    for _ in range(2):
        snapshot, _ = fed.run_round(snapshot)
    return snapshot.state.w


def chosen_by(engine):
    return {step.chosen.way.name for step in engine.steps.values()}


class Replayed:
    """What a CUDA graph would be without a GPU: it takes the step again."""

    def __init__(self, take):
        self.replay = take


@pytest.fixture
def graphs(monkeypatch):
    """A machine whose graphs record everything but what depends on the data or fails by name."""
    failing = set()

    def capture(take):
        graph.record(take)
        gradients = type(take.__self__.gradients).__name__
        if gradients in failing:
            raise RuntimeError(COPY + "\nmore about it")
        return Replayed(take)

    monkeypatch.setattr(graph, "can_capture", lambda device: True)
    monkeypatch.setattr(graph, "capture", capture)
    return failing


def test_a_model_that_no_graph_records_is_trained_without_one(graphs, caplog):
    graphs |= {"StreamGradients"}
    torch.manual_seed(0)
    fed = federation(Curious(5, 4))
    engine = Stacked(fed.task, fed.algorithm)
    with caplog.at_level(logging.INFO, "fedsift"):
        ours = after_two_rounds(fed, engine)
    torch.testing.assert_close(ours, after_two_rounds(fed, Reference(fed.task)))
    assert chosen_by(engine) == {"one client after another"}
    (line,) = caplog.messages  # once, not in every round
    assert line.startswith("local training runs one client after another; not ")
    assert f"not one stream per client: {COPY}" in line
    assert "not all clients at once, by torch.vmap: " in line
    assert "\n" not in line


def test_a_graph_is_replayed(graphs):
    torch.manual_seed(0)
    fed = federation(nn.Sequential(nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 4, 5), nn.Flatten()))
    engine = Stacked(fed.task, fed.algorithm)
    ours = after_two_rounds(fed, engine)
    torch.testing.assert_close(ours, after_two_rounds(fed, Reference(fed.task)))
    assert chosen_by(engine) == {"one stream per client"}
    assert all(isinstance(step.graph, Replayed) for step in engine.steps.values())


class Skipping(nn.Linear):
    """Skips part of its work at random. What the host draws, a graph would repeat."""

    def __init__(self, draw):
        super().__init__(5, 4)
        self.draw = draw

    def forward(self, x):
        return super().forward(x) * (1 if self.draw() < 0.5 else 0.5)


DRAWS = {
    "random": random.random,
    "numpy": lambda: np.random.rand(),  # noqa: NPY002
    "torch": lambda: float(torch.rand(())),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_model_that_draws_random_numbers_on_the_host_has_no_graph(graphs, name):
    torch.manual_seed(0)
    fed = federation(Skipping(DRAWS[name]))
    engine = Stacked(fed.task, fed.algorithm)
    after_two_rounds(fed, engine)
    assert chosen_by(engine) == {"one client after another"}
    (step,) = engine.steps.values()
    reasons = dict(step.chosen.refused)
    assert reasons["one stream per client"] == "it draws random numbers on the CPU"


def test_losses_without_gradients_are_computed_without_a_graph_if_need_be(graphs):
    graphs |= {"PointLosses"}
    torch.manual_seed(0)
    fed = federation(Curious(5, 4), algorithms.decomfl(local_steps=2, lr=0.01))
    engine = Stacked(fed.task, fed.algorithm)
    ours = after_two_rounds(fed, engine)
    torch.testing.assert_close(ours, after_two_rounds(fed, Reference(fed.task)))
    assert chosen_by(engine) == {"one client after another, without a graph"}


def test_the_models_own_error_is_raised():
    class Broken(nn.Linear):
        def forward(self, x):
            raise ZeroDivisionError("no such layer")

    fed = federation(nn.Linear(5, 4))
    fed = replace(fed, task=replace(fed.task, model=Broken(5, 4)))
    with pytest.raises(ZeroDivisionError, match="no such layer"):
        after_two_rounds(fed, Stacked(fed.task, fed.algorithm))


def test_running_out_of_memory_leads_to_a_way_that_needs_less():
    def attempt(way):
        if way.has_graph:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nand more")
        return "works"

    chosen = ways.first_that_works(ways.GRADIENTS, attempt)
    assert chosen.result == "works"
    assert chosen.refused[0][1] == "CUDA out of memory. Tried to allocate 2 GiB"


def test_running_out_of_memory_in_every_way_is_said_in_one_line(capsys):
    class Large(nn.Linear):
        def forward(self, x):
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")

    fed = federation(nn.Linear(5, 4))
    fed = replace(fed, task=replace(fed.task, model=Large(5, 4)))
    with pytest.raises(OutOfMemory, match="out of memory: choose a smaller batch") as problem:
        after_two_rounds(fed, Stacked(fed.task, fed.algorithm))
    assert report_problem(problem.value) == 3
    assert capsys.readouterr().err.count("\n") == 1


def test_the_choice_is_shown_next_to_the_rounds(capsys):
    with round_progress("sift", 3) as show, round_progress("sift", 3):
        logging.getLogger("fedsift").info("local training runs so")
        show({"round": 1, "accuracy": None, "uplink_bytes": 0, "downlink_bytes": 0, "seconds": 1})
    assert capsys.readouterr().err.count("local training runs so\n") == 1
    logging.getLogger("fedsift").info("unseen")
    assert "unseen" not in capsys.readouterr().err
