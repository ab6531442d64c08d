"""A warning for a run that has learned nothing, and what to try."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedsift.progress.text import percent

MIN_GAIN = 0.1
"""A model must make at least this share fewer errors than always answering one class does."""
HUGE = 2.0
"""A test loss above this multiple of that of equal probabilities means that training failed."""


def training_warning(
    history: Sequence[Mapping[str, Any]], labels: Sequence[Sequence[int]] = (), lr: Any = None
) -> str:
    """Return a warning if a run has learned nothing, otherwise ''.

    ``labels`` has the number of samples of each class on each client. Without it or without an
    accuracy, the test loss must be lower after the last round than after the first.

    >>> history = [{"accuracy": 0.11, "loss": 9e9}, {"accuracy": 0.09, "loss": 9e3}]
    >>> print(training_warning(history, [[5] * 10], lr=9.0))
    warning: the final accuracy, 9.00 %, is hardly better than guessing: try a smaller --lr than 9.0
    >>> training_warning([{"accuracy": None, "loss": 1.0}, {"accuracy": None, "loss": 0.5}])
    ''
    """
    tested = [r for r in history if r["accuracy"] is not None or r["loss"] is not None]
    if len(tested) < 2:
        return ""
    first, last = tested[0], tested[-1]
    accuracy = last["accuracy"]
    if last["loss"] is None:
        problem, is_high = "the test loss is not finite", True
    elif accuracy is not None and labels:
        if not is_guessing(accuracy, labels):
            return ""
        problem = f"the final accuracy, {percent(accuracy)}, is hardly better than guessing"
        is_high = last["loss"] > HUGE * math.log(len(labels[0]))
    elif first["loss"] is not None and last["loss"] < first["loss"]:
        return ""
    else:
        problem, is_high = f"the test loss did not fall, it is {last['loss']:.4g}", True
    now = "" if lr is None else f" than {lr}"
    advice = f"a smaller --lr{now}" if is_high else f"more --rounds or a larger --lr{now}"
    return f"warning: {problem}: try {advice}"


def is_guessing(accuracy: float, labels: Sequence[Sequence[int]]) -> bool:
    """Whether a model makes hardly fewer errors than always answering the most frequent class.

    >>> is_guessing(0.12, [[5] * 10]), is_guessing(0.3, [[5] * 10])
    (True, False)
    """
    totals = [sum(column) for column in zip(*labels, strict=True)]
    return bool(1 - accuracy > (1 - MIN_GAIN) * (1 - max(totals) / sum(totals)))
