"""Clients' data as NumPy arrays, dicts, tuples and Datasets, and transforms of their batches."""

# ruff: noqa: NPY002

import math
import os
import random
import time
from dataclasses import replace
from multiprocessing import active_children, get_context

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset, default_collate

import fedsift
from fedsift import simulate
from fedsift.algorithms import fedadam_ssm, fedavg
from fedsift.engine import Forked, Reference, Stacked
from fedsift.engine.batches import in_bursts
from fedsift.simulation import Options, prepare
from fedsift.task.samples import as_data, leaves_of, stacked

X = torch.randn(30, 6, generator=torch.Generator().manual_seed(0))
Y = (X[:, :3].sum(1) > 0).long() + (X[:, 4] > 1)
METHOD = fedadam_ssm(density=0.5, local_steps=3, lr=0.01)


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


class OnTwoInputs(nn.Module):
    """The same network, whose input comes in two parts."""

    def __init__(self):
        super().__init__()
        self.layers = network()

    def forward(self, left, right):
        return self.layers(torch.cat([left, right], 1))


class Items(Dataset):
    """Samples that are fetched one by one, with or without noise."""

    def __init__(self, x, y, noise=False):
        self.x, self.y, self.noise = x, y, noise

    def __len__(self):
        return len(self.x)

    def __getitem__(self, row):
        x, y = self.x[row], int(self.y[row])
        if self.noise:
            x = x + torch.randn(6) + random.random() + np.random.rand()
        return x, y


class Batches(Items):
    """Samples that are fetched a batch at a time."""

    def __getitems__(self, rows):
        return [(self.x[row], self.y[row]) for row in rows]

    def __getitem__(self, row):
        raise AssertionError("a batch is fetched at once")


def run(clients, model=None, **options):
    given = {"rounds": 2, "batch_size": 8, "seed": 3, **options}
    return simulate(model or network(), clients, algorithm=METHOD, **given)


def halves(make):
    return [make(X[:20], Y[:20]), make(X[20:], Y[20:])]


def as_arrays(x, y):
    return x.double().numpy(), y.int().numpy()


def read_only(x, y):
    arrays = as_arrays(x, y)
    for array in arrays:
        array.flags.writeable = False
    return arrays


