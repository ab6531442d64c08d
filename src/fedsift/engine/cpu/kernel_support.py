"""Which layers and inputs the C kernels support.

The kernels check no bounds. Everything that they do not support is left to PyTorch, which computes
it or raises its usual error.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

MIN_BATCH = 16
"""The smallest batch that fills a vector register of every processor."""
MAX_CHANNELS = 64
"""The largest number of channels for which the kernels are faster than PyTorch."""


def is_supported_convolution(layer: nn.Module) -> bool:
    """Whether the kernels compute a layer and are faster than PyTorch.

    >>> is_supported_convolution(nn.Conv2d(1, 10, 5)), is_supported_convolution(nn.Linear(2, 2))
    (True, False)
    """
    return (
        type(layer) is nn.Conv2d
        and layer.weight.dtype == torch.float32
        and layer.weight.is_cpu
        and max(layer.in_channels, layer.out_channels) <= MAX_CHANNELS
        and layer.stride == layer.dilation == (1, 1)
        and layer.groups == 1
        and layer.padding_mode == "zeros"
        and not isinstance(layer.padding, str)
    )


def fusible_kind(layer: nn.Module) -> str:
    """Return ``"pool"`` or ``"relu"`` if a convolution's kernel can include the layer, else ``""``.

    >>> fusible_kind(nn.MaxPool2d(2)), fusible_kind(nn.MaxPool2d(3))
    ('pool', '')
    """
    if type(layer) is nn.MaxPool2d and _is_2x2(layer):
        return "pool"
    return "relu" if type(layer) is nn.ReLU else ""


def _is_2x2(layer: nn.MaxPool2d) -> bool:
    """Whether a pool reduces each 2 × 2 square of pixels to one."""
    options = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
    return options == (2, 2, 0, 1) and not layer.ceil_mode and not layer.return_indices


def padding_of(layer: nn.Conv2d) -> tuple[int, int]:
    """Return the rows and columns of zeros that a convolution adds on each side."""
    assert not isinstance(layer.padding, str)
    rows, columns = layer.padding
    return rows, columns


def is_supported_input(x: Tensor) -> bool:
    """Whether the kernels take tensors of this type and batch size."""
    return x.dim() == 4 and len(x) >= MIN_BATCH and x.dtype == torch.float32 and x.is_cpu


def can_convolve(layer: nn.Conv2d, x: Tensor, min_size: int = 1) -> bool:
    """Whether the kernels can convolve x, with at least ``min_size`` output pixels on each side.

    >>> layer = nn.Conv2d(1, 2, 3)
    >>> can_convolve(layer, torch.ones(16, 1, 3, 3)), can_convolve(layer, torch.ones(16, 3, 3, 3))
    (True, False)
    """
    if not is_supported_input(x) or x.shape[1] != layer.in_channels:
        return False
    axes = zip(x.shape[2:], padding_of(layer), layer.kernel_size, strict=True)
    return all(size + 2 * padding - kernel + 1 >= min_size for size, padding, kernel in axes)
