"""Compare algorithms on one task, as Table 1 of the paper does."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from io import StringIO
from typing import Any

from fedsift.algorithms import normalized_name, settings_of
from fedsift.errors import ConfigError
from fedsift.federation.cohort import cohort_size
from fedsift.runs.config import RunConfig, with_user_data
from fedsift.runs.folder import column
from fedsift.runs.records import trained_rounds
from fedsift.simulation import Record

MIBIT = 2**20
"""Bits in a Mibit, the unit of the paper's Table 1."""


def mibit(record: Mapping[str, Any]) -> float:
    """Return the uplink per client by the paper's formula, in Mibit."""
    return float(record["uplink_bits_paper"]) / MIBIT


def megabytes(record: Record) -> float:
    """Return the uplink per client in MB."""
    return float(record["uplink_bytes"]) / 1e6


def both_ways(record: Record) -> float:
    """Return the uplink and downlink per client in MB."""
    return megabytes(record) + float(record["downlink_bytes"]) / 1e6


def dense_fedadam_bytes(
    parameters: int, rounds: int, clients: int, participation: float = 1.0
) -> float:
    """Return what dense FedAdam would send per client in the same rounds: 12 bytes per parameter.

    It uploads ΔW, ΔM and ΔV in 32 bits each. With partial participation this is the mean over all
    clients, as in the metrics.

    >>> dense_fedadam_bytes(parameters=1000, rounds=10, clients=20, participation=0.5)
    60000.0
    """
    return 12.0 * parameters * rounds * cohort_size(participation, clients) / clients


def partition_text(summary: Mapping[str, Any]) -> str:
    """Return the partition, with θ where it applies, and what was held out of the training data.

    >>> partition_text({"partition": "dirichlet", "theta": 0.1})
    'dirichlet (θ = 0.1)'
    >>> partition_text({"partition": "iid", "validation": 0.1})
    'iid, tested on 10 % of the training data'
    """
    name = str(summary.get("partition"))
    text = f"{name} (θ = {summary['theta']:g})" if name == "dirichlet" else name
    if share := summary.get("validation"):
        text += f", tested on {share:.0%} of the training data".replace("%", " %")
    return text


@dataclass(frozen=True)
class Row:
    """The result of one algorithm: its uplink per client when it first reached the target.

    ``mibit``, ``megabytes`` and ``round`` are None if it did not, and the accuracies are None if
    training diverged before the first evaluation. ``ratio`` is to the fewest Mibit of all rows. The
    accuracy on the clients is that after the last round; None if it was not measured.
    """

    algorithm: str
    target: float
    mibit: float | None
    megabytes: float | None
    round: int | None
    best_accuracy: float | None
    final_accuracy: float | None
    ratio: float | None = None
    client_accuracy_mean: float | None = None
    client_accuracy_worst: float | None = None
    client_accuracy_p10: float | None = None
    client_accuracy_std: float | None = None
    best_perplexity: float | None = None
    final_perplexity: float | None = None
    client_perplexity_mean: float | None = None
    client_perplexity_worst: float | None = None
    client_perplexity_p90: float | None = None
    client_perplexity_std: float | None = None


def columns_with(prefix: str) -> tuple[str, ...]:
    """Return the columns of a row whose names begin like this."""
    return tuple(name for name in Row.__dataclass_fields__ if name.startswith(prefix))


CLIENT_COLUMNS = columns_with("client_accuracy")
"""Columns of a row with the accuracy on the clients, named as in metrics.jsonl."""
PERPLEXITY_COLUMNS = columns_with("client_perplexity")
"""The same for the perplexity of language models."""
OF_LANGUAGE = ("best_perplexity", "final_perplexity", *PERPLEXITY_COLUMNS)
"""Columns that only rows of language models have in compare.csv."""


def names_of(algorithms: Any) -> list[str]:
    """Return the names in a comma-separated string or in a list.

    >>> names_of("fedadam,fedsgd"), names_of(["fedsgd"])
    (['fedadam', 'fedsgd'], ['fedsgd'])
    """
    names = algorithms.split(",") if isinstance(algorithms, str) else algorithms
    if isinstance(names, list) and names and all(isinstance(name, str) for name in names):
        return names
    raise ConfigError(f'algorithms must be names, as in "fedadam-ssm,fedadam", got {algorithms!r}')


