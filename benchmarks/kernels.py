"""The time of a gradient of small networks, in C and in PyTorch, on one core.

    python benchmarks/kernels.py --out benchmarks/results/kernels.json

Both compute the same gradient of a batch of 64, ten times in a row and alternating, as in training.
Milliseconds are the minimum.
"""

import argparse
import copy
import json
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import torch
from torch import nn

from fedsift.engine.client import Trainer
from fedsift.engine.cpu import native
from fedsift.models.convnets import cnn, small_cnn
from fedsift.runs.config import RunConfig
from fedsift.runs.run import environment
from fedsift.task import Task
from fedsift.vector import Layout

BATCH, CONSECUTIVE = 64, 10


def lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 10),
    )  # fmt: skip


def wider() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(4096, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def linear() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(),
        nn.Linear(200, 10),
    )  # fmt: skip


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "the paper's CNN": (cnn, (1, 28, 28)),
    "small-cnn": (small_cnn, (1, 8, 8)),
    "a LeNet for CIFAR-10": (lenet, (3, 32, 32)),
    "32 and 64 channels of 3 x 3": (wider, (3, 32, 32)),
    "linear layers, 784 to 200 to 200 to 10": (linear, (1, 28, 28)),
}


def trainer_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Trainer:
    copied = copy.deepcopy(model)
    loss = nn.functional.cross_entropy
    return Trainer(Task(copied, loss, [(x, y)], None, BATCH, 0, Layout.of(copied)))


def milliseconds(make: Callable[[], nn.Module], shape: tuple[int, ...], repeats: int) -> dict:
    torch.manual_seed(0)
    model, x, y = make(), torch.randn(BATCH, *shape), torch.arange(BATCH) % 10
    ours = trainer_of(model, x, y)
    with patch.object(native, "load", lambda: None):
        theirs = trainer_of(model, x, y)
    assert ours.recorded(x.shape[1:], BATCH)
    assert not theirs.recorded(x.shape[1:], BATCH)
    best = {"c": float("inf"), "pytorch": float("inf")}
    for _ in range(repeats):
        for name, trainer in CONSECUTIVE * (("c", ours),) + CONSECUTIVE * (("pytorch", theirs),):
            began = time.perf_counter()
            trainer.differentiate(trainer.w.clone(), x, y)
            best[name] = min(best[name], 1e3 * (time.perf_counter() - began))
    return {**best, "ratio": best["pytorch"] / best["c"]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=10, help="repetitions of each")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if native.load() is None:
        parser.error("there is no C compiler, so there are no kernels to compare")
    torch.set_num_threads(1)
    about = {"environment": environment(RunConfig(device="cpu")), "seed": 0, "batch": BATCH}
    rows = []
    for name, (make, shape) in NETWORKS.items():
        rows.append({"network": name, **milliseconds(make, shape, arguments.repeats)})
        print(
            "{network}: {c:.2f} ms in C, {pytorch:.2f} in PyTorch, {ratio:.2f} x".format(**rows[-1])
        )
    if arguments.out:
        arguments.out.write_text(json.dumps({**about, "milliseconds": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
