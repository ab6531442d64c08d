"""An empty working directory with a tiny Fashion-MNIST."""

import gzip

import numpy as np
import pytest

from fedsift.reproduce.runner import cached_dataset


def idx(array):
    sizes = b"".join(n.to_bytes(4, "big") for n in array.shape)
    return gzip.compress(bytes([0, 0, 8, array.ndim]) + sizes + array.astype(np.uint8).tobytes())


@pytest.fixture
def cwd(tmp_path, monkeypatch):
    """An empty working directory, next to a data folder with 60 images."""
    draw = np.random.default_rng(0)
    folder = tmp_path / "data" / "fashion-mnist"
    folder.mkdir(parents=True)
    for part in ("train", "t10k"):
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(
            idx(draw.integers(0, 256, (60, 28, 28)))
        )
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(idx(np.arange(60) % 10))
    monkeypatch.setenv("FEDSIFT_DATA", str(tmp_path / "data"))
    monkeypatch.setattr("fedsift.data.folder.DEBIAN", tmp_path / "debian")
    monkeypatch.setattr("fedsift.reproduce.runner.cached_dataset", cached_dataset.__wrapped__)
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return work
