"""A parameter of all clients of a stack."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Weight:
    """A parameter of every client ``(clients, ...)`` and the memory for its gradient.

    ``low_precision`` is the value in the number format of the matrix products.
    """

    value: Tensor
    low_precision: Tensor
    gradient: Tensor
