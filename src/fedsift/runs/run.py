"""Train a run from its configuration, or from its last checkpoint."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import fedsift
from fedsift.data import Dataset, digest_of
from fedsift.engine.processes.torchrun import Follower, Torchrun, rank, ranks
from fedsift.errors import Diverged, require_packages
from fedsift.federation.memories import Memories, OnDisk
from fedsift.federation.round import Federation
from fedsift.federation.snapshot import Snapshot
from fedsift.runs.checkpoint import Checkpoint, kernels_on, load_checkpoint, save_checkpoint
from fedsift.runs.config import Config, RunConfig
from fedsift.runs.folder import RunFolder, column
from fedsift.runs.model import save_model
from fedsift.runs.parts import parts_of
from fedsift.runs.records import append_line, append_round, rewind, trained_rounds
from fedsift.runs.uploads import Uploads
from fedsift.simulation import (
    Options,
    Record,
    initial_record,
    initial_snapshot,
    prepare,
    run_rounds,
)
from fedsift.task.labels import labels_of


def federation_of(config: RunConfig, dataset: Dataset | None = None) -> Federation:
    """Load the data unless it is given, split it across clients, and build the model."""
    if config.tensorboard:
        require_packages("TensorBoard events", "tensorboard", extra="tensorboard")
    parts = parts_of(config, dataset)
    federation = prepare(
        parts.model,
        parts.clients,
        parts.test,
        config.make_algorithm(),
        Options(
            batch_size=config.batch_size or None,
            participation=config.participation,
            dropout=config.dropout,
            min_clients=config.min_clients,
            max_norm_ratio=config.max_norm_ratio,
            buffers=config.buffers,
            aggregation=config.chosen_aggregation(),
            wire=config.wire,
            loss=parts.loss,
            seed=config.seed,
            device=config.torch_device(),
            precision=config.precision,
            weights=config.chosen_weights(),
            num_workers=config.num_workers,
            privacy=config.privacy,
            secure=config.secure_settings,
            client_tests=parts.client_tests,
        ),
    )
    if ranks() > 1 and rank() == 0:
        engine = Torchrun(federation.engine, federation.task)
        return replace(federation, engine=engine)
    return federation


def with_clients(config: RunConfig, federation: Federation) -> RunConfig:
    """Return a configuration with the number of clients, which own data determines."""
    return replace(config, clients=len(federation.task.clients))


def train_for_rank_zero(configs: Iterable[RunConfig]) -> None:
    """Train each run that rank 0 starts, on torchrun's other ranks."""
    for config in configs:
        federation = federation_of(config)
        Follower(federation.engine, federation.task, federation.algorithm).serve()


@dataclass(frozen=True)
class RestoredRun:
    """The latest checkpoint of a run and the metrics up to it, or the initial state."""

    checkpoint: Checkpoint
    is_on_disk: bool
    history: list[Record]


def restore_run(
    folder: RunFolder, federation: Federation, begin: Begin | None = None
) -> RestoredRun:
    """Load the latest checkpoint, and drop the metrics of later rounds.

    Without a checkpoint, begin the run, and write its first records. By default it begins with the
    initial model, whose evaluation is the record of round 0.
    """
    found = load_checkpoint(folder, federation, str(federation.task.device))
    history = rewind(folder, found.snapshot.round if found else -1)
    if found:
        return RestoredRun(found, is_on_disk=True, history=history)
    run = (begin or partial(new_run, federation))(folder.memory_file)
    for record in run.history:
        append_line(folder.metrics_file, record)
    return run


Begin = Callable[[Path | None], RestoredRun]
"""Begins a run, given the file for large client memories."""


def new_run(federation: Federation, memory_file: Path | None = None) -> RestoredRun:
    """Return a run before its first round, with the initial model evaluated."""
    start = initial_snapshot(federation, memory_file)
    history = [initial_record(federation, start)]
    return RestoredRun(Checkpoint(start, 0.0), is_on_disk=False, history=history)


def train_rounds(
    folder: RunFolder, federation: Federation, restored: RestoredRun, rounds: int
) -> Generator[Record, None, None]:
    """Train the remaining rounds, write each to the folder, and yield its metrics.

    The last finished round is saved even if training is interrupted. After the last round, the
    model is saved as well.
    """
    with closing(train_snapshots(folder, federation, restored, rounds)) as steps:
        for _, record in steps:
            yield record


