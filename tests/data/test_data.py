"""Data sets and their partition among clients."""

import gzip
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.io import savemat

from fedsift.data import (
    DATASETS,
    dirichlet,
    documents,
    from_dataset,
    from_huggingface,
    iid,
    load,
    partition_indices,
    shape_of,
    split,
)
from fedsift.errors import ConfigError
from fedsift.runs import RunConfig, federation_of
from fedsift.runs.parts import parts_of

labels = st.lists(st.integers(0, 5), min_size=1, max_size=120).map(np.array)
seeds = st.integers(0, 2**40)


@st.composite
def labels_and_clients(draw):
    y = draw(labels)
    return y, draw(st.integers(1, len(y)))


def label_skew(rows, y):
    """The mean total variation distance between the class shares of a client and of all data."""
    classes = y.max() + 1
    whole = np.bincount(y, minlength=classes) / len(y)
    shares = [np.bincount(y[part], minlength=classes) / len(part) for part in rows]
    return float(np.mean([np.abs(share - whole).sum() / 2 for share in shares]))


def test_validation_samples_are_training_samples_that_no_client_has():
    config = RunConfig.from_values({"validation": 0.1, "seed": 3, "clients": 5, "device": "cpu"})
    dataset = load("digits")
    parts = parts_of(config, dataset)
    ours = torch.cat([parts.test[0], *(x for x, _ in parts.clients)]).flatten(1)
    theirs = dataset.train[0].flatten(1)
    assert len(parts.test[1]) == len(theirs) // 10
    assert len(ours) == len(theirs)
    assert torch.equal(ours.unique(dim=0), theirs.unique(dim=0))
    other = parts_of(replace(config, seed=4), dataset)
    assert not torch.equal(other.test[0], parts.test[0])


@pytest.mark.parametrize(
    "values",
    [
        {"validation": 1.0},
        {"validation": -0.1},
        {"validation": 0.1, "data": "package.module:function", "model": "small-cnn"},
        {"validation": 0.1, "dataset": "sotu", "model": "llm:tiny", "partition": "documents"},
    ],
)
def test_a_wrong_validation_share_is_refused(values):
    with pytest.raises(ConfigError, match="validation"):
        RunConfig.from_values(values)


@given(labels_and_clients(), seeds)
def test_iid_assigns_every_sample_once_in_parts_of_equal_size(task, seed):
    y, clients = task
    rows = iid(y, clients, seed)
    sizes = [len(part) for part in rows]
    assert np.array_equal(np.sort(np.concatenate(rows)), np.arange(len(y)))
    assert len(rows) == clients
    assert max(sizes) - min(sizes) <= 1


@given(labels_and_clients(), seeds, st.floats(1e-6, 1e6))
def test_dirichlet_assigns_every_sample_once_and_leaves_no_client_empty(task, seed, theta):
    y, clients = task
    rows = dirichlet(y, clients, seed, theta)
    assert np.array_equal(np.sort(np.concatenate(rows)), np.arange(len(y)))
    assert len(rows) == clients
    assert min(len(part) for part in rows) >= 1


def test_dirichlet_clients_differ_more_for_smaller_theta():
    y = load("digits").train[1].numpy()
    means = [
        np.mean([label_skew(dirichlet(y, 20, seed, theta), y) for seed in range(5)])
        for theta in (0.1, 1.0, 10.0, 1000.0)
    ]
    assert means == sorted(means, reverse=True)
    assert means[0] > 0.6
    assert means[-1] < 0.15


def test_iid_clients_are_alike():
    y = load("digits").train[1].numpy()
    assert label_skew(iid(y, 20, seed=0), y) < 0.2


@pytest.mark.parametrize("partition", ["iid", "dirichlet"])
def test_a_partition_depends_only_on_its_seed(partition):
    y = np.arange(200) % 10
    first = partition_indices(partition, y, 7, seed=3, theta=0.5)
    np.random.default_rng().random(5)
    again = partition_indices(partition, y, 7, seed=3, theta=0.5)
    other = partition_indices(partition, y, 7, seed=4, theta=0.5)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("clients", [-1, 0, 11])
