"""Check the numbers of a run that a report needs, so that a damaged file gives a one-line error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedsift.codec.update import ROLES
from fedsift.errors import ConfigError

Check = Callable[[Any], bool]


def is_amount(x: Any) -> bool:
    """Return whether a value is a finite number that is not negative.

    >>> is_amount(0.5), is_amount(-1), is_amount("1"), is_amount(float("nan"))
    (True, False, False, False)
    """
    return is_number(x) and x >= 0


def is_number(x: Any) -> bool:
    """Return whether a value is a finite number, also as a float."""
    is_one = isinstance(x, int | float) and not isinstance(x, bool)
    return is_one and abs(x) <= sys.float_info.max


def is_missing_or(check: Check) -> Check:
    """Return a check that also accepts None."""
    return lambda x: x is None or check(x)


METRICS: dict[str, Check] = {
    "accuracy": is_missing_or(is_amount),
    "loss": is_missing_or(is_number),
    "train_loss": is_missing_or(is_number),
    "uplink_bits_paper": is_amount,
    "uplink_bytes": is_amount,
    "downlink_bytes": is_amount,
    "seconds": is_amount,
}
CLIENTS: dict[str, Check] = {
    "client_accuracy": lambda x: isinstance(x, list) and bool(x) and all(map(is_amount, x)),
    **{f"client_accuracy_{name}": is_amount for name in ("mean", "worst", "p10", "std")},
}
"""Columns of a line of metrics.jsonl that has the accuracy on each client."""
PERPLEXITIES: dict[str, Check] = {
    "client_perplexity": CLIENTS["client_accuracy"],
    **{f"client_perplexity_{name}": is_amount for name in ("mean", "worst", "p90", "std")},
}
"""Columns of a line that has the perplexity on each client."""
EVALUATION: dict[str, Check] = {"evaluation": lambda x: is_evaluation(x)}
"""The column of a line of metrics.jsonl whose model clients evaluated."""
SUMMARY: dict[str, Check] = {
    **dict.fromkeys(
        (
            "final_accuracy", "best_accuracy", "final_perplexity", "best_perplexity",
            "uplink_bits_paper", "uplink_bytes",
            "downlink_bytes", "seconds", "seconds_per_round", "stopped_after",
        ),
        is_missing_or(is_amount),
    ),
    "parameters": is_missing_or(lambda x: isinstance(x, int) and x > 0),
    "clients": is_missing_or(lambda x: isinstance(x, int) and x > 0),
    "participation": is_missing_or(lambda x: is_amount(x) and 0 < x <= 1),
}  # fmt: skip


def is_table_of(keys: Check, values: Check) -> Check:
    """Return a check for an object whose keys and values pass their checks."""
    return lambda x: isinstance(x, dict) and all(keys(k) and values(v) for k, v in x.items())


def is_evaluation(x: Any) -> bool:
    """Return whether a value has the metrics that clients reported."""
    is_metrics = is_table_of(lambda key: isinstance(key, str), is_number)
    return isinstance(x, dict) and is_metrics(x.get("metrics"))


def is_roles(x: Any) -> bool:
    """Return whether a key names roles, such as ``"wmv"`` for a shared mask."""
    return bool(x) and set(x) <= set(ROLES)


def is_mask(x: Any) -> bool:
    """Return whether a value is a mask's statistics."""
    return (
        isinstance(x, dict)
        and is_amount(x.get("kept"))
        and is_amount(x.get("union"))
        and is_missing_or(is_amount)(x.get("overlap"))
    )


def is_histogram(x: Any) -> bool:
    """Return whether a value is a histogram of magnitudes."""
    return (
        isinstance(x, dict)
        and is_number(x.get("from"))
        and is_amount(x.get("step"))
        and x["step"] > 0
        and is_amount(x.get("outside"))
        and isinstance(x.get("counts"), list)
        and all(is_amount(n) for n in x["counts"])
    )


def is_square(x: Any) -> bool:
    """Return whether a value is a square of counts whose diagonal is not zero.

    >>> is_square([[2, 1], [1, 3]]), is_square([[0]]), is_square([[1, 2]])
    (True, False, False)
    """
    if not isinstance(x, list) or not all(isinstance(row, list) for row in x):
        return False
    if not all(len(row) == len(x) and all(is_amount(n) for n in row) for row in x):
        return False
    return all(row[i] > 0 for i, row in enumerate(x))


UPLOADS: dict[str, Check] = {
    "uploads": is_amount,
    "bytes": is_table_of(lambda key: True, is_amount),
    "masks": is_table_of(is_roles, is_mask),
    "magnitudes": is_missing_or(is_table_of(is_roles, is_histogram)),
    "shared": is_missing_or(is_table_of(is_roles, is_square)),
    "clients": is_missing_or(lambda x: isinstance(x, list) and all(isinstance(n, int) for n in x)),
}


def check_fields(values: Mapping[str, Any], checks: Mapping[str, Check], where: str) -> None:
    """Refuse an object with a wrong or missing field."""
    for key, check in checks.items():
        if not check(values.get(key)):
            raise ConfigError(f"{where} is damaged: {key} is wrong or missing; restore the file")


def check_own_columns(line: Mapping[str, Any], where: str) -> None:
    """Refuse a number that is not finite, and accuracies on clients without their summaries."""
    for key, value in line.items():
        if isinstance(value, int | float) and not isinstance(value, bool) and not is_number(value):
            raise ConfigError(f"{where} is damaged: {key} is not a number; restore the file")
    for columns in (CLIENTS, PERPLEXITIES):
        if any(key in line for key in columns):
            check_fields(line, columns, where)
    if "evaluation" in line:
        check_fields(line, EVALUATION, where)


def check_lines(
    lines: Sequence[Mapping[str, Any]], checks: Mapping[str, Check], file: Path
) -> None:
    """Refuse a file with a wrong line."""
    for number, line in enumerate(lines, start=1):
        check_fields(line, checks, f"line {number} of {file}")
        check_own_columns(line, f"line {number} of {file}")
        pairs = line.get("shared") or {}
        if any(len(square) != len(line.get("clients") or ()) for square in pairs.values()):
            raise ConfigError(f"line {number} of {file} is damaged: shared does not fit clients")
