"""The ablation of sift: every variant trains, and the one without changes is sift."""

import importlib
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import mse_loss

import fedsift
from fedsift import algorithms
from fedsift.reproduce import experiments, parallel
from problems import ridge

SCRIPTS = Path(__file__).parents[2] / "reproduce" / "sift"


@pytest.fixture(scope="module")
def scripts():
    """The modules of reproduce/sift by name; unregisters their method afterwards."""
    sys.path.insert(0, str(SCRIPTS))
    try:
        names = ("variants", "ablate", "page")
        modules = {name: importlib.import_module(name) for name in names}
        yield modules
    finally:
        sys.path.remove(str(SCRIPTS))
        for name in names:
            sys.modules.pop(name, None)
        algorithms.METHODS.pop("sift-variant", None)


def train(algorithm, rounds, dtype=torch.float32):
    problem = ridge(0, clients=4, d=300, dtype=dtype)
    return fedsift.simulate(
        problem.model, problem.clients, algorithm=algorithm, rounds=rounds, batch_size=None,
        loss=mse_loss,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_default_variant_is_sift_bit_for_bit(scripts, dtype):
    settings = {"density": 0.1, "down_density": 0.2, "local_steps": 3, "lr": 0.01}
    ours = train(scripts["variants"].sift_variant(**settings), 8, dtype=dtype)
    theirs = train(algorithms.sift(**settings), 8, dtype=dtype)
    assert torch.equal(ours.weights, theirs.weights)
    for one, other in zip(ours.state, theirs.state, strict=True):
        assert torch.equal(one, other)
    name = len("sift-variant") - len("sift")  # part of every frame
    for one, other in zip(ours.history, theirs.history, strict=True):
        assert one["uplink_bits_paper"] == other["uplink_bits_paper"]
        named = other["uplink_bytes"] + name * one["round"]
        assert one["uplink_bytes"] == pytest.approx(named, abs=1e-6)


def test_every_variant_trains_and_differs_from_sift(scripts):
    changed, plain = {}, {"local_steps": 3, "lr": 0.01}
    for name, change in scripts["variants"].VARIANTS.items():
        settings = dict(change)
        make = algorithms.find(settings.pop("algorithm", "sift-variant"))
        result = train(make(**plain, **settings), 6)
        assert torch.isfinite(result.weights).all(), name
        changed[name] = result.weights
    same = {name for name, w in changed.items() if torch.equal(w, changed["sift"])}
    assert same == {"sift", "per layer"}  # a model of one layer has one density


def test_the_ablation_continues_where_it_stopped(scripts, tmp_path, capsys, monkeypatch):
    words = ["--tasks", "small", "--settings", "iid", "--variants"]
    words += ["sift;fedadam;mean of the senders"]
    words += ["--rounds", "2", "--device", "cpu", "--out", str(tmp_path)]
    task = {"dataset": "digits", "model": "small-cnn", "clients": 4, "rounds": 2, "target": 0.3}
    task |= {"local_steps": 3, "lr": 0.01}
    monkeypatch.setitem(experiments.read_pinned("tasks")["tasks"], "small", task)
    played = []
    ablate = scripts["ablate"]
    monkeypatch.setattr(ablate, "HERE", tmp_path)  # without the committed table
    execute_run = parallel.execute_run

    def stop_after_two(run, *rest):
        played.append(run.label)
        if len(played) == 3:
            raise KeyboardInterrupt
        execute_run(run, *rest)

    monkeypatch.setattr(parallel, "execute_run", stop_after_two)
    with pytest.raises(KeyboardInterrupt):
        ablate.main(words)
    assert [row["variant"] for row in ablate.rows_in(tmp_path / "ablation.csv")] == played[:2]
    ablate.main(words)
    ablate.main(words)
    assert played == ["fedadam", "sift", *["mean of the senders"] * 2]
    rows = ablate.rows_in(tmp_path / "ablation.csv")
    fedadam, sift, _ = rows
    assert [row["rounds"] for row in rows] == ["2"] * 3
    assert fedadam["best_accuracy"] == fedadam["harder_target"] == sift["harder_target"]
    assert float(sift["uplink_bytes"]) < float(fedadam["uplink_bytes"]) / 50


def test_the_page_shows_the_committed_results(scripts):
    page = scripts["page"]
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.filled(text, page.compared(), page.rows()) == text


def test_the_page_renders_ablation_rows(scripts):
    page, header = scripts["page"], scripts["ablate"].HEADER
    row = dict.fromkeys(header, "0.5") | {"task": "vgg11-cifar10", "setting": "noniid"}
    row |= {"variant": "sift", "uplink_bytes_to_target": "123456", "uplink_bytes_to_harder": ""}
    text = page.between("a\n\n<!-- x --><!-- end of x -->\n\nb", "x", page.ablation([row, row]))
    assert "### VGG-11, CIFAR-10, Dirichlet 0.1: variants" in text
    assert "| sift | 2 | 123.5 | 0.0 | – | 0.0 | 50.00 % | 50.00 % |" in text
