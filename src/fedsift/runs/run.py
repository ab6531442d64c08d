"""Carry out a run: from its configuration, or from where it stopped."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Generator, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fedsift
from fedsift.data import Dataset, digest_of, load, partition_indices, split
from fedsift.engine.client import one_thread
from fedsift.engine.cpu import native
from fedsift.engine.processes.torchrun import Follower, Torchrun, rank, ranks
from fedsift.errors import ConfigError, Diverged
from fedsift.federation.round import (
    Federation,
)
from fedsift.federation.snapshot import (
    Snapshot,
)
from fedsift.models import build
from fedsift.runs.checkpoint import Checkpoint
from fedsift.runs.config import (
    RunConfig,
)
from fedsift.runs.folder import RunFolder, column
from fedsift.runs.tensorboard import require_tensorboard
from fedsift.runs.uploads import Uploads, labels_of
from fedsift.simulation import Options, Record, initial_snapshot, prepare, run_rounds


def federation_of(config: RunConfig, dataset: Dataset | None = None) -> Federation:
    """Load the data, unless it is given; deal it out, build the model: all before round 1."""
    if config.tensorboard:
        require_tensorboard()
    dataset = dataset or load(config.dataset)
    rows = partition_indices(
        config.partition, dataset.labels, config.clients, config.seed, config.theta
    )
    with one_thread():  # thousands of tiny copies, which threads would only wait for each other in
        clients = split(dataset.train, rows)
    model = build(config.model, dataset.shape, config.seed, dataset.dtype)
    check_output(model, dataset, config.model)
    federation = prepare(
        model,
        clients,
        dataset.test,
        config.make_algorithm(),
        Options(
            batch_size=config.batch_size or None,
            participation=config.participation,
            dropout=config.dropout,
            min_clients=config.min_clients,
            max_norm_ratio=config.max_norm_ratio,
            wire=config.wire,
            loss=dataset.loss,
            seed=config.seed,
            device=config.torch_device(),
            precision=config.precision,
        ),
    )
    if ranks() > 1 and rank() == 0:
        engine = Torchrun(federation.engine, federation.task)
        return replace(federation, engine=engine)
    return federation


def check_output(model: nn.Module, dataset: Dataset, name: str) -> None:
    """Refuse a model whose output is not for the data set's labels."""
    (x, y), (_, tested) = dataset.train, dataset.test
    largest = torch.full_like(y[:2], max(int(y.max()), int(tested.max())))
    try:
        with torch.no_grad():
            dataset.loss(model(x[:2]), largest)
    except Exception as problem:  # the model is the user's: anything may happen in it
        raise ConfigError(
            f"what model {name!r} gives is not for labels from 0 to {int(largest.max())}: {problem}"
        ) from None


def follow(configs: Iterable[RunConfig]) -> None:
    """What the ranks after the first do: train what rank 0 asks them to, run after run."""
    for config in configs:
        federation = federation_of(config)
        Follower(federation.engine, federation.task, federation.algorithm).serve()


@dataclass(frozen=True)
class Start:
    """Where a run goes on: its latest snapshot, and the records of the rounds before."""

    checkpoint: Checkpoint
    is_on_disk: bool
    history: list[Record]


def begin(folder: RunFolder, federation: Federation) -> Start:
    """Find where the run stopped, or its beginning, and drop what was recorded after that."""
    device = str(federation.task.clients[0][0].device)
    found = folder.load(federation, device)
    checkpoint = found or Checkpoint(initial_snapshot(federation, folder.memory_file), 0.0)
    return Start(checkpoint, found is not None, folder.rewind(checkpoint.snapshot.round))


def go(
    folder: RunFolder, federation: Federation, start: Start, rounds: int
) -> Generator[Record, None, None]:
    """Play the rounds that are still to run_rounds, keeping the folder up to date.

    However it ends, the last finished round is saved; with the last of all, the model is, too.
    """
    keeper = Keeper(folder, federation, start)
    saved = start.checkpoint
    uploads = Uploads(federation.task.layout.d)
    watched = replace(federation, on_upload=uploads.take)
    folder.write_clients(labels_of(federation.task))
    try:
        for snapshot, record in run_rounds(watched, saved.snapshot, rounds, saved.seconds):
            folder.append(record, uploads.sum_up(snapshot.round))
            keeper.offer(snapshot, float(record["seconds"]))
            yield record
        folder.save_model(federation, keeper.latest.snapshot)
        end(federation)
    except Diverged:
        end(federation)
        raise
    finally:
        keeper.save()


def end(federation: Federation) -> None:
    """Let other ranks, if there are any, go on to their next run."""
    if isinstance(federation.engine, Torchrun):
        federation.engine.end()


class Keeper:
    """Saves checkpoints often, yet in no more than a twentieth of the time."""

    def __init__(self, folder: RunFolder, federation: Federation, start: Start) -> None:
        self.folder, self.federation = folder, federation
        self.config = folder.config()  # with which the run trains, even if its file is edited
        self.latest, self.is_on_disk = start.checkpoint, start.is_on_disk
        self.due = 0.0
        self.saved = start.checkpoint  # keeps from being overwritten what it refers to on the disk

    def offer(self, snapshot: Snapshot, seconds: float) -> None:
        """Take a round's snapshot, and save it if it is time to."""
        self.latest, self.is_on_disk = Checkpoint(snapshot, seconds), False
        if time.monotonic() >= self.due:
            self.save()

    def save(self) -> None:
        """Save the latest snapshot unless it is saved."""
        if self.is_on_disk:
            return
        began = time.monotonic()
        self.folder.save(self.latest, self.federation, self.config)
        self.is_on_disk, self.saved = True, self.latest
        ended = time.monotonic()
        self.due = ended + 19 * (ended - began)


def summarize(config: RunConfig, federation: Federation, history: list[Record]) -> dict[str, Any]:
    """The contents of summary.json."""
    accuracies = column(history, "accuracy")
    last = history[-1]
    seconds = float(last["seconds"])
    return {
        **config.flat(),
        "parameters": federation.task.layout.d,
        "final_accuracy": accuracies[-1] if accuracies else None,
        "best_accuracy": max(accuracies, default=None),
        "uplink_bits_paper": last["uplink_bits_paper"],
        "uplink_bytes": last["uplink_bytes"],
        "downlink_bytes": last["downlink_bytes"],
        "rejected": sum(r.get("rejected") or 0 for r in history),
        "seconds": seconds,
        "seconds_per_round": seconds / len(history),
        "environment": environment(config),
    }


def environment(config: RunConfig) -> dict[str, str]:
    """What the figures depend on beside the configuration."""
    device = config.torch_device()
    kernels = {} if device == "cuda" else {"kernels": "PyTorch" if native.load() is None else "C"}
    corpus = digest_of(config.dataset)
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
        **({"corpus": corpus} if corpus else {}),
    }


def commit() -> str:
    """The commit of this code: FEDSIFT_COMMIT if that is set, else git's, '+' if changed since."""
    here = Path(__file__)
    if named := os.environ.get("FEDSIFT_COMMIT"):
        return named
    try:
        _git(here, "ls-files", "--error-unmatch", here.name)
        return _git(here, "describe", "--always", "--dirty=+", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        return ""


def _git(file: Path, *words: str) -> str:
    said = subprocess.run(
        ["git", *words], cwd=file.parent, capture_output=True, text=True, check=True, timeout=5
    )
    return said.stdout.strip()
