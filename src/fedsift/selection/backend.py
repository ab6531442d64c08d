"""Which implementation selects and measures coordinates: the Triton kernels, or PyTorch."""

from functools import cache
from importlib.util import find_spec

import torch


def can_use_triton(x: torch.Tensor) -> bool:
    """Whether Triton is installed and the tensor is on the current GPU."""
    return x.is_cuda and _has_triton() and x.get_device() == torch.cuda.current_device()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
