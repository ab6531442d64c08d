"""Rounds, one after another, and the record of each."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from fedsift.errors import Diverged
from fedsift.federation.memories import OnDisk, SlotFile
from fedsift.federation.round import Federation
from fedsift.federation.snapshot import RoundReport, Snapshot
from fedsift.task.losses import has_perplexity, perplexity

Record = dict[str, Any]
"""One round's metrics: a line of metrics.jsonl."""


def initial_snapshot(federation: Federation, path: Path | None = None) -> Snapshot:
    """Return the snapshot before round 1. Large client memories go to a file (default: unnamed)."""
    start = federation.initial_snapshot()
    if not federation.needs_memory_file:
        return start
    file = SlotFile(federation.memory_lengths, start.state.w, path)
    return replace(start, client_memory=OnDisk(file))


def run_rounds(
    federation: Federation, snapshot: Snapshot, rounds: int, seconds: float = 0.0
) -> Iterator[tuple[Snapshot, Record]]:
    """Run the rounds after a snapshot, up to ``rounds``; yield each snapshot with its record.

    A private run ends before a round that would exceed its budget.
    """
    while snapshot.round < rounds and federation.may_run(snapshot.round + 1):
        began = time.perf_counter()
        try:
            snapshot, report = federation.run_round(snapshot)
        except Diverged as problem:
            raise Diverged(f"training diverged in round {snapshot.round + 1}: {problem}") from None
        is_due = federation.evaluation.is_due(snapshot.round, rounds)
        measured = evaluate(federation, snapshot) if is_due else {}
        seconds += time.perf_counter() - began
        measured |= federation.epsilon(snapshot.round)
        yield snapshot, record_of(snapshot, measured, report, seconds)


def initial_record(federation: Federation, snapshot: Snapshot) -> Record:
    """Evaluate the initial model, and return the record of round 0, which takes no time."""
    measured = evaluate(federation, snapshot) | federation.epsilon(0)
    return record_of(snapshot, measured, RoundReport(0, 0, 0, None), 0.0)


def evaluate(federation: Federation, snapshot: Snapshot) -> dict[str, Any]:
    """Return everything that is measured of the global model, by column."""
    accuracy, loss = federation.engine.evaluate(federation.model_weights(snapshot))
    found: dict[str, Any] = {"accuracy": accuracy, "loss": loss}
    if has_perplexity(federation.task.loss):
        found |= {"accuracy": None, "perplexity": perplexity(loss)}
    if not federation.evaluation.is_empty:
        model = federation.trained_model(snapshot)
        own = partial(federation.client_model, snapshot)
        of_client = own if federation.clients_keep_layers else lambda client: model
        found |= federation.evaluation.measure(federation.task, model, of_client)
    return {name: finite_or_none(x) if is_number(x) else x for name, x in found.items()}


def record_of(
    snapshot: Snapshot, measured: dict[str, Any], report: RoundReport, seconds: float
) -> Record:
    """Return a round's line of metrics.jsonl; traffic and seconds are totals so far."""
    return {
        "round": snapshot.round,
        "accuracy": None,
        "loss": None,
        **{name: x for name, x in asdict(report).items() if name != "secure"},
        "uplink_bits_paper": snapshot.traffic.uplink_bits_paper,
        "uplink_bytes": snapshot.traffic.uplink_bytes,
        "downlink_bytes": snapshot.traffic.downlink_bytes,
        "seconds": seconds,
        **({"secure": asdict(report.secure)} if report.secure.uplink else {}),
        **measured,
    }


def numbers_in(record: Record) -> dict[str, float]:
    """Return the columns of a record that hold a number, except the round.

    >>> numbers_in({"round": 3, "accuracy": 0.5, "loss": None, "problems": {}})
    {'accuracy': 0.5}
    """
    return {name: x for name, x in record.items() if name != "round" and is_number(x)}


def is_number(x: Any) -> bool:
    """Whether a measured value is a number, and not a list or missing."""
    return isinstance(x, int | float) and not isinstance(x, bool)


def finite_or_none(x: float) -> float | None:
    """Return a number if JSON can represent it, else None.

    >>> finite_or_none(0.5), finite_or_none(math.nan)
    (0.5, None)
    """
    return x if math.isfinite(x) else None
