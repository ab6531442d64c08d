"""Measure the magnitudes of one round's updates, for Fig. 1."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsift.codec.frame import Spec
from fedsift.codec.update import ROLES, Role, Update
from fedsift.data import Dataset
from fedsift.federation.snapshot import Snapshot
from fedsift.reproduce.plan import PlannedRun
from fedsift.runs.compare import config_of
from fedsift.runs.config import RunConfig
from fedsift.runs.disk import replace_file
from fedsift.runs.run import environment, federation_of
from fedsift.simulation import Record, run_rounds

UPDATES = "updates.json"
LOWEST, HIGHEST, BINS = -46.0, 4.0, 500
"""Bins of log10 |x| that hold every nonzero float32."""


def measure_updates(
    run: PlannedRun, dataset: Dataset, path: Path, on_record: Callable[[Record], None]
) -> None:
    """Train up to the run's last round, and write the magnitudes of that round's updates."""
    config, federation = run.config, federation_of(run.config, dataset)
    before = federation.initial_snapshot()
    for after, record in run_rounds(federation, before, config.rounds - 1):
        before = after
        on_record(record)
    counts = {role: torch.zeros(BINS, dtype=torch.float64) for role in ROLES}
    zeros = dict.fromkeys(ROLES, 0)
    for role, x in updates_after(before, config, dataset):
        counts[role] += histogram(x)
        zeros[role] += int((x == 0).sum())
    measured = {
        "round": config.rounds,
        "seed": config.seed,
        "lowest": LOWEST,
        "highest": HIGHEST,
        "counts": {role: [int(n) for n in counts[role]] for role in ROLES},
        "zeros": zeros,
        "environment": environment(config),
    }
    path.mkdir(parents=True, exist_ok=True)
    replace_file(path / UPDATES, json.dumps(measured).encode())


def updates_after(
    before: Snapshot, config: RunConfig, dataset: Dataset
) -> list[tuple[Role, Tensor]]:
    """Return every client's dense ΔW, ΔM and ΔV in the next round, as FedAdam would send them."""
    updates: list[tuple[Role, Tensor]] = []

    def collect(specs: Sequence[Spec], update: Update, sizes: Sequence[int]) -> None:
        for part in update.parts:
            updates.extend(
                (role, x) for role, coded in part.values.items() for x in coded.restore()
            )

    federation = federation_of(config_of("fedadam", config.flat()), dataset)
    start = replace(federation.initial_snapshot(), round=before.round, state=before.state)
    replace(federation, on_upload=collect).run_round(start)
    return updates


def histogram(x: Tensor) -> Tensor:
    """Count the values of log10 |x| in each bin; zeros are in no bin.

    >>> counts = histogram(torch.tensor([0.0, 0.01, -0.01, 1.0]))
    >>> counts.sum().item(), counts.max().item()
    (3.0, 2.0)
    """
    return torch.histc(x.abs().log10().double(), BINS, LOWEST, HIGHEST).cpu()


ROLE_NAMES = {"w": "ΔW", "m": "ΔM", "v": "ΔV"}


def density_of(measured: Sequence[Mapping[str, Any]], role: str) -> tuple[Any, Any]:
    """Return the center of each bin, and the density over all seeds there; zeros are left out."""
    counts = np.sum([seed["counts"][role] for seed in measured], axis=0)
    edges = np.linspace(measured[0]["lowest"], measured[0]["highest"], len(counts) + 1)
    return (edges[:-1] + edges[1:]) / 2, counts / (counts.sum() * np.diff(edges))


def summarize_updates(measured: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the peak, mean, deviation and density of log10 of the magnitudes."""
    summary: dict[str, Any] = {"seeds": [seed["seed"] for seed in measured]}
    summary |= {key: measured[0][key] for key in ("round", "environment")}
    for role, name in ROLE_NAMES.items():
        centers, density = density_of(measured, role)
        share = density / density.sum()
        points = zip(centers, density, strict=True)
        mean = float((centers * share).sum())
        summary[name] = {
            "peak_log10": round(float(centers[density.argmax()]), 2),
            "mean_log10": mean,
            "deviation": float(((centers - mean) ** 2 * share).sum() ** 0.5),
            "zeros": sum(seed["zeros"][role] for seed in measured),
            "density": {f"{c:.2f}": float(f"{d:.4g}") for c, d in points if d > 0},
        }
    return summary
