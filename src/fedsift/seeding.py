"""Random streams named by their purpose, so that draws do not depend on earlier draws."""

from __future__ import annotations

import zlib

import numpy as np


def stream(seed: int, *purpose: int | str) -> np.random.Generator:
    """Return the generator for one purpose, such as ``stream(seed, "batches", round, client)``.

    >>> [int(stream(0, "cohort", 1).integers(100)) for _ in range(2)]
    [81, 81]
    """
    return np.random.default_rng(_key(seed, purpose))


def torch_seed(seed: int, *purpose: int | str) -> int:
    """Return a seed for a PyTorch generator, also named by its purpose.

    >>> torch_seed(0, "model") != torch_seed(0, "dropout")
    True
    """
    return torch_seeds(1, seed, *purpose)[0]


def torch_seeds(number: int, seed: int, *purpose: int | str) -> list[int]:
    """Return this many seeds for one purpose; a greater number begins with the same seeds.

    >>> torch_seeds(3, 0, "items")[:2] == torch_seeds(2, 0, "items")
    True
    """
    words = np.random.SeedSequence(_key(seed, purpose)).generate_state(number, np.uint64)
    seeds: list[int] = (words >> 1).tolist()
    return seeds


def _key(seed: int, purpose: tuple[int | str, ...]) -> list[int]:
    return [seed, *(zlib.crc32(p.encode()) if isinstance(p, str) else p for p in purpose)]
