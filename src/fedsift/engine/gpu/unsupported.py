"""Why a model cannot be computed in one of the faster ways."""

from __future__ import annotations


class UnsupportedModel(Exception):
    """A way to compute gradients does not support the model; the message says why."""


def reason_of(problem: BaseException, length: int = 120) -> str:
    r"""Return an exception's message as a short phrase in one line.

    >>> reason_of(UnsupportedModel("layer LSTM"))
    'layer LSTM'
    >>> reason_of(RuntimeError("attn_bias: wrong shape (batch dimension)\n  at line 3"))
    'attn_bias: wrong shape (batch dimension)'
    >>> reason_of(KeyError("mask"))
    "KeyError: 'mask'"
    """
    lines = str(problem).strip().splitlines() or [""]
    text = lines[0].strip().rstrip(".")
    if not text or not isinstance(problem, UnsupportedModel | RuntimeError):
        text = f"{type(problem).__name__}: {text}".rstrip(": ")
    return text if len(text) <= length else f"{text[: length - 1]}…"
