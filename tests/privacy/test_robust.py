"""Medians and trimmed means against NumPy, on every wire, and against hostile clients."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import mse_loss

import fedsift
from fedsift import algorithms, data
from fedsift.algorithms import METHODS, Algorithm, find, settings_of
from fedsift.cli import main
from fedsift.codec.update import Update, WeightedSum, dense, sparse
from fedsift.engine import Stacked
from fedsift.errors import ConfigError
from fedsift.federation.inbox import Inbox
from fedsift.privacy import DifferentialPrivacy, robust
from fedsift.privacy.robust import AGGREGATIONS, RobustSum, check_aggregation, num_trimmed
from fedsift.simulation import Options, prepare
from fedsift.vector import State
from problems import ridge

ROBUST = ("median", "trimmed")
ROOT = Path(__file__).parents[2]


def oracle(x, aggregation):
    """The median or the trimmed mean of each column of a NumPy array."""
    if aggregation == "median":
        return np.median(x, axis=0)
    cut = min(int(np.ceil(0.2 * len(x))), (len(x) - 1) // 2)
    return np.sort(x, axis=0)[cut : len(x) - cut].mean(axis=0)


@given(st.integers(1, 12), st.integers(1, 9), st.integers(1, 20), st.sampled_from(ROBUST))
def test_it_agrees_with_numpy(clients, d, block, aggregation):
    draw = torch.Generator().manual_seed(clients * 100 + d)
    x = torch.randn(clients, d, dtype=torch.float64, generator=draw)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(robust, "BLOCK_VALUES", block)
        total = RobustSum(State.start(torch.zeros(d, dtype=torch.float64)), aggregation)
        for rows in x.split(3):  # weights are ignored: a hostile client would claim the largest
            weights = tuple(float(n + 1) for n in range(len(rows)))
            total.add(Update(dense({"w": rows, "v": 2 * rows}), weights))
        mean = total.mean()
    expected = oracle(x.numpy(), aggregation)
    np.testing.assert_allclose(mean.w, expected, rtol=1e-12)
    np.testing.assert_allclose(mean.v, 2 * expected, rtol=1e-12)
    assert not mean.m.any()


@pytest.mark.parametrize("aggregation", ROBUST)
def test_a_common_mask_is_merged_at_its_coordinates(aggregation, monkeypatch):
    monkeypatch.setattr(robust, "BLOCK_VALUES", 10)
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([True, False, True, True, False, False, True, False]).expand(5, -1)
    total = RobustSum(State.start(torch.zeros(8)), aggregation)
    for row in range(5):
        total.add(Update(sparse({"w": x[row : row + 1]}, mask[:1]), (1.0,)))
    expected = np.where(mask[0], oracle(x.numpy(), aggregation), 0)
    np.testing.assert_allclose(total.mean().w, expected, rtol=1e-6)


def test_different_masks_are_refused_in_one_line():
    x, masks = torch.ones(1, 4), torch.eye(4, dtype=torch.bool)
    for parts in (sparse({"w": x}, masks[1:2]), dense({"w": x}), sparse({"w": x}, ~masks[:1])):
        total = RobustSum(State.start(torch.zeros(4)), "median")
        total.add(Update(sparse({"w": x}, masks[:1]), (1.0,)))
        with pytest.raises(ConfigError, match="needs clients that send the same coordinates"):
            total.add(Update(parts, (1.0,)))
    total = RobustSum(State.start(torch.zeros(4)), "median")
    total.add(Update(dense({"w": x}), (1.0,)))
    total.add(Update(dense({"m": x}), (1.0,)))
    with pytest.raises(ConfigError, match="the same coordinates"):
        total.mean()


@given(st.integers(1, 1000))
def test_at_least_one_value_is_left_and_a_fifth_is_removed(clients):
    for aggregation in ROBUST:
        assert clients - 2 * num_trimmed(aggregation, clients) >= 1
    assert clients - 2 * num_trimmed("median", clients) <= 2
    assert num_trimmed("trimmed", clients) >= 0.2 * clients or clients < 3


SAME_COORDINATES = {
    "decomfl", "e3sfc", "efficient-adam", "fedadam", "fedadamw", "fedavg", "fedopt", "fedprox",
    "fedsgd", "onebit-adam", "scaffold",
}  # fmt: skip


@pytest.mark.parametrize("name", METHODS)
def test_methods_whose_clients_choose_coordinates_are_refused(name):
    check_aggregation("mean", find(name)())
    for aggregation in ROBUST:
        if name in SAME_COORDINATES:
            check_aggregation(aggregation, find(name)())
        else:
            with pytest.raises(ConfigError, match=f"those of {name} choose their own") as refused:
                check_aggregation(aggregation, find(name)())
            assert "\n" not in str(refused.value)


def test_a_method_that_sends_masks_later_is_refused_before_training_or_in_that_round():
    masked, whole = (find(name)(local_steps=1).phase(1) for name in ("fedadam-ssm", "fedadam"))
    later = Algorithm(lambda round: masked if round >= 100 else whole, name="later")
    with pytest.raises(ConfigError, match="those of later choose their own"):
        check_aggregation("median", later)
    once = Algorithm(lambda round: masked if round == 3 else whole, name="once")
    x = torch.randn(12, 30, generator=torch.Generator().manual_seed(0))
    clients, done = [(x[n::3], torch.arange(4) % 2) for n in range(3)], []
    with pytest.raises(ConfigError, match="those of this method choose their own"):
        fedsift.simulate(
            nn.Linear(30, 2), clients, algorithm=once, rounds=5, aggregation="median",
            on_round=lambda record: done.append(record["round"]), progress=False,
        )  # fmt: skip
    assert done == [1, 2]


def federation(name="fedadam", aggregation="median", clients=5, **options):
    problem = ridge(1, clients=clients, d=40, dtype=torch.float32)
    known = {"local_steps": 3, "lr": 0.01, "warmup_rounds": 1}
    method = find(name)(**{k: v for k, v in known.items() if k in settings_of(name)})
    options = {"batch_size": 4, "loss": mse_loss, "device": "cpu", **options}
    return prepare(
        problem.model, problem.clients, None, method, Options(aggregation=aggregation, **options)
    )


@pytest.mark.parametrize("aggregation", ROBUST)
@pytest.mark.parametrize("name", ["fedadam", "fedavg"])
def test_a_round_agrees_with_numpy(name, aggregation):
    uploads = []
    fed = replace(
        federation(name, aggregation),
        on_upload=lambda specs, update, sizes: uploads.append(update),
    )
    before = fed.initial_snapshot()
    after, report = fed.run_round(before)
    assert report.clients == 5
    for role, x in after.state.items():
        sent = [u.parts[0].values[role].restore().numpy() for u in uploads]
        expected = before.state[role].numpy() + oracle(np.concatenate(sent), aggregation)
        np.testing.assert_allclose(x, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("aggregation", ROBUST)
@pytest.mark.parametrize("name", sorted(SAME_COORDINATES - {"e3sfc"}))
def test_both_wires_give_the_same_bits(name, aggregation):
    ends = []
    for wire in ("count", "real"):
        fed = federation(name, aggregation, wire=wire, participation=0.8, dropout=0.1)
        snapshot = fed.initial_snapshot()
        for _ in range(3):
            snapshot, _ = fed.run_round(snapshot)
        ends.append(snapshot.state)
    assert all(torch.equal(x, y) for x, y in zip(*ends, strict=True))


@pytest.mark.parametrize("aggregation", ROBUST)
def test_clients_trained_as_a_stack_are_merged_alike(aggregation):
    fed = federation(aggregation=aggregation)
    stacked = replace(fed, engine=Stacked(fed.task, fed.algorithm))
    (ours, _), (theirs, _) = (each.run_round(fed.initial_snapshot()) for each in (fed, stacked))
    for x, y in zip(ours.state, theirs.state, strict=True):
        torch.testing.assert_close(x, y)


def test_the_mean_is_the_weighted_sum_of_before():
    fed = federation(aggregation="mean")
    job = fed.job_after(fed.initial_snapshot())
    inbox = fed.open_inbox(job, fed.initial_snapshot())
    assert isinstance(inbox, Inbox)
    assert type(inbox.total) is WeightedSum
    assert Options().aggregation == AGGREGATIONS[0] == "mean"


def test_invalid_aggregations_are_refused_in_one_line(capsys, tmp_path):
    with pytest.raises(ConfigError, match="unknown aggregation 'mode'"):
        federation(aggregation="mode")
    words = ["run", "--rounds", "1", "--out", str(tmp_path / "run")]
    assert main([*words, "--aggregation", "medan"]) == 2
    assert "did you mean 'median'?" in capsys.readouterr().err
    assert main([*words, "--aggregation", "median"]) == 2
    said = capsys.readouterr().err
    assert "those of fedadam-ssm choose their own" in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="need the sum: use aggregation='mean'"):
        federation("fedavg", privacy=DifferentialPrivacy(1.0, noise=1.0))


class Hostile:
    """An engine two of whose clients flip the sign of their update and multiply it by 100."""

    def __init__(self, engine):
        self.engine = engine

    def train(self, job):
        for result in self.engine.train(job):
            values = {role: -100 * x.restore() for role, x in result.update.parts[0].values.items()}
            flipped = replace(result, update=Update(dense(values), result.update.weights))
            yield flipped if result.client in (3, 11) else result

    def evaluate(self, w):
        return self.engine.evaluate(w)


def accuracy_on_digits(aggregation, are_hostile):
    (x, y), test = data.load("digits").train, data.load("digits").test
    clients = [(x[n::20].flatten(1), y[n::20]) for n in range(20)]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))
    fed = prepare(
        model, clients, (test[0].flatten(1), test[1]), algorithms.fedavg(local_steps=5, lr=0.3),
        Options(batch_size=32, device="cpu", max_norm_ratio=0, aggregation=aggregation),
    )  # fmt: skip
    attacked = replace(fed, engine=Hostile(fed.engine)) if are_hostile else fed
    snapshot = fed.initial_snapshot()
    for _ in range(15):
        snapshot, _ = attacked.run_round(snapshot)
    return fed.engine.evaluate(fed.model_weights(snapshot))[0]


def test_two_of_twenty_hostile_clients_destroy_the_mean_only():
    clean = accuracy_on_digits("mean", are_hostile=False)
    assert clean > 0.9
    assert accuracy_on_digits("mean", are_hostile=True) < clean - 0.5
    for aggregation in ROBUST:
        assert accuracy_on_digits(aggregation, are_hostile=True) > clean - 0.02


def test_the_table_of_the_documentation_is_that_of_the_results(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import hostile_clients

    results = json.loads(hostile_clients.RESULTS.read_text())
    page = (ROOT / "docs" / "how-to" / "hostile-clients.md").read_text()
    assert hostile_clients.table(results) in page
    for name in ("fedadam-ssm", "sift", "fedadam", "fedavg"):
        by_attack = results[name]
        clean = by_attack["nobody"]
        assert clean["none"] == clean["norm bound"]
        for attack in ("sign flipped × 100", "V = 1e11"):
            assert by_attack.get(attack, clean)["norm bound"] >= clean["none"] - 1
