"""Data sets by name: images as normalized tensors, text as character codes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsift.data import text
from fedsift.data.authors import digest_of_authors, is_text
from fedsift.data.image_files import Images, read_cifar10, read_fashion_mnist, read_svhn
from fedsift.seeding import stream
from fedsift.task import Loss


@dataclass(frozen=True)
class Dataset:
    """A training set and a test set.

    Images are ``(n, channels, height, width)`` with class labels ``(n,)``. Text is character codes
    ``(n, context)`` with the code that follows each character; ``documents`` has the number of the
    document of each training sample.
    """

    name: str
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    documents: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return tuple(self.train[0].shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the samples; integers are character codes."""
        return self.train[0].dtype

    @property
    def labels(self) -> NDArray[np.int64]:
        """The class of each training sample or, for text, its document; partitions use it."""
        found = self.train[1] if self.documents is None else self.documents
        return found.numpy()

    @property
    def loss(self) -> Loss:
        """The cross-entropy that fits the targets."""
        return text.loss_of(self.train[1])


def with_validation_split(dataset: Dataset, number: int, seed: int) -> Dataset:
    """Return a data set whose test set is replaced by samples taken from its training set.

    It is for choosing settings without looking at the test set.

    >>> x, y = torch.arange(10.0), torch.arange(10) % 2
    >>> held = with_validation_split(Dataset("ten", (x, y), (x[:0], y[:0])), 3, seed=0)
    >>> len(held.train[0]), len(held.test[0]), sorted(torch.cat([held.train[0], held.test[0]]))[0]
    (7, 3, tensor(0.))
    """
    x, y = dataset.train
    order = torch.from_numpy(stream(seed, "held out").permutation(len(x)))
    held, rest = order[:number], order[number:]
    documents = None if dataset.documents is None else dataset.documents[rest]
    return replace(dataset, train=(x[rest], y[rest]), test=(x[held], y[held]), documents=documents)


def digits() -> Dataset:
    """Load scikit-learn's handwritten digits: 1,797 images of 8 × 8, one fifth for testing."""
    from sklearn.datasets import load_digits  # imported late, as it takes a second

    bunch = load_digits()
    images = torch.from_numpy(bunch.images.astype(np.float32))[:, None]
    labels = torch.from_numpy(bunch.target.astype(np.int64))
    # The split does not depend on the seed of the run: all runs have the same test images.
    order = torch.from_numpy(stream(0, "digits split").permutation(len(images)))
    cut = len(images) // 5
    test, train = order[:cut], order[cut:]
    x, x_test = normalized(images[train], images[test])
    return Dataset("digits", (x, labels[train]), (x_test, labels[test]))


def fashion_mnist() -> Dataset:
    """Load Fashion-MNIST: 60,000 and 10,000 gray images of 28 × 28."""
    return _images("fashion-mnist", read_fashion_mnist("train"), read_fashion_mnist("t10k"))


def cifar10() -> Dataset:
    """Load CIFAR-10: 50,000 and 10,000 color images of 32 × 32."""
    return _images("cifar-10", read_cifar10("data"), read_cifar10("test"))


def svhn() -> Dataset:
    """Load SVHN's cropped digits: 73,257 and 26,032 color images of 32 × 32."""
    return _images("svhn", read_svhn("train"), read_svhn("test"))


def python_stdlib() -> Dataset:
    """Load the source code of Python's standard library as characters."""
    found = text.read_stdlib()
    return Dataset("python-stdlib", found.train, found.test, found.documents)


def _images(name: str, train: Images, test: Images) -> Dataset:
    x, x_test = normalized(_floats(train), _floats(test))
    return Dataset(name, (x, torch.from_numpy(train[1])), (x_test, torch.from_numpy(test[1])))


def _floats(images: Images) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(images[0], np.float32))


def normalized(train: Tensor, test: Tensor) -> tuple[Tensor, Tensor]:
    """Normalize both sets to zero mean and unit variance per channel of the training images.

    The whole training set determines the scale, so that it is the same for all clients.

    >>> x, x_test = normalized(torch.tensor([0.0, 2.0]).view(2, 1, 1, 1), torch.ones(1, 1, 1, 1))
    >>> x.flatten().tolist(), x_test.item()
    ([-0.7071067690849304, 0.7071067690849304], 0.0)
    """
    axes = (0, 2, 3)
    mean, deviation = train.mean(axes, keepdim=True), train.std(axes, keepdim=True)
    return (train - mean) / deviation, (test - mean) / deviation


@dataclass(frozen=True)
class DatasetEntry:
    """A function that loads a data set, and properties that are known without loading it.

    ``comes_with`` names the package that contains a data set without download. ``digest`` returns
    the SHA-256 of a data set whose content depends on the machine.
    """

    load: Callable[[], Dataset]
    shape: tuple[int, ...]
    comes_with: str = ""
    digest: Callable[[], str] | None = None


DATASETS: dict[str, DatasetEntry] = {
    "digits": DatasetEntry(digits, (1, 8, 8), comes_with="scikit-learn"),
    "fashion-mnist": DatasetEntry(fashion_mnist, (1, 28, 28)),
    "cifar-10": DatasetEntry(cifar10, (3, 32, 32)),
    "svhn": DatasetEntry(svhn, (3, 32, 32)),
    "python-stdlib": DatasetEntry(
        python_stdlib, (text.CONTEXT,), comes_with="Python", digest=text.stdlib_digest
    ),
}
"""All data sets by their command-line names."""


def load(name: str) -> Dataset:
    """Load the data set with this name, in which ``_`` is the same as ``-``.

    >>> load("digits").shape
    (1, 8, 8)
    """
    return _entry(name).load()


def shape_of(name: str) -> tuple[int, ...]:
    """Return the shape of a data set's samples without loading it.

    >>> shape_of("digits")
    (1, 8, 8)
    """
    return _entry(name).shape


def digest_of(name: str) -> str:
    """Return the SHA-256 of a data set whose content depends on the machine, otherwise ''.

    >>> digest_of("digits"), len(digest_of("python-stdlib"))
    ('', 64)
    """
    if is_text(name):
        return digest_of_authors(name)
    digest = DATASETS[name].digest if name in DATASETS else None
    return digest() if digest else ""


def _entry(name: str) -> DatasetEntry:
    name = name.replace("_", "-")
    if is_text(name):
        raise ValueError(
            f"{name} is text for language models, as in 'fedsift run --model llm:PATH --dataset "
            f"{name}'; here, choose one of: {', '.join(DATASETS)}"
        )
    if name not in DATASETS:
        raise ValueError(f"unknown dataset {name!r}; choose one of: {', '.join(DATASETS)}")
    return DATASETS[name]
