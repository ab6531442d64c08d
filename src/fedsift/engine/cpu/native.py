"""The C kernels of local training. Without a C compiler, PyTorch's layers do the work."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

from fedsift.native import Argument, Kernel, Library

LIBRARY = Library(Path(__file__).with_name("kernels.c"))


def kernel(name: str) -> Kernel:
    """Return a C kernel as a function of tensors (passed by their memory) and numbers."""
    return LIBRARY.kernel(name)


def prepared(name: str, *arguments: Argument) -> Callable[[], None]:
    """Return a repeatable call of a C kernel on the given memory and numbers."""
    return LIBRARY.prepared(name, *arguments)


def load() -> ctypes.CDLL | None:
    """Return the compiled kernels, or None if they cannot be compiled."""
    return LIBRARY.load()
