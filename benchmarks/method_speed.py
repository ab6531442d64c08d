"""The time of a round of the paper's methods and of sift, against an earlier commit.

python benchmarks/method_speed.py --out benchmarks/results/method_speed.json

The earlier commit is checked out into a temporary folder. Its rounds and this tree's alternate, one
process for each, on one core. What is timed is the CPU time of a round of 5 clients × 30 steps × 64
images with the paper's CNN, without testing the model.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).parents[1]
BEFORE = "4cde729"
METHODS = ("fedadam_ssm", "fedadam", "sift")
CLIENTS, IMAGES, STEPS, BATCH = 5, 256, 30, 64


def paper_cnn() -> nn.Module:
    """The network of ``fedsift.models``, for which both commits have kernels in C."""
    return nn.Sequential(
        nn.Conv2d(1, 10, 5), nn.MaxPool2d(2), nn.ReLU(),
        nn.Conv2d(10, 20, 5), nn.MaxPool2d(2), nn.ReLU(),
        nn.Flatten(), nn.Linear(320, 50), nn.ReLU(), nn.Linear(50, 10),
    )  # fmt: skip


def federation(name: str) -> Any:
    """A federation of whichever fedsift is on the path."""
    algorithms = importlib.import_module("fedsift.algorithms")
    prepare = importlib.import_module("fedsift.simulation").prepare
    torch.manual_seed(0)
    model = paper_cnn()
    clients = [
        (torch.randn(IMAGES, 1, 28, 28), torch.randint(10, (IMAGES,))) for _ in range(CLIENTS)
    ]
    options = {
        "batch_size": BATCH, "participation": 1.0, "dropout": 0.0, "min_clients": 0,
        "wire": "count", "loss": nn.functional.cross_entropy, "seed": 0, "device": "cpu",
    }  # fmt: skip
    algorithm = getattr(algorithms, name)(local_steps=STEPS)
    try:
        chosen = importlib.import_module("fedsift.simulation").Options(**options)
    except AttributeError:  # before there was a class for them
        return prepare(model, clients, None, algorithm, **options)
    return prepare(model, clients, None, algorithm, chosen)


def serve() -> None:
    """Run a round of each method that standard input names; print its CPU seconds."""
    made = {name: federation(name) for name in METHODS}
    is_new = hasattr(next(iter(made.values())), "run_round")
    play = {name: fed.run_round if is_new else fed.play for name, fed in made.items()}
    snapshots = {n: fed.initial_snapshot() if is_new else fed.first() for n, fed in made.items()}
    for line in sys.stdin:
        name = line.strip()
        began = time.process_time()
        snapshots[name], _ = play[name](snapshots[name])
        print(time.process_time() - began, flush=True)


@contextmanager
def worker(source: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that imports fedsift from a folder."""
    process = subprocess.Popen(
        [sys.executable, __file__, "--serve"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def one_round(process: subprocess.Popen[str], name: str) -> float:
    """Let a process run a round, and return its CPU seconds."""
    assert process.stdin
    assert process.stdout
    process.stdin.write(name + "\n")
    process.stdin.flush()
    return float(process.stdout.readline())


@contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """The source of a commit, in a temporary folder."""
    with TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--detach", "-q", str(tree), commit], check=True)
        try:
            yield tree / "src"
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def measure(repeats: int) -> dict[str, list[tuple[float, float]]]:
    """The CPU seconds of rounds before and after, in pairs."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    with ExitStack() as stack:
        source = stack.enter_context(checked_out(BEFORE))
        before = stack.enter_context(worker(source))
        after = stack.enter_context(worker(ROOT / "src"))
        pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in METHODS}
        for repeat in range(-3, repeats):  # the first three warm up
            for name in METHODS:
                order = (before, after) if repeat % 2 else (after, before)
                spent = {process.pid: one_round(process, name) for process in order}
                if repeat >= 0:
                    pairs[name].append((spent[before.pid], spent[after.pid]))
    return pairs


def summary(pairs: list[tuple[float, float]]) -> dict[str, float]:
    """Medians and minima of both, and their ratios: above 1, today is slower."""
    before, after = zip(*pairs, strict=True)
    low, _, high = quantiles([b / a for a, b in pairs], n=4)
    return {
        "before": median(before),
        "after": median(after),
        "ratio of medians": median(after) / median(before),
        "ratio of minima": min(after) / min(before),
        "lower quartile of ratios": low,
        "upper quartile of ratios": high,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve()
        return
    results = {name: summary(pairs) for name, pairs in measure(arguments.repeats).items()}
    for name, found in results.items():
        print(name, {key: round(value, 4) for key, value in found.items()})
    if arguments.out:
        commit = subprocess.run(
            ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"],
            capture_output=True, text=True, check=True,
        ).stdout.strip()  # fmt: skip
        about = {
            "before": BEFORE, "after": commit, "torch": torch.__version__,
            "repeats": arguments.repeats, "unit": "CPU seconds of a round, one core",
        }  # fmt: skip
        content = {"environment": about, "rounds": results}
        arguments.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
