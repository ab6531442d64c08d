"""Read the official files of image data sets. No format here can hold code."""

from __future__ import annotations

import gzip
import os
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Images = tuple[NDArray[np.uint8], NDArray[np.int64]]
"""Images ``(n, channels, height, width)`` and their labels."""

FASHION_MNIST = "fashion-mnist"
FASHION_FILES = ("images-idx3-ubyte.gz", "labels-idx1-ubyte.gz")
CIFAR10 = "cifar-10-batches-bin"
CIFAR10_TRAIN = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
CIFAR10_TEST = ("test_batch.bin",)


def data_folder() -> Path:
    """Where data sets lie: FEDSIFT_DATA, or a folder of the user's cache."""
    return Path(os.environ.get("FEDSIFT_DATA", Path.home() / ".cache" / "fedsift" / "data"))


def read_fashion_mnist(part: str) -> Images:
    """Fashion-MNIST's ``train`` or ``t10k`` files, in the IDX format."""
    images, labels = (_idx(_find(FASHION_MNIST, f"{part}-{name}")) for name in FASHION_FILES)
    if images.shape != (len(labels), 28, 28) or labels.ndim != 1:
        raise ValueError(f"{data_folder() / FASHION_MNIST} holds files that do not fit together")
    return images[:, None], labels.astype(np.int64)


def read_cifar10(names: tuple[str, ...]) -> Images:
    """CIFAR-10's binary batches: records of one label and 3 × 32 × 32 values."""
    raw = np.concatenate([np.fromfile(_find(CIFAR10, name), np.uint8) for name in names])
    if raw.size == 0 or raw.size % 3073:
        raise ValueError(f"{data_folder() / CIFAR10} holds files that are not CIFAR-10's batches")
    records = raw.reshape(-1, 3073)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].astype(np.int64)


def _find(folder: str, name: str) -> Path:
    path = data_folder() / folder / name
    if not path.exists():
        raise ValueError(
            f"there is no {path}: put the official file there, or point FEDSIFT_DATA at its folder"
        )
    return path


def _idx(path: Path) -> NDArray[np.uint8]:
    """An array in the IDX format: two zeros, type, number of axes, their sizes, the data."""
    try:
        with gzip.open(path, "rb") as file:
            raw = file.read()
    except (OSError, EOFError, zlib.error) as problem:
        raise ValueError(f"{path} cannot be read: {problem}") from None
    axes = raw[3] if len(raw) > 3 and raw[:3] == b"\0\0\x08" else 0
    start = 4 + 4 * axes
    if not axes or len(raw) < start:
        raise ValueError(f"{path} is not an IDX file of bytes")
    shape = np.frombuffer(raw, ">u4", axes, offset=4).astype(int)
    if len(raw) - start != shape.prod():
        raise ValueError(f"{path} is cut off or too long")
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)