def test_more_clients_than_samples_are_refused(clients):
    for refuses in (
        lambda y: partition_indices("iid", y, clients, seed=0, theta=1.0),
        lambda y: iid(y, clients, seed=0),
        lambda y: dirichlet(y, clients, seed=0, theta=1.0),
        lambda y: documents(np.arange(10), clients, seed=0),
    ):
        with pytest.raises(ValueError, match="between 1 and 10"):
            refuses(np.zeros(10, np.int64))


@pytest.mark.parametrize("theta", [0.0, -1.0, float("nan"), float("inf")])
def test_a_theta_that_is_not_a_positive_number_is_refused(theta):
    with pytest.raises(ValueError, match="theta must be a positive number"):
        dirichlet(np.arange(10) % 2, 2, seed=0, theta=theta)


def test_an_unknown_partition_is_refused_with_the_list_of_known_ones():
    with pytest.raises(ValueError, match="iid, dirichlet"):
        partition_indices("sorted", np.arange(10), 2, seed=0, theta=1.0)


def test_an_unknown_dataset_is_refused_with_the_list_of_known_ones():
    with pytest.raises(ValueError, match="digits"):
        load("mnist")


def test_the_digits_are_all_of_scikit_learns_images():
    from sklearn.datasets import load_digits

    digits = load("digits")
    y = torch.cat([digits.train[1], digits.test[1]])
    assert len(digits.train[1]) == 1438
    assert len(digits.test[1]) == 359
    assert torch.equal(y.bincount(), torch.from_numpy(np.bincount(load_digits().target)))


def test_no_digit_is_in_both_the_training_and_the_test_set():
    digits = load("digits")
    train = {image.numpy().tobytes() for image in digits.train[0]}
    assert not any(image.numpy().tobytes() in train for image in digits.test[0])


def test_the_digits_have_zero_mean_and_unit_variance_on_the_train_set():
    x = load("digits").train[0]
    assert abs(float(x.mean())) < 1e-5
    assert abs(float(x.std()) - 1) < 1e-5


def test_the_split_of_the_digits_does_not_depend_on_the_runs_seed():
    ours = RunConfig.from_values({"clients": 3, "seed": 1})
    theirs = RunConfig.from_values({"clients": 3, "seed": 2})
    a, b = federation_of(ours).task, federation_of(theirs).task
    assert torch.equal(a.test[0], b.test[0])
    assert torch.equal(a.test[1], b.test[1])
    assert not torch.equal(a.clients[0][0], b.clients[0][0])


# Small versions of the official files of the image data sets.


def idx(array):
    sizes = b"".join(n.to_bytes(4, "big") for n in array.shape)
    return gzip.compress(bytes([0, 0, 8, array.ndim]) + sizes + array.astype(np.uint8).tobytes())


def noise(*shape):
    return np.random.default_rng(0).integers(0, 256, shape)


def save_mat(path, **variables):
    savemat(path, {name: x.astype(np.uint8) for name, x in variables.items()}, do_compression=True)


@pytest.fixture
def data_folder(tmp_path, monkeypatch):
    """A folder with a few samples of each data set in its official format."""
    fashion, cifar = tmp_path / "fashion-mnist", tmp_path / "cifar-10-batches-bin"
    fashion.mkdir()
    cifar.mkdir()
    for part in ("train", "t10k"):
        (fashion / f"{part}-images-idx3-ubyte.gz").write_bytes(idx(noise(6, 28, 28)))
        (fashion / f"{part}-labels-idx1-ubyte.gz").write_bytes(idx(np.arange(6)))
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        records = noise(4, 3073)
        records[:, 0] = np.arange(4)
        (cifar / f"{name}.bin").write_bytes(records.astype(np.uint8).tobytes())
    svhn = tmp_path / "svhn"
    svhn.mkdir()
    for part in ("train", "test"):
        save_mat(svhn / f"{part}_32x32.mat", X=noise(32, 32, 3, 10), y=np.arange(1, 11)[:, None])
    monkeypatch.setenv("FEDSIFT_DATA", str(tmp_path))
    monkeypatch.setattr("fedsift.data.folder.DEBIAN", tmp_path / "debian")
    return tmp_path


