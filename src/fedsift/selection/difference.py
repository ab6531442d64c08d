"""The difference of two vectors, in full or only at selected coordinates."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedsift.selection.backend import can_use_triton


@dataclass(frozen=True, eq=False)
class Difference:
    """``end - start`` for tensors ``(clients, d)``, computed only where it is needed.

    >>> change = Difference(torch.ones(1, 3), torch.tensor([[1.0, 2.0, 4.0]]))
    >>> change.at(torch.tensor([[2]])), change.dense
    (tensor([[3.]]), tensor([[0., 1., 3.]]))
    """

    start: Tensor
    end: Tensor

    @cached_property
    def dense(self) -> Tensor:
        """All coordinates. They are computed on first use and then kept."""
        return self.end - self.start

    def at(self, indices: Tensor) -> Tensor:
        """Return the coordinates ``(clients, k)`` at the given indices."""
        if "dense" in self.__dict__:
            return self.dense.gather(-1, indices)
        if can_use_triton(self.end) and self.end.dtype == torch.float32:
            from fedsift.selection import gpu

            return gpu.difference_at(indices, self.end, self.start)
        return self.end.gather(-1, indices) - self.start.gather(-1, indices)
