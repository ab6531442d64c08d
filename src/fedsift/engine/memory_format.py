"""The memory format of images: channels last is faster, but not every model accepts it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedsift.engine.cpu.kernel_support import MIN_BATCH
from fedsift.task.samples import Tree, leaves_of, map_tree


def channels_last(images: Tensor) -> Tensor:
    """Return images with channels last in memory, with matching strides even for one channel.

    >>> channels_last(torch.zeros(2, 1, 4, 4)).stride()
    (16, 1, 4, 1)
    """
    _, channels, height, width = images.shape
    strides = (channels * height * width, 1, channels * width, channels)
    return images.contiguous(memory_format=torch.channels_last).as_strided(images.shape, strides)


def is_callable_with(call: Callable[[Any], object], data: Tree) -> bool:
    """Whether a model runs on data: in some memory formats, its calls of ``view`` may fail.

    >>> is_callable_with(lambda x: x.view(len(x), -1), torch.zeros(1, 2, 2))
    True
    >>> is_callable_with(lambda x: x.transpose(1, 2).view(len(x), -1), torch.zeros(1, 2, 2))
    False
    """
    batch = map_tree(lambda x: x[:1].expand(MIN_BATCH, *x.shape[1:]).contiguous(), data)
    device = leaves_of(data)[0].device
    try:
        with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            call(batch)
    except RuntimeError:
        return False
    return True
