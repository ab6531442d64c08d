"""Losses that the engines and the metrics recognize."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch.nn.functional import cross_entropy

IGNORED = -100
"""The label of positions that do not count, as everywhere in PyTorch."""


def next_token_loss(output: Any, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of the next token, over all positions of all samples.

    ``output`` holds logits ``(samples, positions, vocabulary)``, or is an object of Hugging Face
    that has them as ``logits``. ``targets`` are the next tokens ``(samples, positions)``; positions
    with :data:`IGNORED` do not count. Records of a run with this loss have a perplexity, the
    exponential of the loss, in place of an accuracy.

    >>> import torch
    >>> targets = torch.tensor([[1, 2, IGNORED]])
    >>> round(next_token_loss(torch.zeros(1, 3, 4), targets).exp().item(), 4)
    4.0
    """
    logits: Tensor = getattr(output, "logits", output)
    return cross_entropy(logits.flatten(0, -2).float(), targets.flatten(), ignore_index=IGNORED)


def sequence_cross_entropy(output: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy over all positions of all samples.

    ``output`` is ``(samples, positions, classes)`` and ``targets`` ``(samples, positions)``.
    Without positions, this is the usual cross-entropy.

    >>> import torch
    >>> output, targets = torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.int64)
    >>> round(sequence_cross_entropy(output, targets).exp().item(), 4)
    4.0
    """
    return cross_entropy(output.flatten(0, -2), targets.flatten())


def has_perplexity(loss: object) -> bool:
    """Whether the quality of a model with this loss is its perplexity, and not an accuracy."""
    return loss is next_token_loss


def perplexity(loss: float | None) -> float | None:
    """Return the exponential of a loss; None if it is unknown or too large for a number.

    >>> perplexity(0.0), perplexity(None), perplexity(1e9)
    (1.0, None, None)
    """
    try:
        return None if loss is None else math.exp(loss)
    except OverflowError:
        return None
