"""The arithmetic of training on a GPU: its precision, and sums in a fixed order."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

PRECISIONS = ("fp32", "tf32", "bf16")
ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Implementations of attention. That of cuDNN cannot add up gradients in a fixed order."""


def arithmetic(precision: str, device: torch.device) -> ExitStack:
    """Enable a precision and deterministic kernels, until the context is left.

    >>> with arithmetic("bf16", torch.device("cpu")):
    ...     print((torch.ones(1, 2) @ torch.ones(2, 1)).dtype)
    torch.bfloat16
    """
    stack = ExitStack()
    tf32 = precision != "fp32"
    matmul = torch.backends.cuda.matmul
    stack.callback(setattr, matmul, "allow_tf32", matmul.allow_tf32)
    matmul.allow_tf32 = tf32
    flags: AbstractContextManager[None] = torch.backends.cudnn.flags(
        enabled=True, benchmark=False, deterministic=True, allow_tf32=tf32
    )
    stack.enter_context(flags)
    stack.enter_context(deterministic_attention())
    if precision == "bf16":
        stack.enter_context(torch.autocast(device.type, torch.bfloat16, cache_enabled=False))
    return stack


@contextmanager
def deterministic_attention() -> Iterator[None]:
    """Let fused attention add up its gradients in a fixed order, which PyTorch does on request.

    Warnings about other operations that have no such order are hidden.
    """
    deterministic: Any = torch.utils.deterministic
    mode, fills = torch.get_deterministic_debug_mode(), deterministic.fill_uninitialized_memory
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        deterministic.fill_uninitialized_memory = False  # which would take time
        with warnings.catch_warnings(), sdpa_kernel(ATTENTION):
            warnings.filterwarnings("ignore", message=".*[Dd]eterministic.*")
            yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        deterministic.fill_uninitialized_memory = fills
