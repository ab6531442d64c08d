"""Test the command on held-out tasks: `python reproduce/theory/advise_command.py [TASK ...]`.

Runs `fedsift advise` (seed 10), then trains with its advice and with the paper's defaults, with
seeds 11, 12 and 13, until the test accuracy reaches the target. None of these tasks, partitions,
numbers of clients and seeds was used in the design of the calibration. Writes advise_command.csv.
Needs Fashion-MNIST in FEDSIFT_DATA; a few minutes per task.
"""

import gzip
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from tables import HERE, replace_rows

from fedsift.advise.hyperparameters import Hyperparameters
from fedsift.data.folder import use_data_folder
from fedsift.data.image_files import read_fashion_mnist
from fedsift.runs.compare import row_of
from fedsift.runs.config import RunConfig
from fedsift.runs.run import environment, federation_of
from fedsift.simulation import run_rounds

CALIBRATED, SEEDS, MAX_ROUNDS = 10, (11, 12, 13), 60
HEADER = (
    "task", "target", "settings", "local_steps", "lr", "density", "algorithm", "seed", "mibit",
    "rounds", "steps", "best_accuracy", "predicted_mibit", "commit", "device",
)  # fmt: skip


@dataclass(frozen=True)
class HeldOut:
    """A task, given by the flags of the command, and its target accuracy."""

    flags: dict[str, object]
    target: float
    images: int = 0
    """Training images of Fashion-MNIST; a third as many are used for testing. 0: all."""


TASKS = {
    "digits, IID, 5 clients": HeldOut({"dataset": "digits", "clients": 5}, 0.95),
    "digits, Dirichlet 0.3, 10 clients": HeldOut(
        {"dataset": "digits", "clients": 10, "partition": "dirichlet", "theta": 0.3}, 0.9
    ),
    "CNN, Fashion-MNIST, 3,000 images, Dirichlet 0.5, 5 clients": HeldOut(
        {"dataset": "fashion-mnist", "clients": 5, "partition": "dirichlet", "theta": 0.5},
        0.75, 3000,
    ),
}  # fmt: skip


def main(names: list[str]) -> None:
    """Run all tasks, or those whose name contains one of the words."""
    with tempfile.TemporaryDirectory() as folder:
        for name, task in TASKS.items():
            if names and not any(word in name for word in names):
                continue
            if task.images:
                shorten(task.images, Path(folder))
                use_data_folder(Path(folder))
            replace_rows(HERE / "advise_command.csv", HEADER, study(name, task))


def shorten(images: int, folder: Path) -> None:
    """Write a part of Fashion-MNIST to a folder, in the official format."""
    (folder / "fashion-mnist").mkdir()
    for part, number in (("train", images), ("t10k", images // 3)):
        x, y = read_fashion_mnist(part)
        rows = np.random.default_rng(CALIBRATED).permutation(len(x))[:number]
        write_idx(folder / f"fashion-mnist/{part}-images-idx3-ubyte.gz", x[rows, 0])
        write_idx(folder / f"fashion-mnist/{part}-labels-idx1-ubyte.gz", y[rows])


def write_idx(path: Path, values: np.ndarray) -> None:
    """Write bytes in the IDX format: two zeros, type, number of axes, their sizes, the data."""
    sizes = np.array(values.shape, ">u4").tobytes()
    raw = bytes((0, 0, 8, values.ndim)) + sizes + values.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(raw, 1))


def study(name: str, task: HeldOut) -> list[tuple[object, ...]]:
    """Get the advice, then train with it and with the defaults."""
    advice = advice_for(task)
    print(name, advice["choice"], advice["reasons"], flush=True)
    rows = []
    for label, choice, predicted in (
        ("advised", Hyperparameters(**advice["choice"]), advice["predicted"]),
        ("defaults", Hyperparameters(), advice["predicted_default"]),
    ):
        for seed in SEEDS:
            values = {**task.flags, **asdict(choice), "seed": seed, "device": "cpu"}
            mibit, rounds, *rest = spent(RunConfig.from_values(values), task.target)
            measured = (seed, mibit, rounds, rounds * choice.local_steps, rest[0], shown(predicted))
            rows.append((name, task.target, label, *asdict(choice).values(), *measured, *rest[1:]))
            print(*rows[-1], flush=True)
    return rows


def advice_for(task: HeldOut) -> dict:
    """The JSON output of the command."""
    flags = [word for key, value in task.flags.items() for word in (f"--{key}", str(value))]
    words = [*flags, "--target", str(task.target), "--seed", str(CALIBRATED), "--json"]
    command = [sys.executable, "-m", "fedsift", "advise", *words]
    print(*command[1:], flush=True)
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def spent(config: RunConfig, target: float) -> tuple[str, int, str, str, str]:
    """Mibit (empty if not reached) and rounds to the target, best accuracy, commit and device."""
    federation = federation_of(config)
    history = []
    for _, record in run_rounds(federation, federation.initial_snapshot(), MAX_ROUNDS):
        history.append(record)
        if record["accuracy"] >= target:
            break
    row = row_of(config.algorithm, history, target)
    about = environment(config)
    best = shown(row.best_accuracy)
    return shown(row.mibit), len(history), best, about["commit"], about["device"]


def shown(x: float | None) -> str:
    """A number to four decimals, or an empty string."""
    return "" if x is None else f"{x:.4f}"


if __name__ == "__main__":
    main(sys.argv[1:])