def configs_of(algorithms: Sequence[str], values: Mapping[str, Any]) -> list[RunConfig]:
    """Return a configuration for each algorithm, with the settings that apply to it.

    >>> [c.settings for c in configs_of(["fedsgd", "fedadam-ssm"], {"density": 0.1, "lr": 0.01})]
    [{'lr': 0.01}, {'density': 0.1, 'lr': 0.01}]
    """
    values = with_user_data(values)
    names = [normalized_name(name.strip()) for name in algorithms]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"{twice} is listed twice")
    known = {name: settings_of(name) for name in names}
    known_keys = {key for settings in known.values() for key in settings}
    for key in values:
        if key not in known_keys | set(RunConfig.__dataclass_fields__):
            raise ConfigError(
                f"none of these algorithms has a setting {key.replace('_', '-')!r}; they have: "
                f"{', '.join(sorted(k.replace('_', '-') for k in known_keys))}"
            )
    return [config_of(name, values) for name in names]


def config_of(algorithm: str, values: Mapping[str, Any]) -> RunConfig:
    """Return a configuration without the settings that the algorithm does not have.

    >>> config_of("fedsgd", {"density": 0.1, "lr": 0.01, "clients": 5}).settings
    {'lr': 0.01}
    """
    fitting = {*RunConfig.__dataclass_fields__, *settings_of(algorithm)}
    own = {key: value for key, value in values.items() if key in fitting}
    return RunConfig.from_values({**own, "algorithm": algorithm})


def reached(history: Sequence[Record], target: float) -> Record | None:
    """Return the first round that reached the target, if any; never round 0.

    A target is a test accuracy, or for a language model a test perplexity.

    >>> reached([{"round": 1, "accuracy": None, "perplexity": 20.0}], target=30.0)["round"]
    1
    """
    return next((r for r in trained_rounds(history) if has_reached(r, target)), None)


def has_reached(record: Record, target: float) -> bool:
    """Whether a round's accuracy is at least the target, or its perplexity at most."""
    if "perplexity" in record:
        return (record["perplexity"] or math.inf) <= target
    return (record.get("accuracy") or 0) >= target


def row_of(algorithm: str, history: Sequence[Record], target: float) -> Row:
    """Return what an algorithm had sent when it first reached the target."""
    first = reached(history, target)
    accuracies = column(trained_rounds(history), "accuracy")
    perplexities = column(trained_rounds(history), "perplexity")
    return Row(
        algorithm,
        target,
        None if first is None else mibit(first),
        None if first is None else megabytes(first),
        None if first is None else int(first["round"]),
        max(accuracies, default=None),
        accuracies[-1] if accuracies else None,
        best_perplexity=min(perplexities, default=None),
        final_perplexity=perplexities[-1] if perplexities else None,
        **{
            name: next(reversed(column(history, name)), None)
            for name in (*CLIENT_COLUMNS, *PERPLEXITY_COLUMNS)
        },
    )


def table_of(histories: Mapping[str, Sequence[Record]], target: float) -> list[Row]:
    """Return a row for each algorithm, with its ratio to the best."""
    rows = [row_of(name, history, target) for name, history in histories.items()]
    spent = [row.mibit for row in rows if row.mibit is not None]
    best = min(spent, default=None)
    return [_with_ratio(row, best) for row in rows]


def _with_ratio(row: Row, best: float | None) -> Row:
    ratio = None if row.mibit is None or not best else row.mibit / best
    return replace(row, ratio=ratio)


def csv_of(rows: Iterable[Row]) -> str:
    """Return the rows as CSV in full precision; empty where the target was not reached."""
    text, rows = StringIO(), list(rows)
    writer = csv.writer(text, lineterminator="\n")
    left_out = () if any(row.final_perplexity is not None for row in rows) else OF_LANGUAGE
    columns = [name for name in Row.__dataclass_fields__ if name not in left_out]
    writer.writerow(columns)
    for row in rows:
        values = (getattr(row, name) for name in columns)
        writer.writerow("" if value is None else value for value in values)
    return text.getvalue()
