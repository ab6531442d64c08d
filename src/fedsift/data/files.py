"""Read the official files of image data sets. No format here can hold code."""

from __future__ import annotations

import gzip
import os
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedsift.data.sources import SOURCES

Images = tuple[NDArray[np.uint8], NDArray[np.int64]]
"""Images ``(n, channels, height, width)`` and their labels."""

DEBIAN = Path("/usr/share/datasets")
"""Where Debian's packages put data sets; its dataset-fashion-mnist has the official files."""


def data_folder() -> Path:
    """Where data sets lie: FEDSIFT_DATA, or a folder of the user's cache."""
    return Path(os.environ.get("FEDSIFT_DATA") or Path.home() / ".cache" / "fedsift" / "data")


def use_data_folder(path: Path | None) -> None:
    """Set FEDSIFT_DATA for this process and those it starts; None leaves it as it is."""
    if path is not None:
        os.environ["FEDSIFT_DATA"] = str(path)


def use_existing_data_folder(path: Path | None) -> None:
    """The same for who reads: a folder that is not there is a slip."""
    if path is not None and not path.is_dir():
        raise ValueError(f"there is no data folder {path}: 'fedsift data get' would make it")
    use_data_folder(path)


def find(path: str) -> Path | None:
    """A file in the data folder, or where Debian puts it; None if it is in neither.

    >>> find("no-such-set/no-such-file") is None
    True
    """
    places = (data_folder() / path, DEBIAN / path)
    return next((place for place in places if place.exists()), None)


def read_fashion_mnist(part: str) -> Images:
    """Fashion-MNIST's ``train`` or ``t10k`` files, in the IDX format."""
    names = ("images-idx3-ubyte.gz", "labels-idx1-ubyte.gz")
    images, labels = (_idx(_path("fashion-mnist", f"{part}-{name}")) for name in names)
    if images.shape != (len(labels), 28, 28) or labels.ndim != 1:
        raise ValueError(
            f"the files of fashion-mnist do not fit together; {_mend('fashion-mnist')}"
        )
    return images[:, None], labels.astype(np.int64)


def read_cifar10(part: str) -> Images:
    """CIFAR-10's ``data`` or ``test`` batches: records of one label and 3 × 32 × 32 values."""
    names = [f"data_batch_{i}.bin" for i in range(1, 6)] if part == "data" else ["test_batch.bin"]
    raw = np.concatenate([np.fromfile(_path("cifar-10", name), np.uint8) for name in names])
    if raw.size == 0 or raw.size % 3073:
        raise ValueError(f"the files of cifar-10 are not its binary batches; {_mend('cifar-10')}")
    records = raw.reshape(-1, 3073)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].astype(np.int64)


def read_svhn(part: str) -> Images:
    """SVHN's ``train`` or ``test`` file of cropped digits, in MATLAB's format, where 0 is 10."""
    from scipy.io import loadmat  # here, as most commands do without it

    path = _path("svhn", f"{part}_32x32.mat")
    try:
        found = loadmat(path, variable_names=("X", "y"))
        images, labels = found["X"], found["y"].reshape(-1)
    except Exception as problem:  # a hostile file can make the reader fail in many ways
        raise ValueError(f"{path} cannot be read: {problem}; {_mend('svhn')}") from None
    if images.dtype != np.uint8 or images.shape != (32, 32, 3, len(labels)):
        raise ValueError(f"{path} does not hold SVHN's cropped digits; {_mend('svhn')}")
    return np.ascontiguousarray(images.transpose(3, 2, 0, 1)), labels.astype(np.int64) % 10


def _path(dataset: str, name: str) -> Path:
    file = next(file for file in SOURCES[dataset].files if file.path.endswith(f"/{name}"))
    path = find(file.path)
    if path is None:
        raise ValueError(
            f"there is no {data_folder() / file.path}: get it with 'fedsift data get {dataset}', "
            f"or point --data-dir or FEDSIFT_DATA at the folder that holds {file.path}"
        )
    return path


def _mend(dataset: str) -> str:
    return f"look at them with 'fedsift data check {dataset}'"


def _idx(path: Path) -> NDArray[np.uint8]:
    """An array in the IDX format: two zeros, type, number of axes, their sizes, the data."""
    try:
        with gzip.open(path, "rb") as file:
            raw = file.read()
    except (OSError, EOFError, zlib.error) as problem:
        raise ValueError(f"{path} cannot be read: {problem}; {_mend('fashion-mnist')}") from None
    axes = raw[3] if len(raw) > 3 and raw[:3] == b"\0\0\x08" else 0
    start = 4 + 4 * axes
    if not axes or len(raw) < start:
        raise ValueError(f"{path} is not an IDX file of bytes; {_mend('fashion-mnist')}")
    shape = np.frombuffer(raw, ">u4", axes, offset=4).astype(int)
    if len(raw) - start != shape.prod():
        raise ValueError(f"{path} is cut off or too long; {_mend('fashion-mnist')}")
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)
