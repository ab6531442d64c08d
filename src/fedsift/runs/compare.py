"""Several algorithms on one task: the paper's Table 1, for any task."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from io import StringIO
from typing import Any

from fedsift.algorithms import settings_of
from fedsift.errors import ConfigError
from fedsift.runs.config import (
    RunConfig,
)
from fedsift.runs.folder import column
from fedsift.simulation import Record

MIBIT = 2**20
"""Bits in a Mibit, the unit of the paper's Table 1."""


def mibit(record: Mapping[str, Any]) -> float:
    """What a client had sent by the paper's formula, in Mibit."""
    return float(record["uplink_bits_paper"]) / MIBIT


def megabytes(record: Record) -> float:
    """What a client had sent, in MB."""
    return float(record["uplink_bytes"]) / 1e6


def both_ways(record: Record) -> float:
    """What a client had sent and received, in MB."""
    return megabytes(record) + float(record["downlink_bytes"]) / 1e6


@dataclass(frozen=True)
class Row:
    """How one algorithm fared; ``mibit`` and ``round`` are None if the target was not reached.

    The accuracies are None if it diverged before its first test.
    """

    algorithm: str
    target: float
    mibit: float | None
    megabytes: float | None
    round: int | None
    best_accuracy: float | None
    final_accuracy: float | None
    ratio: float | None = None


def names_of(algorithms: Any) -> list[str]:
    """The names in a text with commas, or in a list.

    >>> names_of("fedadam,fedsgd"), names_of(["fedsgd"])
    (['fedadam', 'fedsgd'], ['fedsgd'])
    """
    names = algorithms.split(",") if isinstance(algorithms, str) else algorithms
    if isinstance(names, list) and names and all(isinstance(name, str) for name in names):
        return names
    raise ConfigError(f'algorithms must be words, as "fedadam-ssm,fedadam", got {algorithms!r}')


def configs_of(algorithms: Sequence[str], values: Mapping[str, Any]) -> list[RunConfig]:
    """One run's configuration for each algorithm, each given the settings that it has.

    >>> [c.settings for c in configs_of(["fedsgd", "fedadam-ssm"], {"density": 0.1, "lr": 0.01})]
    [{'lr': 0.01}, {'density': 0.1, 'lr': 0.01}]
    """
    names = [name.strip().replace("_", "-") for name in algorithms]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"{twice} is named twice: once is enough")
    known = {name: settings_of(name) for name in names}
    anywhere = {key for settings in known.values() for key in settings}
    for key in values:
        if key not in anywhere | set(RunConfig.__dataclass_fields__):
            raise ConfigError(
                f"none of these algorithms has a setting {key.replace('_', '-')!r}; they have: "
                f"{', '.join(sorted(k.replace('_', '-') for k in anywhere))}"
            )
    return [config_of(name, values) for name in names]


def config_of(algorithm: str, values: Mapping[str, Any]) -> RunConfig:
    """A run's configuration, without the settings that the algorithm does not have.

    >>> config_of("fedsgd", {"density": 0.1, "lr": 0.01, "clients": 5}).settings
    {'lr': 0.01}
    """
    fitting = {*RunConfig.__dataclass_fields__, *settings_of(algorithm)}
    own = {key: value for key, value in values.items() if key in fitting}
    return RunConfig.from_values({**own, "algorithm": algorithm})


def reached(history: Sequence[Record], target: float) -> Record | None:
    """The first round whose test accuracy reached the target."""
    return next((r for r in history if (r.get("accuracy") or 0) >= target), None)


def row_of(algorithm: str, history: Sequence[Record], target: float) -> Row:
    """What an algorithm had sent when its test accuracy first reached the target."""
    then = reached(history, target)
    accuracies = column(history, "accuracy")
    return Row(
        algorithm,
        target,
        None if then is None else mibit(then),
        None if then is None else megabytes(then),
        None if then is None else int(then["round"]),
        max(accuracies, default=None),
        accuracies[-1] if accuracies else None,
    )


def table_of(histories: Mapping[str, Sequence[Record]], target: float) -> list[Row]:
    """The comparison, each row with its ratio to the best."""
    rows = [row_of(name, history, target) for name, history in histories.items()]
    spent = [row.mibit for row in rows if row.mibit is not None]
    best = min(spent, default=None)
    return [_with_ratio(row, best) for row in rows]


def _with_ratio(row: Row, best: float | None) -> Row:
    ratio = None if row.mibit is None or not best else row.mibit / best
    return replace(row, ratio=ratio)


def csv_of(rows: Iterable[Row]) -> str:
    """The comparison as CSV, in full precision; empty where the target was not reached."""
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(Row.__dataclass_fields__)
    for row in rows:
        writer.writerow("" if value is None else value for value in row.__dict__.values())
    return text.getvalue()
