"""A local step on clients that are torch Datasets, against clients that are tensors.

    python benchmarks/datasets.py --out benchmarks/results/datasets.json

The same samples come as tensors, as a Dataset of tensors, as a Dataset of NumPy arrays, and as one
with ``__getitems__``; none is augmented. Their rounds alternate on one thread, and the milliseconds
per step are CPU time; other programs matter as far as they use the same caches, so the load is
recorded. ``ms`` is the median and ``best_ms`` the fastest round. ``ratio`` has the quartiles
of the pairs of rounds, ``best_ratio`` compares the fastest ones. ``own_ms`` is what the Dataset's
own methods take to return 64 items, and ``without_own`` the best ratio without it: what fedsift
adds. At last, items that take a millisecond of waiting each, with and without worker processes, in
seconds of a round.
"""

import argparse
import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median, quantiles

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from fedsift import algorithms, models
from fedsift.engine import Reference
from fedsift.federation.round import Federation
from fedsift.runs.run import environment_on
from fedsift.simulation import Options, initial_snapshot, prepare

BATCH, SAMPLES = 64, 640
MODELS = {"cnn": ((1, 28, 28), 60), "resnet18-bn": ((3, 32, 32), 1)}
"""Shapes of the samples, and steps per round."""


class Items(Dataset):
    """Tensors or arrays, one sample at a time."""

    def __init__(self, x, y) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int):
        return self.x[row], self.y[row]


class Batches(Items):
    def __getitems__(self, rows: list[int]):
        return list(zip(self.x[rows], self.y[rows], strict=True))


class Waiting(Items):
    def __getitem__(self, row: int):
        time.sleep(0.001)
        return super().__getitem__(row)


def sources(x: Tensor, y: Tensor) -> dict[str, object]:
    return {
        "tensors": (x, y),
        "Dataset of tensors": Items(x, y),
        "Dataset of arrays": Items(x.numpy(), y.numpy()),
        "Dataset with __getitems__": Batches(x, y),
    }


def federation(model: str, client: object, steps: int, workers: int = 0) -> Federation:
    made = models.build(model, MODELS[model][0], seed=0)
    method = algorithms.fedsgd(local_steps=steps, lr=1e-3)
    fed = prepare(made, [client], None, method, Options(BATCH, device="cpu", num_workers=workers))
    return replace(fed, engine=Reference(fed.task))


def samples(model: str) -> tuple[Tensor, Tensor]:
    draw, (shape, _) = torch.Generator().manual_seed(0), MODELS[model]
    return torch.randn(SAMPLES, *shape, generator=draw), torch.arange(SAMPLES) % 10


def rounds_of(fed: Federation, clock) -> Iterator[float]:
    """Yield the time of each further round."""
    snapshot = initial_snapshot(fed)
    while True:
        began = clock()
        snapshot, _ = fed.run_round(snapshot)
        yield clock() - began


def compare(model: str, repeats: int) -> list[dict[str, object]]:
    steps = MODELS[model][1]
    clients = sources(*samples(model))
    runs = {
        name: rounds_of(federation(model, client, steps), time.process_time)
        for name, client in clients.items()
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            seconds = next(run)
            if repeat:  # the first round also warms up
                times[name].append(1000 * seconds / steps)
    rows = []
    for name, client in clients.items():
        own = 0.0 if name == "tensors" else own_ms(client)
        rows.append({"model": model, "client": name, **row(times[name], times["tensors"], own)})
        print(rows[-1], flush=True)
    return rows


def row(times: list[float], of_tensors: list[float], own: float) -> dict[str, object]:
    ratios = [a / b for a, b in zip(times, of_tensors, strict=True)]
    best, fastest = min(times), min(of_tensors)
    return {
        "ms": median(times),
        "best_ms": best,
        "ratio": quantiles(ratios, method="inclusive"),
        "best_ratio": best / fastest,
        "own_ms": own,
        "without_own": (best - own) / fastest,
    }


def own_ms(client: Items, repeats: int = 200) -> float:
    """Return what the Dataset itself takes to return the items of a batch."""
    rows = np.random.default_rng(0).permutation(SAMPLES)[:BATCH].tolist()
    fetch = getattr(client, "__getitems__", lambda rows: [client[row] for row in rows])
    found = []
    for _ in range(repeats):
        began = time.process_time()
        fetch(rows)
        found.append(1000 * (time.process_time() - began))
    return min(found)


def with_workers(workers: int) -> dict[str, object]:
    """Return the wall time of a round of ten steps on items that take a millisecond each."""
    run = rounds_of(federation("cnn", Waiting(*samples("cnn")), 10, workers), time.perf_counter)
    next(run)  # starts the workers
    found = {"workers": workers, "seconds": median(next(run) for _ in range(3))}
    print(found, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    given = parser.parse_args()
    torch.set_num_threads(1)
    before = os.getloadavg()[0]
    found = {
        "steps": [row for model in given.models for row in compare(model, given.repeats)],
        "waiting": [with_workers(workers) for workers in (0, 1, 2, 4)],
        "load": {"before": before, "after": os.getloadavg()[0], "cores": os.cpu_count()},
        "environment": environment_on("cpu"),
    }
    print(table(found["steps"]))
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n")


def table(rows: list[dict[str, object]]) -> str:
    """Return the table of README.md."""
    lines = [
        "| model | client | ms per step | times tensors | fastest | own ms | without its own |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for each in rows:
        low, middle, high = each["ratio"]
        lines.append(
            f"| {each['model']} | {each['client']} | {each['ms']:.2f} | "
            f"{middle:.2f} ({low:.2f} to {high:.2f}) | {each['best_ratio']:.2f} | "
            f"{each['own_ms']:.2f} | {each['without_own']:.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
