"""Find the runs of a report, read them, and group those that differ only in their seed."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsift.errors import ConfigError
from fedsift.report.validation import METRICS, SUMMARY, UPLOADS, check_fields, check_lines
from fedsift.runs.compare import dense_fedadam_bytes, partition_text
from fedsift.runs.config import read_values
from fedsift.runs.folder import RunFolder, column
from fedsift.runs.records import last_round, trained_rounds
from fedsift.simulation import Record


@dataclass(frozen=True)
class ReportedRun:
    """A run in a report. What the run did not record is empty."""

    summary: Mapping[str, Any]
    history: Sequence[Record]
    uploads: Sequence[Mapping[str, Any]] = ()
    labels: Sequence[Sequence[int]] = ()
    folder: str = ""

    @property
    def rounds(self) -> int:
        """Number of finished rounds."""
        return last_round(self.history)

    @property
    def algorithm(self) -> str:
        """The method's name."""
        return str(self.summary.get("algorithm", "unnamed"))

    @property
    def partition(self) -> str:
        """The partition of the data, with θ where it applies, and what was held out."""
        return partition_text(self.summary)

    def setting(self, key: str) -> Any:
        """Return a setting; θ only if the partition uses it."""
        if key == "theta" and self.summary.get("partition") != "dirichlet":
            return None
        return self.summary.get(key)

    def dense_bytes(self, rounds: int) -> float | None:
        """Return what dense FedAdam would send per client in this many rounds, if known."""
        keys = ("parameters", "clients", "participation")
        parameters, clients, participation = (self.summary.get(key) for key in keys)
        if parameters is None or clients is None:
            return None
        return dense_fedadam_bytes(parameters, rounds, clients, participation or 1.0)


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Return the folders of all runs in or below the given folders, each once."""
    found: dict[Path, Path] = {}
    for path in paths:
        candidates = sorted(file.parent for file in path.rglob("config.toml"))
        runs = [folder for folder in candidates if last_round(RunFolder(folder).history())]
        if not runs:
            reason = "it has no finished round" if candidates else "it contains no run"
            raise ConfigError(f"cannot report on {path}: {reason}")
        for folder in runs:
            found.setdefault(folder.resolve(), folder)
    return list(found.values())


def find_target(runs: Sequence[Path]) -> float | None:
    """Return the target of the first ``fedsift compare`` that one of the runs belongs to."""
    for file in dict.fromkeys(run.parent / "compare.csv" for run in runs):
        if file.exists():
            try:
                with file.open(newline="", encoding="utf-8") as lines:
                    return next((float(row["target"]) for row in csv.DictReader(lines)), None)
            except (LookupError, TypeError, ValueError):
                raise ConfigError(f"{file} is damaged: it has no target") from None
    return None


def read_run(path: Path) -> ReportedRun:
    """Read a run's folder, and refuse one with damaged files."""
    folder = RunFolder(path)
    history, settings, uploads = folder.history(), read_values(folder.config_file), folder.uploads()
    check_lines(history, METRICS, folder.metrics_file)
    check_lines(uploads, UPLOADS, folder.uploads_file)
    stored = folder.summary()
    check_fields({**settings, **stored}, SUMMARY, str(folder.summary_file if stored else path))
    summary = stored or partial_summary(settings, history)
    shown = list(map(with_client_metrics, history))
    return ReportedRun(summary, shown, uploads, folder.labels(), str(path))


def with_client_metrics(record: Record) -> Record:
    """Return a record with columns for what the clients of a deployment measured.

    >>> with_client_metrics({"evaluation": {"metrics": {"f1": 0.5}}})["f1, clients' mean"]
    0.5
    """
    found = record.get("evaluation", {}).get("metrics", {})
    return {**record, **{f"{name}, clients' mean": value for name, value in found.items()}}


def partial_summary(settings: Mapping[str, Any], history: Sequence[Record]) -> dict[str, Any]:
    """Return the summary of an unfinished run."""
    seconds = float(history[-1]["seconds"])
    accuracies = column(trained_rounds(history), "accuracy")
    perplexities = column(trained_rounds(history), "perplexity")
    return {
        **settings,
        "final_accuracy": accuracies[-1] if accuracies else None,
        "best_accuracy": max(accuracies, default=None),
        "final_perplexity": perplexities[-1] if perplexities else None,
        "best_perplexity": min(perplexities, default=None),
        **{k: history[-1].get(k) for k in ("uplink_bits_paper", "uplink_bytes", "downlink_bytes")},
        "seconds": seconds,
        "seconds_per_round": seconds / max(1, last_round(history)),
        "stopped_after": last_round(history),
    }
