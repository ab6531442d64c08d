"""Who takes part, who is lost, and what is counted."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import TensorDataset

import fedsift
from fedsift import algorithms
from fedsift.errors import Diverged
from fedsift.simulation import Options, prepare
from fedsift.task import sample_without_replacement
from problems import ridge

METHOD = algorithms.fedadam_ssm(density=0.3, local_steps=2)


def federation(clients=10, algorithm=METHOD, batch_size=None, **options):
    problem = ridge(0, clients=clients)
    options = {"participation": 1.0, "dropout": 0.0, "min_clients": 0, "wire": "count", **options}
    return prepare(
        problem.model, problem.clients, None, algorithm,
        Options(batch_size=batch_size, loss=mse_loss, seed=3, device="cpu", **options),
    )  # fmt: skip


def test_cohorts_have_the_given_size_and_change_between_rounds():
    fed = federation(participation=0.3)
    cohorts = [fed.cohort(round) for round in range(1, 30)]
    assert all(len(set(c)) == 3 and list(c) == sorted(c) for c in cohorts)
    assert len(set(cohorts)) > 1
    assert {n for c in cohorts for n in c} == set(range(10))


def test_full_participation_selects_all_clients():
    assert federation().cohort(1) == tuple(range(10))


def test_a_tiny_participation_selects_one_client():
    assert len(federation(participation=0.001).cohort(1)) == 1


def test_lost_updates_are_neither_merged_nor_counted():
    fed = federation(dropout=0.5)
    lost = fed.lost_clients(1, fed.cohort(1))
    after, happened = fed.run_round(fed.initial_snapshot())
    assert 0 < len(lost) < 10
    assert happened.clients == 10 - len(lost)
    everyone, _ = federation().run_round(fed.initial_snapshot())
    share = (10 - len(lost)) / 10
    assert after.traffic.uplink_bits_paper == share * everyone.traffic.uplink_bits_paper
    assert not torch.equal(after.state.w, everyone.state.w)


def test_a_client_whose_update_is_lost_keeps_its_memory():
    fed = federation(dropout=0.5, algorithm=algorithms.efficient_adam())
    after, _ = fed.run_round(fed.initial_snapshot())
    assert set(after.client_memory) == set(range(10)) - fed.lost_clients(1, fed.cohort(1))


def test_a_round_without_updates_changes_nothing():
    fed = federation(clients=1, dropout=0.999)
    before = fed.initial_snapshot()
    after, happened = fed.run_round(before)
    assert happened.clients == 0
    assert torch.equal(after.state.w, before.state.w)
    assert after.round == 1


def test_weights_are_mini_batch_sizes():
    fed = federation(batch_size=10)
    sizes = [len(x) for x, _ in fed.task.clients]
    assert [fed.weight(n) for n in range(10)] == [min(10, size) for size in sizes]
    assert min(sizes) < 10 < max(sizes)


def test_mini_batches_are_fresh_and_have_no_repeats():
    fed = federation(batch_size=2)
    rows = fed.task.batches(round=1, client=0, steps=50)
    assert all(len(set(batch)) == 2 for batch in rows.tolist())
    assert len({tuple(batch) for batch in rows.tolist()}) > 1
    assert (rows == fed.task.batches(round=1, client=0, steps=50)).all()
    assert (rows != fed.task.batches(round=2, client=0, steps=50)).any()


@pytest.mark.parametrize(("samples", "number"), [(5, 600), (40, 600), (1, 64), (16, 64)])
@pytest.mark.parametrize("size", [3000, np.array([700, 3000])], ids=["one", "many"])
def test_both_ways_to_draw_batches_agree(size, samples, number, monkeypatch):
    uniforms = np.random.default_rng(0).random((*np.shape(size), samples, number))
    size = np.asarray(size)[..., None].repeat(samples, -1)
    quick = sample_without_replacement(uniforms, size)
    monkeypatch.setattr("fedsift.task.task.MAX_COMPARED", 10_000)
    monkeypatch.setattr("fedsift.task.task.FEW_SAMPLES", 0)
    assert (quick == sample_without_replacement(uniforms, size)).all()
    assert all(len(set(batch)) == number for batch in quick.reshape(-1, number).tolist())


def test_traffic_follows_the_papers_formula():
    fed = federation()
    after, _ = fed.run_round(fed.initial_snapshot())
    d, k = 12, 4
    assert after.traffic.uplink_bits_paper == min(3 * k * 32 + d, k * (96 + 3.584962500721156))


def test_a_round_does_not_change_the_snapshot_before_it():
    fed = federation(algorithm=algorithms.efficient_adam())
    before = fed.initial_snapshot()
    once, _ = fed.run_round(before)
    again, _ = fed.run_round(before)
    assert torch.equal(once.state.w, again.state.w)
    assert before.client_memory == {}


def test_divergence_is_reported_with_the_round():
    problem = ridge(0)
    with pytest.raises(Diverged, match="round 1"):
        fedsift.simulate(
            problem.model, problem.clients, loss=mse_loss, rounds=3,
            algorithm=algorithms.fedsgd(local_steps=100, lr=1e10),
        )  # fmt: skip


def test_the_model_of_the_caller_is_not_changed():
    problem = ridge(0)
    model = problem.model
    result = fedsift.simulate(model, problem.clients, loss=mse_loss, rounds=1, algorithm=METHOD)
    assert torch.equal(model.weight[0], problem.w0)
    result.load_into(model)
    assert torch.equal(model.weight[0], result.state.w)


class Counting(nn.Module):
    """A layer that counts its batches."""

    def __init__(self):
        super().__init__()
        self.register_buffer("batches", torch.zeros(()))

    def forward(self, x):
        self.batches += 1
        return x


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.InstanceNorm1d(3, track_running_stats=True),
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
        Counting,
    ],
    ids=["instance norm", "spectral norm", "counting"],
)
def test_a_model_that_updates_buffers_is_reproducible(make):
    torch.manual_seed(0)  # spectral norm may find that it has nothing to change
    model = nn.Sequential(make(), nn.Flatten(), nn.Linear(12, 2))
    draw = torch.Generator().manual_seed(0)
    clients = [(torch.randn(4, 3, 4, generator=draw), torch.zeros(4).long()) for _ in range(2)]
    once, again = (fedsift.simulate(model, clients, rounds=2) for _ in range(2))
    assert torch.equal(once.weights, again.weights)
    assert not torch.equal(once.state.b, once.layout.read_buffers(model))


def test_a_model_may_have_constant_buffers():
    model = nn.Sequential(nn.Linear(4, 2))
    model.register_buffer("names", torch.arange(3))
    fedsift.simulate(model, [(torch.ones(4, 4), torch.zeros(4, dtype=torch.long))], rounds=1)


@pytest.mark.parametrize(
    "algorithm", [algorithms.fedsgd(local_steps=1, lr=1e8), METHOD], ids=["huge", "plain"]
)
def test_both_wires_give_the_same_bits(algorithm):
    ends = [federation(algorithm=algorithm, wire=wire) for wire in ("count", "real")]
    (counted, report), (carried, also) = (fed.run_round(fed.initial_snapshot()) for fed in ends)
    assert report.clients == also.clients == 10
    assert report.train_loss == also.train_loss
    assert torch.equal(counted.state.w, carried.state.w)
    assert counted.traffic == carried.traffic


class Liar:
    """An engine whose first client says that its loss is not a number."""

    def __init__(self, engine, loss):
        self.engine, self.loss = engine, loss

    def train(self, job):
        first, *others = self.engine.train(job)
        yield from (replace(first, loss=self.loss), *others)


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_ignored(loss):
    fed = federation(clients=3)
    honest = [result.loss for result in fed.engine.train(job_of(fed))]
    _, happened = replace(fed, engine=Liar(fed.engine, loss)).run_round(fed.initial_snapshot())
    assert happened.train_loss == pytest.approx(sum(honest[1:]) / 2)


def test_the_training_loss_is_the_mean_over_merged_clients():
    fed = federation(dropout=0.5)
    losses = {result.client: result.loss for result in fed.engine.train(job_of(fed))}
    _, happened = fed.run_round(fed.initial_snapshot())
    merged = set(losses) - fed.lost_clients(1, fed.cohort(1))
    assert happened.train_loss == pytest.approx(sum(losses[n] for n in merged) / len(merged))


def job_of(fed):
    return fed.job_after(fed.initial_snapshot())


def test_dropout_layers_depend_on_the_seed_only():
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 2))
    data = [(torch.randn(8, 4), torch.arange(8) % 2)]
    first = fedsift.simulate(model, data, rounds=2, algorithm=METHOD)
    torch.rand(5)
    state = torch.get_rng_state()
    second = fedsift.simulate(model, data, rounds=2, algorithm=METHOD)
    assert torch.equal(first.state.w, second.state.w)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        ([], "clients is empty"),
        ([(torch.zeros(2, 1), torch.zeros(3))], "2 samples and 3 labels"),
        ([(torch.zeros(0, 1), torch.zeros(0))], "no samples"),
        ([([0.0, 1.0], [0, 1])], "client 0 must consist of tensors or NumPy arrays, got float"),
        ([(np.array(["a", "b"]), np.zeros(2))], "client 0 has an array of type <U1: can't convert"),
        ([TensorDataset(torch.zeros(2, 1))], r"client 0 must be a pair .* got \(Tensor\)"),
    ],
)
def test_invalid_data_is_refused(clients, message):
    with pytest.raises(ValueError, match=message):
        fedsift.simulate(nn.Linear(1, 1), clients, loss=mse_loss)


DATA = (torch.randn(6, 3), torch.arange(6) % 2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"algorithm": "fedadam-ssm"}, r"fedadam_ssm\(\), got 'fedadam-ssm'"),
        ({"algorithm": fedsift.algorithms.fedadam_ssm}, r"algorithm must be made by a function"),
        ({"rounds": 1.5}, "rounds must be a whole number of at least 1, got 1.5"),
        ({"batch_size": 2.5}, "batch_size must be a whole number"),
        ({"seed": None}, "seed must be a whole number"),
        ({"test": (DATA[0], DATA[1][:5])}, "the test set has 6 samples and 5 labels"),
        ({"test": (DATA[0][:0], DATA[1][:0])}, "the test set has no samples"),
        ({"test": {"x": DATA[0]}}, "the test set must be a pair .* got dict"),
    ],
)
def test_invalid_arguments_are_refused_before_training(given, message):
    played = []
    with pytest.raises(ValueError, match=message):
        fedsift.simulate(nn.Linear(3, 2), [DATA], **given, on_round=played.append)
    assert played == []


def test_the_device_may_be_auto():
    result = fedsift.simulate(nn.Linear(3, 2), [DATA], rounds=1, device="auto")
    assert [record["round"] for record in result.history] == [0, 1]


class Pair(nn.Linear):
    """A model whose output is no tensor."""

    def forward(self, x):
        return super().forward(x), x


def test_an_output_other_than_a_tensor_has_a_loss_but_no_accuracy():
    def loss(output, y):
        return cross_entropy(output[0], y)

    torch.manual_seed(0)
    given = {"clients": [DATA], "test": DATA, "rounds": 2}
    pair = fedsift.simulate(Pair(3, 2), **given, loss=loss)
    torch.manual_seed(0)
    plain = fedsift.simulate(nn.Linear(3, 2), **given)
    assert [r["loss"] for r in pair.history] == [r["loss"] for r in plain.history]
    assert [r["accuracy"] for r in pair.history] == [None, None, None]


def test_every_public_name_can_be_used_after_import_fedsift():
    words = "import fedsift; [getattr(fedsift, name) for name in fedsift.__all__]; fedsift.data.iid"
    subprocess.run([sys.executable, "-c", words], check=True)
    assert set(fedsift.__all__) <= set(dir(fedsift))
    with pytest.raises(AttributeError, match="no attribute 'simulated'"):
        fedsift.simulated  # noqa: B018


def test_regression_has_a_loss_but_no_accuracy():
    problem = ridge(0)
    result = fedsift.simulate(
        problem.model, problem.clients, test=problem.clients[0], loss=mse_loss, rounds=1
    )
    assert result.history[0]["accuracy"] is None
    assert result.history[0]["loss"] > 0
