"""Losses and metrics that, by broadcasting, compare each output with the labels of all samples."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def check_broadcasting(name: str, function: Callable[..., Any], output: Any, y: Any) -> None:
    """Raise ValueError if a loss or metric compares each output with the label of every sample.

    In ``(output - y) ** 2``, shapes (n, 1) and (n,) give (n, n). Such a value does not depend on
    which label belongs to which sample, until both shapes are equal.

    >>> def error(output, y):
    ...     return ((output - y) ** 2).mean()
    >>> check_broadcasting("the loss", error, torch.zeros(2, 1), torch.zeros(2))
    Traceback (most recent call last):
    ...
    ValueError: the loss compares each output with the labels of all samples: the output has shape \
(n, 1) and y has shape (n,); give y the shape (n, 1), with y[:, None]
    """
    if not (isinstance(output, Tensor) and isinstance(y, Tensor)):
        return
    row, column = torch.Size([len(y)]), torch.Size([len(y), 1])
    if {output.shape, y.shape} != {row, column} or not mixes_samples(function, output, y):
        return
    shapes, remedy = ("(n, 1) and y has shape (n,)", "(n, 1), with y[:, None]")
    if y.shape == column:
        shapes, remedy = ("(n,) and y has shape (n, 1)", "(n,), with y[:, 0]")
    raise ValueError(
        f"{name} compares each output with the labels of all samples: the output has shape "
        f"{shapes}; give y the shape {remedy}"
    )


def mixes_samples(function: Callable[..., Any], output: Tensor, y: Tensor) -> bool:
    """Whether the order of the labels matters, but only if output and y have the same shape.

    >>> output, y = torch.zeros(2, 1), torch.zeros(2)
    >>> mixes_samples(torch.nn.functional.mse_loss, output, y)
    True
    >>> mixes_samples(lambda output, y: ((output[:, 0] - y) ** 2).mean(), output, y)
    False
    """
    row = torch.Size([len(y)])
    number = torch.arange(len(y), device=y.device)
    labels = y.view(row)
    labels = labels if len(set(labels.tolist())) > 1 else labels + number
    # An absolute error may be the same in both orders for some outputs, but not for the labels.
    tries = output.detach().view(row) + number, labels.to(output.dtype)
    given = [_depends_on_order(function, x.view(output.shape), labels.view(y.shape)) for x in tries]
    equal = [_depends_on_order(function, x, labels) for x in tries]
    return False in given and True not in given and True in equal


def _depends_on_order(function: Callable[..., Any], output: Tensor, y: Tensor) -> bool | None:
    """Whether a loss or metric changes with the order of the labels, None if it fails."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            values = float(function(output, y)), float(function(output, y.flip(0)))
    except Exception:  # the function needs the shapes and values that it was given
        return None
    return not math.isclose(*values, rel_tol=1e-4, abs_tol=1e-8)