@pytest.mark.parametrize("name", DATASETS)
def test_the_shape_known_without_loading_is_the_shape_of_the_data(name, data_folder):
    assert shape_of(name) == load(name).shape


def test_fashion_mnist_is_read_in_the_order_of_its_files(data_folder):
    x, y = load("fashion-mnist").train
    raw = noise(6, 28, 28)
    assert x.shape == (6, 1, 28, 28)
    assert y.tolist() == [0, 1, 2, 3, 4, 5]
    expected = (raw - raw.mean()) / raw.std(ddof=1)
    assert np.allclose(x[:, 0].numpy(), expected, atol=1e-4)


def test_cifar_10_is_read_in_the_order_of_its_batches(data_folder):
    data = load("cifar-10")
    raw = noise(4, 3073)[:, 1:].reshape(4, 3, 1024)
    assert data.train[0].shape == (20, 3, 32, 32)
    assert data.train[1].tolist() == [0, 1, 2, 3] * 5
    order = np.argsort(raw[2, 1], kind="stable")
    assert bool(data.train[0][2, 1].flatten()[order].diff().min() >= 0)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("fashion-mnist", "fashion-mnist/train-images-idx3-ubyte.gz"),
        ("cifar-10", "cifar-10-batches-bin/test_batch.bin"),
        ("svhn", "svhn/train_32x32.mat"),
    ],
)
def test_the_error_for_a_missing_file_says_where_to_put_it(name, file, data_folder):
    (data_folder / file).unlink()
    with pytest.raises(ValueError, match=f"no .*{file}.*fedsift data get {name}.*FEDSIFT_DATA"):
        load(name)


BROKEN = {
    "no gzip": b"<html>not found</html>",
    "a cut gzip": idx(noise(6, 28, 28))[:900],
    "nothing": b"",
    "nothing compressed": gzip.compress(b""),
    "no IDX": gzip.compress(b"P5 28 28 255"),
    "fewer bytes than promised": gzip.compress(gzip.decompress(idx(noise(6, 28, 28)))[:-1]),
    "more images than labels": idx(noise(7, 28, 28)),
    "images of another size": idx(noise(6, 20, 20)),
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_a_broken_file_of_fashion_mnist_is_refused_by_name(content, data_folder):
    file = data_folder / "fashion-mnist" / "train-images-idx3-ubyte.gz"
    file.write_bytes(content)
    with pytest.raises(ValueError, match="fashion-mnist"):
        load("fashion-mnist")


@pytest.mark.parametrize("content", [b"", b"x" * 3072])
def test_a_broken_file_of_cifar_10_is_refused_by_name(content, data_folder):
    (data_folder / "cifar-10-batches-bin" / "test_batch.bin").write_bytes(content)
    with pytest.raises(ValueError, match="cifar-10"):
        load("cifar-10")


def test_svhn_has_its_samples_first_and_label_10_becomes_0(data_folder):
    x, y = load("svhn").train
    raw = noise(32, 32, 3, 10)
    assert x.shape == (10, 3, 32, 32)
    assert y.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0]
    red = raw[:, :, 0]
    expected = (red[:, :, 7] - red.mean()) / red.std(ddof=1)
    assert np.allclose(x[7, 0].numpy(), expected, atol=1e-4)


def a_matlab_cell(path):
    cell = np.empty((32, 32, 3, 2), object)
    cell[:] = 0
    savemat(path, {"X": cell, "y": np.ones((2, 1))})


BROKEN_SVHN = {
    "nothing": lambda path: path.write_bytes(b""),
    "a web page": lambda path: path.write_bytes(b"<html>not found</html>" * 40),
    "a cut file": lambda path: path.write_bytes(path.read_bytes()[:-4000]),
    "no labels": lambda path: save_mat(path, X=noise(32, 32, 3, 4)),
    "fewer labels": lambda path: save_mat(path, X=noise(32, 32, 3, 4), y=np.ones((3, 1))),
    "floats": lambda path: savemat(path, {"X": np.zeros((32, 32, 3, 2)), "y": np.ones((2, 1))}),
    "cells": a_matlab_cell,
    "a pickle": lambda path: path.write_bytes(pickle.dumps(Evil())),
}


