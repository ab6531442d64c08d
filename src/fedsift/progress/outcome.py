"""A warning for a run that has learned nothing, and what to try."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedsift.progress.text import percent

MIN_GAIN = 0.1
"""A model must make at least this share fewer errors than always answering one class does."""
MIN_FALL = 0.001
"""The test loss must fall by at least this share."""
HUGE = 2.0
"""A test loss above this multiple of that of equal probabilities means that training failed."""


def training_warning(
    history: Sequence[Mapping[str, Any]],
    labels: Sequence[Sequence[int]] = (),
    lr: Any = None,
    dashes: str = "--",
) -> str:
    """Return a warning if a run has learned nothing, otherwise ''.

    A run has learned nothing if its test loss has hardly fallen since the first record or is far
    too high. If its accuracy is known and ``labels``, the number of samples of each class on each
    client, it must also be no better than guessing.

    >>> history = [{"accuracy": 0.11, "loss": 9e9}, {"accuracy": 0.09, "loss": 9e3}]
    >>> print(training_warning(history, [[5] * 10], lr=9.0))
    warning: the final accuracy, 9.00 %, is hardly better than guessing: try a smaller --lr than 9.0
    >>> training_warning([{"accuracy": None, "loss": 1.0}, {"accuracy": None, "loss": 0.5}])
    ''
    >>> print(training_warning([{"accuracy": None, "loss": 1.0}] * 2))
    warning: the test loss did not fall, it is 1: try more --rounds or a larger --lr
    >>> print(training_warning([{"accuracy": None, "loss": 1.0}, {"accuracy": None, "loss": 3.0}]))
    warning: the test loss rose, it is 3: try a smaller --lr
    """
    tested = [r for r in history if r["accuracy"] is not None or r["loss"] is not None]
    if len(tested) < 2:
        return ""
    first, last = tested[0], tested[-1]
    if last["loss"] is None and first["loss"] is not None:
        return advice("the test loss is not finite", "a smaller", lr, dashes)
    if last["loss"] is None:
        return ""
    before = math.inf if first["loss"] is None else first["loss"]
    has_fallen = last["loss"] < (1 - MIN_FALL) * before
    if last["accuracy"] is None or not labels:
        is_high = last["loss"] > (1 + MIN_FALL) * before
        what = f"the test loss {'rose' if is_high else 'did not fall'}, it is {last['loss']:.4g}"
        is_fine = has_fallen
    else:
        is_high = last["loss"] > HUGE * math.log(len(labels[0]))
        what = f"the final accuracy, {percent(last['accuracy'])}, is hardly better than guessing"
        is_fine = not is_guessing(last["accuracy"], labels) or (has_fallen and not is_high)
    direction = "a smaller" if is_high else f"more {dashes}rounds or a larger"
    return "" if is_fine else advice(what, direction, lr, dashes)


def advice(problem: str, direction: str, lr: Any, dashes: str = "--") -> str:
    """Return a warning in one line. On the command line, settings have dashes.

    >>> advice("the test loss is not finite", "a smaller", 0.1)
    'warning: the test loss is not finite: try a smaller --lr than 0.1'
    """
    return f"warning: {problem}: try {direction} {dashes}lr" + ("" if lr is None else f" than {lr}")


def is_guessing(accuracy: float, labels: Sequence[Sequence[int]]) -> bool:
    """Whether a model makes hardly fewer errors than always answering the most frequent class.

    >>> is_guessing(0.12, [[5] * 10]), is_guessing(0.3, [[5] * 10])
    (True, False)
    """
    totals = [sum(column) for column in zip(*labels, strict=True)]
    return bool(1 - accuracy > (1 - MIN_GAIN) * (1 - max(totals) / sum(totals)))
