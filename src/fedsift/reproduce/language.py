"""The results of language models: bytes to a perplexity, and perplexity for a number of bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from fedsift.reproduce.results import Outcome
from fedsift.reproduce.rows import mean
from fedsift.runs.compare import both_ways, megabytes, reached
from fedsift.simulation import Record

BUDGETS = (1.0, 10.0, 100.0)
"""Uplink per client, in MB."""
Size = Callable[[Record], float]


def summarize_language(lines: Iterable[Sequence[Outcome]]) -> list[dict[str, Any]]:
    """Return what the lines need to reach the target, and reach within each budget."""
    return [summary_of_line(line) for line in lines]


def summary_of_line(line: Sequence[Outcome]) -> dict[str, Any]:
    """Return the summary of the seeds of a line: means, or None if a seed has no value."""
    run = line[0].run
    hits = [reached(outcome.history, run.target) for outcome in line]
    last = [last_evaluated(outcome.history) for outcome in line]
    return {
        "task": run.task,
        "setting": run.setting,
        "method": run.label,
        "seeds": [outcome.run.config.seed for outcome in line],
        "target": run.target,
        "reached": sum(hit is not None for hit in hits),
        "megabytes": mean([megabytes(hit) if hit else None for hit in hits]),
        "both_ways": mean([both_ways(hit) if hit else None for hit in hits]),
        "rounds": mean([float(hit["round"]) if hit else None for hit in hits]),
        "final_perplexity": mean([record["perplexity"] for record in last]),
        "worst_client": mean([record.get("client_perplexity_worst") for record in last]),
        **{
            f"perplexity_at_{budget:g}_mb": mean([perplexity_at(x.history, budget) for x in line])
            for budget in BUDGETS
        },
        "commits": sorted({outcome.environment.get("commit", "") for outcome in line}),
        "devices": sorted({outcome.environment.get("device", "") for outcome in line}),
    }


def last_evaluated(history: Sequence[Record]) -> Record:
    """Return the last record with a perplexity."""
    return next(record for record in reversed(history) if record.get("perplexity") is not None)


def perplexity_at(history: Sequence[Record], budget: float, size: Size = megabytes) -> float | None:
    """Return the perplexity after the last round within a budget in MB; None if there is none.

    >>> history = [{"perplexity": p, "uplink_bytes": 1e6 * mb} for p, mb in ((9, 2), (8, 3))]
    >>> perplexity_at(history, 2.5), perplexity_at(history, 1.0)
    (9.0, None)
    """
    known = [r for r in history if r.get("perplexity") is not None and size(r) <= budget]
    return float(known[-1]["perplexity"]) if known else None
