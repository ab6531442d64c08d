"""A round's metrics as text: sizes, shares, times, and one line per round."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from fedsift.engine.evaluation import OWN_COLUMNS

LONGEST = 1e9
"""No end is estimated that is further away than this many seconds."""


def file_size(size: float) -> str:
    """Return a number of bytes in MB, or in kB if it is small.

    >>> file_size(1_234_567), file_size(4_321)
    ('1.23 MB', '4.3 kB')
    """
    return f"{size / 1e6:.2f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"


def times_fewer(size: float, dense: float) -> str:
    """Return the dense size divided by the size, with at most one decimal.

    >>> times_fewer(1000, 40_000), times_fewer(3000, 10_000), times_fewer(100, 100)
    ('40×', '3.3×', '1.0×')
    """
    if not size:
        return "∞"
    ratio = dense / size
    return f"{ratio:.0f}×" if ratio >= 10 else f"{math.floor(ratio * 10 + 0.5) / 10:.1f}×"


def percent(x: float | None) -> str:
    """Return a share in percent to two decimals.

    >>> percent(0.5), percent(None)
    ('50.00 %', '–')
    """
    return "–" if x is None else f"{100 * x:.2f} %"


def perplexity_text(record: Mapping[str, Any]) -> list[str]:
    """Return the test perplexity of a language model, if there is one.

    >>> perplexity_text({"perplexity": 36.5048}), perplexity_text({"loss": 1.0})
    (['perplexity 36.50'], [])
    """
    found = record.get("perplexity")
    return [] if found is None else [f"perplexity {decimal(found)}"]


def decimal(x: float) -> str:
    """Return a number with two decimals, or in powers of ten if it is large.

    >>> decimal(36.5048), decimal(1234567.0)
    ('36.50', '1.23e+06')
    """
    return f"{x:.2f}" if x < 1e5 else f"{x:.3g}"


def short_status(record: Mapping[str, Any]) -> str:
    """Return a round's accuracy, or else its perplexity or loss, and the uplink so far.

    >>> short_status({"accuracy": 0.9, "uplink_bytes": 1.2e6})
    '90.00 % · 1.20 MB per client'
    >>> short_status({"accuracy": None, "loss": 0.5, "uplink_bytes": 1.2e6})
    'loss 0.5 · 1.20 MB per client'
    """
    accuracy = record["accuracy"]
    quality = perplexity_text(record) or loss_text(record)
    if accuracy is not None:
        quality = [percent(accuracy)]
    return " · ".join([*quality, f"{file_size(record['uplink_bytes'])} per client"])


def loss_text(record: Mapping[str, Any]) -> list[str]:
    """Return the test loss, if there is one.

    >>> loss_text({"loss": 1.23456}), loss_text({"loss": None})
    (['loss 1.235'], [])
    """
    return [] if record.get("loss") is None else [f"loss {record['loss']:.4g}"]


SHOWN_METRICS = 4
"""A line has at most this many of the user's own metrics."""


def metrics_text(record: Mapping[str, Any]) -> list[str]:
    """Return the user's own metrics, at most four.

    >>> metrics_text({"round": 1, "loss": 0.5, "r2": 0.98765, "seconds": 3.0, "f1": None})
    ['r2 0.9877']
    """
    usual = (*OWN_COLUMNS, "accuracy", "loss", "epsilon")
    own = [(name, x) for name, x in record.items() if name not in usual]
    numbers = [f"{name} {x:.4g}" for name, x in own if type(x) in (int, float)]
    return numbers[:SHOWN_METRICS]


def rejected_text(record: Mapping[str, Any]) -> list[str]:
    """Return the number of rejected updates, if there are any."""
    return [f"{record['rejected']} rejected"] if record.get("rejected") else []


def epsilon_text(record: Mapping[str, Any]) -> list[str]:
    """Return the privacy cost so far, if it is bounded.

    >>> epsilon_text({"epsilon": 1.234})
    ['ε 1.23']
    """
    return [f"ε {record['epsilon']:.3g}"] if "epsilon" in record else []


def round_line(
    name: str, record: Mapping[str, Any], rounds: int, now: datetime | None = None
) -> str:
    """Return a round's metrics in one line: traffic per client and seconds are totals so far.

    >>> round_line("sift", {"round": 1, "accuracy": 0.9, "loss": None, "uplink_bytes": 5e3,
    ...     "downlink_bytes": 1e6, "seconds": 60.0}, 3, datetime(2026, 1, 31, 9, 0))
    'sift round 1/3 · accuracy 90.00 % · 5.0 kB up, 1.00 MB down per client · 60.0 s · ends 09:02'
    """
    accuracy = [] if record["accuracy"] is None else [f"accuracy {percent(record['accuracy'])}"]
    up, down = (file_size(record[f"{way}link_bytes"]) for way in ("up", "down"))
    words = [
        f"{name} round {record['round']}/{rounds}",
        *accuracy,
        *perplexity_text(record),
        *loss_text(record),
        *metrics_text(record),
        f"{up} up, {down} down per client",
        *rejected_text(record),
        *epsilon_text(record),
        f"{record['seconds']:.1f} s",
        *end_text(record, rounds, now or datetime.now()),
    ]
    return " · ".join(words)


def end_text(record: Mapping[str, Any], rounds: int, now: datetime) -> list[str]:
    """Return when the last round should end if rounds take as long as they have so far.

    >>> record = {"round": 2, "seconds": 7200.0}
    >>> end_text(record, 12, datetime(2026, 1, 31, 21, 30)), end_text(record, 2, datetime.now())
    (['ends 02-01 07:30'], [])
    """
    done, left = record["round"], rounds - record["round"]
    seconds = left * record["seconds"] / done if done else math.inf
    if left <= 0 or seconds > LONGEST:
        return []
    end = now + timedelta(seconds=seconds)
    return [f"ends {end:%H:%M}" if end.date() == now.date() else f"ends {end:%m-%d %H:%M}"]
