"""Whether the kernels of this package compute a tensor."""

import torch

from fedsift.selection.backend import can_use_triton


def has_kernels(x: torch.Tensor) -> bool:
    """Whether Triton is installed and the tensor is on a GPU. The kernels add up in float32.

    >>> has_kernels(torch.zeros(1))
    False
    """
    return can_use_triton(x) and x.dtype != torch.float64