def train_snapshots(
    folder: RunFolder, federation: Federation, restored: RestoredRun, rounds: int
) -> Generator[tuple[Snapshot, Record], None, None]:
    """Do the same, and yield each snapshot with its metrics."""
    writer = CheckpointWriter(folder, federation, restored)
    saved = restored.checkpoint
    uploads = Uploads(federation.task.layout.d)
    watched = replace(federation, on_upload=uploads.add)
    folder.write_clients(labels_of(federation.task.clients))
    try:
        for snapshot, record in run_rounds(watched, saved.snapshot, rounds, saved.seconds):
            append_round(folder, record, uploads.finish_round(snapshot.round))
            writer.update(Checkpoint(snapshot, float(record["seconds"])))
            yield snapshot, record
        save_model(folder, federation, writer.latest.snapshot)
        release_ranks(federation)
    except Diverged:
        release_ranks(federation)
        raise
    finally:
        writer.write()


def release_ranks(federation: Federation) -> None:
    """Let torchrun's other ranks, if there are any, proceed to their next run."""
    if isinstance(federation.engine, Torchrun):
        federation.engine.end()


class CheckpointWriter:
    """Writes checkpoints as often as possible within a twentieth of the training time."""

    def __init__(self, folder: RunFolder, federation: Federation, restored: RestoredRun) -> None:
        self.folder, self.federation = folder, federation
        self.config = folder.config()  # read once: the file may be edited later
        self.latest, self.is_on_disk = restored.checkpoint, restored.is_on_disk
        self.due = 0.0
        # The memories of all checkpoints on disk: a reference keeps their slots from being reused.
        on_disk = (*self.latest.earlier, self.latest.snapshot.client_memory)
        self.kept = deque(filter(is_in_file, on_disk), maxlen=self.config.keep_checkpoints)

    def update(self, checkpoint: Checkpoint) -> None:
        """Take the checkpoint of a round, and write it if enough time has passed."""
        self.latest, self.is_on_disk = checkpoint, False
        if time.monotonic() >= self.due:
            self.write()

    def write(self) -> None:
        """Write the latest checkpoint unless it is on disk."""
        if self.is_on_disk:
            return
        began = time.monotonic()
        save_checkpoint(self.folder, self.latest, self.federation, self.config)
        self.is_on_disk = True
        self.kept.extend(filter(is_in_file, [self.latest.snapshot.client_memory]))
        ended = time.monotonic()
        self.due = ended + 19 * (ended - began)


def is_in_file(memories: Memories) -> bool:
    """Whether memories are slots of a file, which may be reused."""
    return isinstance(memories, OnDisk)


def run_summary(config: Config, federation: Federation, history: list[Record]) -> dict[str, Any]:
    """Return the contents of summary.json."""
    return {
        **config.flat(),
        **results_of(history, federation.task.layout.d),
        "environment": environment(config),
    }


def results_of(history: Sequence[Record], parameters: int) -> dict[str, Any]:
    """Return the results of a run, for its summary."""
    trained, last = trained_rounds(history), history[-1]
    accuracies, seconds = column(trained, "accuracy"), float(last["seconds"])
    perplexities = column(trained, "perplexity")
    return {
        "parameters": parameters,
        "final_accuracy": accuracies[-1] if accuracies else None,
        "best_accuracy": max(accuracies, default=None),
        **(
            {"final_perplexity": perplexities[-1], "best_perplexity": min(perplexities)}
            if perplexities
            else {}
        ),
        "uplink_bits_paper": last["uplink_bits_paper"],
        "uplink_bytes": last["uplink_bytes"],
        "downlink_bytes": last["downlink_bytes"],
        **({"epsilon": last["epsilon"]} if "epsilon" in last else {}),
        "rejected": sum(r.get("rejected") or 0 for r in history),
        "seconds": seconds,
        "seconds_per_round": seconds / max(1, len(trained)),
    }


def environment(config: Config) -> dict[str, str]:
    """Return what the results depend on besides the configuration: versions and hardware."""
    corpus = digest_of(config.dataset)
    return {**environment_on(config.torch_device()), **({"corpus": corpus} if corpus else {})}


def environment_on(device: str) -> dict[str, str]:
    """Return the versions and the hardware that a run on this device depends on."""
    kernels = {} if device == "cuda" else {"kernels": kernels_on(device)}
    return {
        "fedsift": fedsift.__version__,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name()
        if device == "cuda"
        else f"cpu ({os.cpu_count()} cores)",
        "platform": platform.platform(terse=True),
        **kernels,
    }


def commit() -> str:
    """Return FEDSIFT_COMMIT, or the git commit of this code, with '+' if it was changed since."""
    file = Path(__file__)
    if named := os.environ.get("FEDSIFT_COMMIT"):
        return named
    try:
        _git(file, "ls-files", "--error-unmatch", file.name)
        return _git(file, "describe", "--always", "--dirty=+", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        return ""


def _git(file: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", *words], cwd=file.parent, capture_output=True, text=True, check=True, timeout=5
    )
    return done.stdout.strip()
