r"""Run the comparison of methods for federated LoRA fine-tuning, in pieces.

    python reproduce/llm/run.py --tokens tokens --out runs/llm --jobs 3 --minutes 9

The most important runs come first: ``--list`` shows them all. When the grid of learning rates is
finished for a method, the chosen one is repeated with the other seeds. Every run is a folder, and
the same command continues interrupted ones. Runs stop after ``--minutes``. Of a finished run only
its small files are kept; ``--copy`` copies those of all runs to another folder. A GGUF file is
converted once, next to the runs.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

import torch
from plan import (
    ALPHA,
    BATCH_SIZE,
    BLOCK_LENGTH,
    CLIENTS,
    EPS,
    EVERY,
    GRID,
    LINES,
    RANK,
    SEEDS,
    TASKS,
    VALIDATION_BLOCKS,
    Run,
    grid_runs,
    repeated,
)
from results import chosen, read_runs
from torch import nn

import fedsift
from fedsift.errors import Diverged
from fedsift.llm import (
    CausalLM,
    LoRA,
    TextClients,
    TokenStreams,
    load_model,
    next_token_loss,
)
from fedsift.llm.models import model_source

SMALL_FILES = ("config.toml", "metrics.jsonl", "summary.json", "diverged.txt")
"""The files of a run that are kept."""
DIVERGED = "diverged.txt"


def main() -> None:
    """Execute the selected runs."""
    given = arguments()
    grid = list(grid_runs(given.tasks, given.methods, given.grid, given.eps))
    if given.list:
        for run in grid:
            print(f"{'finished' if is_finished(given.out / run.path) else 'open':8}  {run.path}")
        return
    given.model = converted(given.model, given.out)
    given.deadline = time.time() + 60 * given.minutes
    with ProcessPoolExecutor(given.jobs, get_context("spawn")) as pool:
        execute_all(grid, given, pool)
        execute_all(repetitions(grid, given), given, pool)
    if given.copy:
        copy_small_files(given.out, given.copy)


def execute_all(runs: Sequence[Run], given: argparse.Namespace, pool: ProcessPoolExecutor) -> None:
    """Execute the runs that are not finished, until the time is over."""
    waiting = [run for run in runs if not is_finished(given.out / run.path)]
    print(f"{len(runs) - len(waiting)} of {len(runs)} runs are finished", flush=True)
    for ended in as_completed([pool.submit(execute, run, given) for run in waiting]):
        print(ended.result(), flush=True)


def repetitions(grid: Sequence[Run], given: argparse.Namespace) -> list[Run]:
    """Return the further seeds of the methods whose grid is finished on a task."""
    is_open = {(r.task, r.name) for r in grid if not is_finished(given.out / r.path)}
    best = chosen(read_runs(given.out))
    finished = [run for run in grid if (run.task, run.name) not in is_open]
    return list(repeated(finished, best, given.seeds))


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m", help="as in --model llm:NAME")
    parser.add_argument("--tokens", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/llm"))
    parser.add_argument("--copy", type=Path)
    parser.add_argument("--list", action="store_true", help="show the grid and execute nothing")
    parser.add_argument("--tasks", type=names_in(TASKS), default=TASKS)
    parser.add_argument("--methods", type=names_in(LINES), default=tuple(LINES))
    parser.add_argument("--grid", type=numbers(float), default=GRID, help="multiples of the base")
    parser.add_argument("--eps", type=numbers(float), default=(EPS,))
    parser.add_argument("--seeds", type=numbers(int), default=SEEDS)
    parser.add_argument("--rounds", type=int, help="in place of each line's own")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="bf16" if torch.cuda.is_available() else "fp32")
    return parser.parse_args()


def names_in(known: Any) -> Callable[[str], tuple[str, ...]]:
    """Return a function that splits a list of known names."""

    def split(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        if unknown := set(names) - set(known):
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}")
        return names

    return split


def numbers(kind: type) -> Callable[[str], tuple[Any, ...]]:
    """Return a function that splits a list of numbers."""
    return lambda text: tuple(map(kind, text.split(",")))


def converted(model: str, out: Path) -> str:
    """Return a folder with the model's tensors in bfloat16, which loads faster than a GGUF file."""
    if model == "tiny" or "gguf_file" not in model_source(model):
        return model
    folder = out / "model"
    if not (folder / "config.json").exists():
        base: Any = load_model(model, lora=None).model.to(torch.bfloat16)
        base.config.quantization_config = None
        del base.config.quantization_config
        base.is_quantized = False
        base.hf_quantizer = None
        base.save_pretrained(folder)
    return str(folder)


