"""The magnitudes of one round's updates, for Fig. 1."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from fedsift.codec.frame import Spec
from fedsift.codec.update import ROLES, Role, Update
from fedsift.data import Dataset
from fedsift.federation.snapshot import (
    Snapshot,
)
from fedsift.reproduce.pins import Planned
from fedsift.runs.compare import config_of
from fedsift.runs.config import RunConfig
from fedsift.runs.disk import replace_file
from fedsift.runs.run import environment, federation_of
from fedsift.simulation import Record, run_rounds

UPDATES = "updates.json"
LOWEST, HIGHEST, BINS = -46.0, 4.0, 500
"""Bins of log10 that hold every float32 but zero."""


def measure(run: Planned, dataset: Dataset, path: Path, watch: Callable[[Record], None]) -> None:
    """Train up to the run's last round, and write how large the updates of that round are."""
    config, federation = run.config, federation_of(run.config, dataset)
    before = federation.initial_snapshot()
    for after, record in run_rounds(federation, before, config.rounds - 1):
        before = after
        watch(record)
    counts = {role: torch.zeros(BINS, dtype=torch.float64) for role in ROLES}
    zeros = dict.fromkeys(ROLES, 0)
    for role, x in updates_after(before, config, dataset):
        counts[role] += histogram(x)
        zeros[role] += int((x == 0).sum())
    found = {
        "round": config.rounds,
        "seed": config.seed,
        "lowest": LOWEST,
        "highest": HIGHEST,
        "counts": {role: [int(n) for n in counts[role]] for role in ROLES},
        "zeros": zeros,
        "environment": environment(config),
    }
    path.mkdir(parents=True, exist_ok=True)
    replace_file(path / UPDATES, json.dumps(found).encode())


def updates_after(
    before: Snapshot, config: RunConfig, dataset: Dataset
) -> list[tuple[Role, Tensor]]:
    """Every client's whole ΔW, ΔM and ΔV in the next round: what FedAdam would send."""
    found: list[tuple[Role, Tensor]] = []

    def take(specs: Sequence[Spec], update: Update, sizes: Sequence[int]) -> None:
        for part in update.parts:
            found.extend((role, x) for role, coded in part.values.items() for x in coded.restore())

    federation = federation_of(config_of("fedadam", config.flat()), dataset)
    start = replace(federation.initial_snapshot(), round=before.round, state=before.state)
    replace(federation, on_upload=take).run_round(start)
    return found


def histogram(x: Tensor) -> Tensor:
    """How many numbers have their log10 in each bin; a zero is in none.

    >>> counts = histogram(torch.tensor([0.0, 0.01, -0.01, 1.0]))
    >>> counts.sum().item(), counts.max().item()
    (3.0, 2.0)
    """
    return torch.histc(x.abs().log10().double(), BINS, LOWEST, HIGHEST).cpu()