class Evil:
    def __reduce__(self):
        return (pytest.fail, ("a file was unpickled",))


@pytest.mark.parametrize("spoil", BROKEN_SVHN.values(), ids=BROKEN_SVHN)
def test_a_broken_file_of_svhn_is_refused_by_name_and_never_unpickled(
    spoil, data_folder, monkeypatch
):
    spoil(data_folder / "svhn" / "train_32x32.mat")
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, Evil)
    with pytest.raises(ValueError, match="svhn"):
        load("svhn")


def test_debians_files_are_read_if_the_data_folder_has_none(data_folder, monkeypatch):
    (data_folder / "debian").mkdir()
    (data_folder / "fashion-mnist").rename(data_folder / "debian" / "fashion-mnist")
    assert load("fashion-mnist").train[1].tolist() == [0, 1, 2, 3, 4, 5]


# Conversion.


def test_split_gives_each_client_its_rows():
    x, y = torch.arange(12.0).view(6, 2), torch.arange(6)
    parts = split((x, y), [np.array([5, 0]), torch.tensor([3]), [1, 1, 2]])
    assert [own.tolist() for _, own in parts] == [[5, 0], [3], [1, 1, 2]]
    assert parts[0][0].tolist() == [[10.0, 11.0], [0.0, 1.0]]


@pytest.mark.parametrize("rows", [[], [6], [-1], [0.5], [True], [[0, 1]]], ids=str)
def test_split_refuses_rows_that_are_not_in_the_data(rows):
    with pytest.raises(ValueError, match="client 1"):
        split((torch.zeros(6, 2), torch.arange(6)), [[0], rows])


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 2500

    def __getitem__(self, place):
        if place >= len(self):
            raise IndexError
        return np.full((1, 2), place, np.float32), place**2


def test_any_torch_dataset_becomes_two_tensors_in_its_order():
    x, y = from_dataset(Squares())
    assert (x.shape, x.dtype, y.dtype) == ((2500, 1, 2), torch.float32, torch.int64)
    assert torch.equal(y, torch.arange(2500) ** 2)
    assert torch.equal(x[:, 0, 1], torch.arange(2500.0))


class FakeHuggingFaceDataset:
    """Only what the documentation of Hugging Face's Dataset guarantees."""

    def __init__(self, columns):
        self.columns, self.column_names = columns, list(columns)

    def with_format(self, type):
        assert type == "numpy"
        return self

    def __getitem__(self, rows):
        return {name: values[rows] for name, values in self.columns.items()}


@pytest.mark.parametrize(
    ("given", "shape"), [((7, 8, 8), (7, 1, 8, 8)), ((7, 8, 8, 3), (7, 3, 8, 8))]
)
def test_huggingface_images_become_channels_first_floats_from_0_to_1(given, shape):
    raw = noise(*given).astype(np.uint8)
    x, y = from_huggingface(FakeHuggingFaceDataset({"img": raw, "label": np.arange(7)}), x="img")
    assert (x.shape, x.dtype, y.tolist()) == (shape, torch.float32, list(range(7)))
    assert np.allclose(x[4, -1].numpy() * 255, raw[4].reshape(8, 8, -1)[..., -1])


def test_huggingface_numbers_are_not_changed():
    x, y = from_huggingface(FakeHuggingFaceDataset({"x": np.eye(3), "y": np.ones(3)}), "x", "y")
    assert torch.equal(x, torch.eye(3, dtype=torch.float64))
    assert y.dtype == torch.float64


def test_the_error_for_a_missing_column_lists_the_columns():
    with pytest.raises(ValueError, match=r"no column 'image'; the columns are \['img', 'label'\]"):
        from_huggingface(FakeHuggingFaceDataset({"img": noise(2, 4, 4), "label": np.arange(2)}))


def test_a_theta_whose_sums_would_overflow_gives_equal_shares():
    rows = dirichlet(np.arange(1000) % 10, 7, 0, 1e308)
    assert max(map(len, rows)) - min(map(len, rows)) <= 10
