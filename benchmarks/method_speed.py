"""The time of a round of the paper's methods and of sift, against an earlier commit.

python benchmarks/method_speed.py --out benchmarks/results/method_speed.json

The earlier commit is checked out into a temporary folder. There is one process for each commit.
They take rounds in turn, in the order before, after, after, before, so that neither a slow drift
of the machine nor the order matters. The median of the ratios of these groups is reported with its
95 % confidence interval. On a CPU, both run on one core, and CPU time is measured. The work is a
round of 5 clients × 30 steps × 64 images with the paper's CNN (20 clients on a GPU). The model is
not tested.

Where there is no git, name the folder of the earlier sources:

    git archive 4cde729 src | tar -x -C earlier
    python benchmarks/method_speed.py --device cuda --before earlier/src
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).parents[1]
BEFORE = "4cde729"
METHODS = (
    "fedadam_ssm", "fedadam", "sift", "fedadam_ssm_m", "fedadam_ssm_v", "fairness_top",
    "fedadam_top", "fedsgd", "sparse_fedsgd", "onebit_adam", "efficient_adam",
)  # fmt: skip
CLIENTS, IMAGES, STEPS, BATCH = {"cpu": 5, "cuda": 20}, 256, 30, 64


def paper_cnn() -> nn.Module:
    """The network of ``fedsift.models``, for which both commits have kernels in C."""
    return nn.Sequential(
        nn.Conv2d(1, 10, 5), nn.MaxPool2d(2), nn.ReLU(),
        nn.Conv2d(10, 20, 5), nn.MaxPool2d(2), nn.ReLU(),
        nn.Flatten(), nn.Linear(320, 50), nn.ReLU(), nn.Linear(50, 10),
    )  # fmt: skip


def federation(name: str, device: str) -> Any:
    """A federation of whichever fedsift is on the path."""
    algorithms = importlib.import_module("fedsift.algorithms")
    prepare = importlib.import_module("fedsift.simulation").prepare
    torch.manual_seed(0)
    model = paper_cnn()
    clients = [
        (torch.randn(IMAGES, 1, 28, 28), torch.randint(10, (IMAGES,)))
        for _ in range(CLIENTS[device])
    ]
    options = {
        "batch_size": BATCH, "participation": 1.0, "dropout": 0.0, "min_clients": 0,
        "wire": "count", "loss": nn.functional.cross_entropy, "seed": 0, "device": device,
    }  # fmt: skip
    make = getattr(algorithms, name)
    takes_steps = "local_steps" in inspect.signature(make).parameters
    algorithm = make(local_steps=STEPS) if takes_steps else make()
    try:
        chosen = importlib.import_module("fedsift.simulation").Options(**options)
    except AttributeError:  # before there was a class for them
        return prepare(model, clients, None, algorithm, **options)
    return prepare(model, clients, None, algorithm, chosen)


def serve(device: str) -> None:
    """Run a round of each method that standard input names; print its seconds."""
    made: dict[str, Any] = {}
    snapshots: dict[str, Any] = {}
    clock = time.perf_counter if device == "cuda" else time.process_time
    for line in sys.stdin:
        name = line.strip()
        if name not in made:
            made = {name: federation(name, device)}
            is_new = hasattr(made[name], "run_round")
            snapshots = {name: made[name].initial_snapshot() if is_new else made[name].first()}
        play = made[name].run_round if hasattr(made[name], "run_round") else made[name].play
        began = clock()
        snapshots[name], _ = play(snapshots[name])
        if device == "cuda":
            torch.cuda.synchronize()
        print(clock() - began, flush=True)


@contextmanager
def worker(source: Path, device: str) -> Iterator[subprocess.Popen[str]]:
    """A process that imports fedsift from a folder."""
    process = subprocess.Popen(
        [sys.executable, __file__, "--serve", "--device", device],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path_with(source), "OMP_NUM_THREADS": "1"},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def path_with(source: Path) -> str:
    """Return the folders of Python's modules, with fedsift's source first."""
    return os.pathsep.join([str(source), *filter(None, [os.environ.get("PYTHONPATH")])])


def one_round(process: subprocess.Popen[str], name: str) -> float:
    """Let a process run a round, and return its seconds."""
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


def measure(
    methods: list[str], repeats: int, device: str, source: Path | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the summary of each method, from groups of rounds before, after, after and before."""
    if device == "cpu":
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    with ExitStack() as stack:
        found = stack.enter_context(nullcontext(source) if source else checked_out(BEFORE))
        before = stack.enter_context(worker(found, device))
        after = stack.enter_context(worker(ROOT / "src", device))
        for name in methods:
            for process in (before, after) * WARM_UP:
                one_round(process, name)
            groups = []
            for _ in range(repeats):
                first, second, third, fourth = (
                    one_round(process, name) for process in (before, after, after, before)
                )
                groups.append(((first + fourth) / 2, (second + third) / 2))
            yield name, summary(groups)


WARM_UP = 4
"""Rounds that are not counted."""


def summary(groups: list[tuple[float, float]]) -> dict[str, Any]:
    """Medians of both, the median of their ratios, and its 95 % confidence interval."""
    before, after = zip(*groups, strict=True)
    ratios = sorted(b / a for a, b in groups)
    return {
        "before": median(before),
        "after": median(after),
        "ratio": median(ratios),
        "interval": interval_of_median(ratios),
        "ratio of minima": min(after) / min(before),
    }


def interval_of_median(values: list[float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the median of sorted values, by their ranks."""
    half = 0.98 * math.sqrt(len(values))
    low = max(0, math.floor(len(values) / 2 - half))
    return values[low], values[len(values) - 1 - low]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=50, help="groups of four rounds per method")
    parser.add_argument("--device", choices=tuple(CLIENTS), default="cpu")
    parser.add_argument("--before", type=Path, help="folder of the earlier sources")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.device)
        return
    load, results = os.getloadavg()[0], {}
    for name, found in measure(given.methods, given.repeats, given.device, given.before):
        results[name] = found
        low, high = found["interval"]
        print(
            f"| `{name.replace('_', '-')}` | {found['before']:.4f} | {found['after']:.4f} | "
            f"{found['ratio']:.3f} ({low:.3f} to {high:.3f}) |",
            flush=True,
        )
    if given.out:
        is_gpu = given.device == "cuda"
        about = {
            "before": BEFORE, "repeats": given.repeats,
            "unit": "seconds of a round" if is_gpu else "CPU seconds of a round, one core",
            "load": {"before": load, "after": os.getloadavg()[0], "cores": os.cpu_count()},
            **environment_on(given.device),
        }  # fmt: skip
        given.out.write_text(json.dumps({"environment": about, "rounds": results}, indent=1) + "\n")


def environment_on(device: str) -> dict[str, str]:
    """Return the versions and the hardware, as in every result file."""
    found: dict[str, str] = importlib.import_module("fedsift.runs.run").environment_on(device)
    return found


if __name__ == "__main__":
    main()