FORMATS = {
    "float64 and int32 arrays": as_arrays,
    "read-only arrays": read_only,
    "uint8 labels": lambda x, y: (x, y.byte()),
    "a list": lambda x, y: [x, y.numpy()],
    "a tensor dataset": lambda x, y: TensorDataset(x, y),
    "a subset": lambda x, y: Subset(
        TensorDataset(X, Y), range(20) if len(x) == 20 else range(20, 30)
    ),
    "items": Items,
    "batches of items": Batches,
    "items of arrays": lambda x, y: Items(x.double().numpy(), y.numpy()),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.filterwarnings("error")
def test_every_format_gives_the_same_bits_as_tensors(name):
    expected = run(halves(lambda x, y: (x, y)), test=(X, Y))
    found = run(halves(FORMATS[name]), test=FORMATS[name](X, Y) if name != "a subset" else (X, Y))
    assert torch.equal(found.state.w, expected.state.w)
    assert found.history[-1]["accuracy"] == expected.history[-1]["accuracy"]
    assert found.history[-1]["loss"] == expected.history[-1]["loss"]


@pytest.mark.parametrize(
    "split",
    [
        lambda x: {"right": x[:, 4:], "left": x[:, :4]},
        lambda x: (x[:, :4], x[:, 4:].double().numpy()),
    ],
    ids=["dict", "tuple"],
)
@pytest.mark.parametrize("fetched", [False, True])
def test_several_inputs_are_passed_to_the_model_as_arguments(split, fetched):
    class Parts(Items):
        def __getitem__(self, row):
            parts = split(self.x[row][None])
            parts = parts.items() if isinstance(parts, dict) else enumerate(parts)
            return {["left", "right"][k] if isinstance(k, int) else k: v[0] for k, v in parts}, (
                self.y[row]
            )

    def make(x, y):
        return Parts(x, y) if fetched else (split(x), y)

    expected = run(halves(lambda x, y: (x, y)), test=(X, Y))
    found = run(halves(make), OnTwoInputs(), test=make(X, Y))
    torch.testing.assert_close(found.state.w, expected.state.w, rtol=1e-4, atol=1e-6)
    assert found.history[-1]["accuracy"] == expected.history[-1]["accuracy"]


def test_labels_may_be_a_dict():
    def loss(output, y):
        return nn.functional.cross_entropy(output, y["class"])

    expected = run(halves(lambda x, y: (x, y)), test=(X, Y))
    data = [(x, {"class": y}) for x, y in halves(lambda x, y: (x, y))]
    found = run(data, test=(X, {"class": Y}), loss=loss)
    torch.testing.assert_close(found.state.w, expected.state.w, rtol=1e-4, atol=1e-6)
    assert found.history[-1]["loss"] == pytest.approx(expected.history[-1]["loss"], rel=1e-5)
    assert found.history[-1]["accuracy"] is None


def federation(engine=Reference, model=None, clients=None, **given):
    clients = clients or halves(lambda x, y: Items(x, y, noise=True))
    options = Options(8, 1.0, 0.0, 0, "count", nn.functional.cross_entropy, 3, "cpu", **given)
    fed = prepare(model or network(), clients, None, METHOD, options)
    return replace(fed, engine=engine(fed.task))


def after(fed, rounds=2, snapshot=None):
    snapshot = snapshot or fed.initial_snapshot()
    for _ in range(rounds):
        snapshot, _ = fed.run_round(snapshot)
    return snapshot


def forked(task):
    engine = Forked(task, METHOD, 2)
    engine.start_pool()
    return engine


def noisy(x):
    return x + torch.randn_like(x) * random.random()


LIVE = {"fetched": {}, "transformed": {"clients": halves(lambda x, y: (x, y)), "transform": noisy}}


@pytest.mark.parametrize("name", LIVE)
def test_random_samples_are_the_same_in_every_engine_and_after_a_resume(name):
    expected = after(federation(**LIVE[name])).state.w
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    assert torch.equal(after(federation(forked, **LIVE[name])).state.w, expected)
    half = after(federation(**LIVE[name]), rounds=1)
    assert torch.equal(after(federation(**LIVE[name]), 1, half).state.w, expected)
    stacked = after(federation(lambda task: Stacked(task, METHOD), **LIVE[name])).state.w
    torch.testing.assert_close(stacked, expected, rtol=1e-4, atol=1e-6)


def test_worker_processes_give_the_same_bits():
    expected = after(federation()).state.w
    assert torch.equal(after(federation(num_workers=1)).state.w, expected)


@pytest.mark.parametrize(("limit", "ahead"), [(0, 1), (2.5, 3), (99, 5)])
def test_batches_are_fetched_ahead_up_to_a_size(limit, ahead, monkeypatch):
    fetched = []

    def batches():
        for number in range(5):
            fetched.append(number)
            yield torch.full((8, 4), float(number)), torch.zeros(8)

    size = 8 * 5 * 4
    monkeypatch.setattr("fedsift.engine.batches.BURST_BYTES", int(limit * size))
    found = in_bursts(batches(), torch.device("cpu"))
    first, _ = next(found)
    assert len(fetched) == ahead
    assert [float(x[0, 0]) for x in (first, *(x for x, _ in found))] == [0, 1, 2, 3, 4]


class Waiting(Items):
    """Its items take some milliseconds each, as files do."""

    def __getitem__(self, row):
        time.sleep(0.01)
        return super().__getitem__(row)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_worker_processes_make_slow_items_faster():
    clients = halves(lambda x, y: Waiting(x, y, noise=True))
    seconds = {}
    for workers in (0, 4):
        fed = federation(clients=clients, num_workers=workers)
        first = after(fed, 1)  # starts the workers
        began = time.perf_counter()
        snapshot = after(fed, 1, first)
        seconds[workers] = time.perf_counter() - began
        assert torch.equal(snapshot.state.w, after(federation()).state.w)
    assert seconds[4] < 0.8 * seconds[0]


def test_workers_end_with_the_run_without_a_word(capfd, monkeypatch):
    # On a busy machine, the engine's own processes would take part, which end a moment later.
    monkeypatch.setattr("fedsift.engine.processes.forked.MIN_PARALLEL_SECONDS", math.inf)
    clients = halves(lambda x, y: Items(x, y, noise=True))
    before = set(active_children())
    simulate(network(), clients, None, fedavg(local_steps=2), 1, num_workers=2, progress=False)
    assert set(active_children()) <= before
    assert capfd.readouterr().err == ""


def test_more_workers_than_cores_are_started_without_a_warning(recwarn):
    after(federation(num_workers=1 + os.cpu_count()), 1)
    assert not [str(each.message) for each in recwarn if "DataLoader" in str(each.message)]


def test_a_forked_process_leaves_the_workers_to_its_parent(capfd):
    federations = [federation(num_workers=1)]
    snapshot = after(federations[0], 1)
    forked_process = get_context("fork").Process(target=federations.clear)
    forked_process.start()
    forked_process.join()
    assert capfd.readouterr().err == ""
    after(federations[0], 1, snapshot)


ITEMS = {
    "tensors": [torch.arange(3), torch.ones(3).long()],
    "arrays": [np.zeros((2, 2), np.float32), np.ones((2, 2), np.float32)],
    "integers": [1, 2],
    "floats": [0.5, 1],
    "NumPy integers": [np.int32(1), np.int32(2)],
    "NumPy floats": [np.float32(1), np.float32(2)],
    "booleans": [True, False],
    "dicts": [{"a": np.zeros(2), "b": [1, 2]}, {"a": np.ones(2), "b": [3, 4]}],
}


@pytest.mark.parametrize("parts", ITEMS.values(), ids=ITEMS)
def test_a_batch_is_what_pytorch_makes_of_the_items(parts):
    ours, theirs = (leaves_of(made(parts)) for made in (stacked, default_collate))
    for x, y in zip(ours, theirs, strict=True):
        assert (x.dtype, x.tolist()) == (y.dtype, y.tolist())


def test_a_worker_of_the_engine_may_have_worker_processes():
    fed = federation(forked, num_workers=1)
    assert torch.equal(after(fed, 1).state.w, after(federation(), 1).state.w)


def test_fetching_and_transforming_leave_the_random_state_alone():
    fed = federation(transform=noisy)
    before = torch.random.get_rng_state(), random.getstate()
    state = np.random.get_state()[1].tolist()
    after(fed, 1)
    assert torch.equal(torch.random.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == state


def test_each_step_of_each_client_and_round_has_its_own_random_numbers():
    drawn = []

    def transform(x):
        drawn.append(float(torch.rand(())))
        return x

    fed = federation(clients=halves(lambda x, y: (x, y)), transform=transform)
    drawn.clear()
    after(fed)
    assert len(set(drawn)) == len(drawn) == 2 * 2 * 3


def test_a_transform_sees_training_batches_only():
    sizes = []

    def transform(x):
        sizes.append(len(x))
        return x

    run(halves(lambda x, y: (x, y)), transform=transform, test=(X, Y), rounds=1)
    assert sizes == [2] + 6 * [8]  # two samples are tried before training


def test_dropout_and_fetched_items_have_separate_random_numbers():
    def model():
        return nn.Sequential(nn.Dropout(0.5), *network())

    plain = federation(model=model(), clients=halves(lambda x, y: (x, y)))
    fetched = federation(model=model(), clients=halves(Items))
    assert torch.equal(after(plain).state.w, after(fetched).state.w)


class Broken(Items):
    def __getitem__(self, row):
        raise KeyError(f"no image {row}")


class Triples(Items):
    def __getitem__(self, row):
        return self.x[row], 0, 1


class Stream(IterableDataset):
    def __iter__(self):
        yield X[0], 0


class Endless(Dataset):
    def __getitem__(self, row):
        return X[0], 0


REFUSED = {
    "no samples": (Items(X[:0], Y[:0]), "client 0 has no samples"),
    "errors": (Broken(X, Y), "the Dataset of client 0 fails: KeyError: 'no image 0'"),
    "triples": (Triples(X, Y), r"items must be pairs \(x, y\), got \(Tensor, int, int\)"),
    "no length": (Endless(), "the Dataset of client 0 has no length: define __len__"),
    "a stream": (Stream(), "IterableDataset has no numbered items: use a map-style Dataset"),
    "three tensors": (TensorDataset(X, Y, Y), r"client 0 must be a pair .* got \(Tensor, Tensor"),
    "lengths": (({"a": X, "b": X[:5]}, Y), r"inputs of client 0 have different numbers .*30, 5"),
    "a number": ((X, torch.tensor(1)), "at least one array in x and in y, with an axis of samples"),
    "an empty dict": (({}, Y), "at least one array in x"),
    "wrong names": (({"image": X}, Y), r"the model fails on client 0, samples \{'image': 'shape"),
    "a wrong shape": (Items(X[:, :5], Y), r"client 0, samples of shape \(5,\) .*float32: mat1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unusable_data_is_refused_in_one_line(name):
    data, message = REFUSED[name]
    with pytest.raises(ValueError, match=message) as refused:
        run([data])
    assert "\n" not in str(refused.value)


def test_another_client_with_a_wrong_shape_is_refused():
    with pytest.raises(ValueError, match=r"the model fails on client 1, samples of shape \(5,\)"):
        run([(X, Y), (X[:, :5], Y)])


def test_a_transform_that_fails_is_refused():
    with pytest.raises(ValueError, match="the transform fails on client 0: no 'flip'"):
        run([(X, Y)], transform=lambda x: [][0] if len(x) > 9 else fail("no 'flip'"))


def fail(message):
    raise RuntimeError(message)


def test_arrays_are_not_copied():
    x, y = X.numpy(), Y.numpy()
    converted, labels = as_data("client 0", (x, y), "cpu", torch.float32)
    x_before = x[0, 0]
    x[0, 0] = 7
    assert converted[0, 0] == 7
    assert labels.data_ptr() == Y.data_ptr()
    x[0, 0] = x_before


def test_number_of_workers_is_checked():
    with pytest.raises(ValueError, match="num_workers must be a whole number of at least 0"):
        fedsift.simulate(network(), [(X, Y)], num_workers=-1)