def execute(run: Run, given: argparse.Namespace) -> str:
    """Execute a run until it ends or the time is over, and describe what happened."""
    if time.time() > given.deadline:
        return f"{run.path}: not started"
    folder, began = given.out / run.path, time.time()
    data = data_of(given.tokens, run.task)
    try:
        rounds = fedsift.rounds(**run_arguments(run, given, data, folder))
        while time.time() < given.deadline and rounds.advance():
            pass
        rounds.close()
    except Diverged as problem:
        (folder / DIVERGED).write_text(f"{problem}\n")
        return f"{run.path}: {problem}"
    except Exception as problem:  # the other runs continue
        return f"{run.path}: FAILED: {type(problem).__name__}: {str(problem)[:500]}"
    last = next(r for r in reversed(rounds.history) if r.get("perplexity"))
    if is_finished(folder):
        remove_large_files(folder)
    return (
        f"{run.path}: {rounds.history[-1]['round']} rounds, test loss {last['loss']:.4f}, "
        f"validation loss {last['validation_loss']:.4f}, {last['uplink_bytes'] / 1e6:.3f} MB up, "
        f"{time.time() - began:.0f} s"
    )


def run_arguments(
    run: Run, given: argparse.Namespace, data: TextClients, folder: Path
) -> dict[str, Any]:
    """Return the arguments of the simulation."""
    return {
        "model": model_of(given.model, run.seed, given.precision),
        "clients": data.clients,
        "test": data.test,
        "client_tests": data.client_tests,
        "algorithm": run.algorithm(),
        "rounds": given.rounds or run.line.rounds,
        "batch_size": BATCH_SIZE,
        "weights": "batch",
        "loss": next_token_loss,
        "evaluate": partial(validate, data=data),
        "evaluate_every": EVERY * max(1, (given.rounds or run.line.rounds) // 40),
        "seed": run.seed,
        "device": given.device,
        "precision": given.precision,
        "out": folder,
    }


@cache
def data_of(tokens: Path, task: str) -> TextClients:
    """Return the blocks of each client."""
    streams = TokenStreams.load(tokens / f"{task}.safetensors")
    return streams.split(CLIENTS, BLOCK_LENGTH, VALIDATION_BLOCKS)


@cache
def model_of(name: str, seed: int, precision: str) -> CausalLM:
    """Return the model with fresh adapters."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    return load_model(name, LoRA(RANK, ALPHA), dtype, seed=seed)


def validate(model: nn.Module, data: TextClients) -> dict[str, float]:
    """Return the loss on the validation data of all clients."""
    device = next(model.parameters()).device
    size = 128 if device.type == "cuda" else 16
    x, y = data.validation
    pieces = zip(x.split(size), y.split(size), strict=True)
    total = sum(
        float(next_token_loss(model(a.to(device)), b.to(device))) * len(a) for a, b in pieces
    )
    return {"validation_loss": total / len(x)}


def is_finished(folder: Path) -> bool:
    """Whether a run has ended."""
    return any((folder / name).exists() for name in ("summary.json", DIVERGED))


def remove_large_files(folder: Path) -> None:
    """Remove everything but the small files."""
    for path in folder.iterdir():
        if path.name in SMALL_FILES:
            continue
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def copy_small_files(out: Path, target: Path) -> None:
    """Copy the small files of all runs."""
    for path in out.rglob("*"):
        if path.name in SMALL_FILES:
            place = target / path.relative_to(out)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)


if __name__ == "__main__":
    main()
