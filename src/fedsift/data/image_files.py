"""Read the official files of the image data sets. None of these formats can contain code."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedsift.data.folder import data_folder, find_file
from fedsift.data.official_sources import SOURCES

Images = tuple[NDArray[np.uint8], NDArray[np.int64]]
"""Images ``(n, channels, height, width)`` and their labels."""


def read_fashion_mnist(part: str) -> Images:
    """Read Fashion-MNIST's ``train`` or ``t10k`` files, in the IDX format."""
    names = ("images-idx3-ubyte.gz", "labels-idx1-ubyte.gz")
    images, labels = (_read_idx(_path("fashion-mnist", f"{part}-{name}")) for name in names)
    if images.shape != (len(labels), 28, 28) or labels.ndim != 1:
        raise ValueError(
            f"the images and labels of fashion-mnist do not match; {_advice('fashion-mnist')}"
        )
    return images[:, None], labels.astype(np.int64)


def read_cifar10(part: str) -> Images:
    """Read CIFAR-10's ``data`` or ``test`` batches: records of a label and 3 × 32 × 32 values."""
    names = [f"data_batch_{i}.bin" for i in range(1, 6)] if part == "data" else ["test_batch.bin"]
    raw = np.concatenate([np.fromfile(_path("cifar-10", name), np.uint8) for name in names])
    if raw.size == 0 or raw.size % 3073:
        raise ValueError(f"the files of cifar-10 are not its binary batches; {_advice('cifar-10')}")
    records = raw.reshape(-1, 3073)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].astype(np.int64)


def read_svhn(part: str) -> Images:
    """Read SVHN's ``train`` or ``test`` file of cropped digits: MATLAB's format, with 10 for 0."""
    from scipy.io import loadmat  # imported late, as few commands need it

    path = _path("svhn", f"{part}_32x32.mat")
    try:
        found = loadmat(path, variable_names=("X", "y"))
        images, labels = found["X"], found["y"].reshape(-1)
    except Exception as problem:  # the reader raises many types of errors for a malformed file
        raise ValueError(f"{path} cannot be read: {problem}; {_advice('svhn')}") from None
    if images.dtype != np.uint8 or images.shape != (32, 32, 3, len(labels)):
        raise ValueError(f"{path} does not hold SVHN's cropped digits; {_advice('svhn')}")
    return np.ascontiguousarray(images.transpose(3, 2, 0, 1)), labels.astype(np.int64) % 10


def _path(dataset: str, name: str) -> Path:
    file = next(file for file in SOURCES[dataset].files if file.path.endswith(f"/{name}"))
    path = find_file(file.path)
    if path is None:
        raise ValueError(
            f"there is no {data_folder() / file.path}; download it with 'fedsift data get "
            f"{dataset}', or set --data-dir or FEDSIFT_DATA to the folder that has {file.path}"
        )
    return path


def _advice(dataset: str) -> str:
    return f"check them with 'fedsift data check {dataset}'"


def _read_idx(path: Path) -> NDArray[np.uint8]:
    """Read an array in the IDX format: two zeros, type, number of axes, sizes, data."""
    try:
        with gzip.open(path, "rb") as file:
            raw = file.read()
    except (OSError, EOFError, zlib.error) as problem:
        raise ValueError(f"{path} cannot be read: {problem}; {_advice('fashion-mnist')}") from None
    axes = raw[3] if len(raw) > 3 and raw[:3] == b"\0\0\x08" else 0
    start = 4 + 4 * axes
    if not axes or len(raw) < start:
        raise ValueError(f"{path} is not an IDX file of bytes; {_advice('fashion-mnist')}")
    shape = np.frombuffer(raw, ">u4", axes, offset=4).astype(int)
    if len(raw) - start != shape.prod():
        raise ValueError(f"{path} is truncated or too long; {_advice('fashion-mnist')}")
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)
