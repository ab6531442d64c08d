"""Rows of results as CSV, and the statistics that are in them."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from io import StringIO
from statistics import fmean
from typing import Any


def rows_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    r"""Return rows as CSV, with the names of the first one as its head; None is empty.

    >>> rows_csv([{"method": "sift", "seeds": [0, 1], "up": None}])
    'method,seeds,up\nsift,0 1,\n'
    """
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(rows[0])
    for row in rows:
        writer.writerow(map(cell, row.values()))
    return text.getvalue()


def cell(value: Any) -> Any:
    """Return the cell of a value: lists are separated by spaces."""
    if value is None:
        return ""
    return " ".join(map(str, value)) if isinstance(value, list) else value


def mean(values: Sequence[float | None]) -> float | None:
    """Return the mean; None if a value is missing, or all are.

    >>> mean([1.0, 2.0]), mean([1.0, None])
    (1.5, None)
    """
    known = [value for value in values if value is not None]
    return fmean(known) if known and len(known) == len(values) else None
