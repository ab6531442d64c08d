"""Page-locked memory of the host, and what to do if a GPU runs out of memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from fedsift.errors import OutOfMemory


@contextmanager
def memory_advice() -> Iterator[None]:
    """Say in one line what to do if the GPU runs out of memory.

    >>> with memory_advice():
    ...     raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")
    Traceback (most recent call last):
    ...
    fedsift.errors.OutOfMemory: CUDA out of memory: choose a smaller batch size, ...
    """
    try:
        yield
    except torch.cuda.OutOfMemoryError as problem:
        reason = str(problem).partition(".")[0]
        raise OutOfMemory(
            f"{reason}: choose a smaller batch size, or compute activations again in the backward "
            "pass (--gradient-checkpointing for language models)"
        ) from None


class PinnedBuffer:
    """Page-locked host memory, from which a GPU copies while the host continues."""

    def __init__(self, like: Tensor) -> None:
        self.pages = torch.empty(like.shape, dtype=like.dtype, pin_memory=True)
        self.is_copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def send(self, x: Tensor, device: torch.device) -> Tensor:
        """Return a copy on the device, which later work on the same stream can use."""
        self.is_copied.synchronize()
        self.pages.numpy()[:] = x.numpy()
        copy = self.pages.to(device, non_blocking=True)
        self.is_copied.record()
        return copy
