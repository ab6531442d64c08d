"""A method's local step in place; Adam's as one kernel, on a GPU and on a CPU.

Written out, Adam's step reads and writes each of its tensors several times; fused, once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedsift.adam import adam_step, clipped, clipped_adam_step
from fedsift.algorithms.method import Step
from fedsift.engine.cpu import native
from fedsift.selection.backend import can_use_triton
from fedsift.vector import Moments

InPlace = Callable[[Moments, Tensor, Tensor], None]


def fused(step: Step, like: Tensor) -> InPlace:
    """The same step, writing its result over its input.

    The last argument is the copy of the weights in the number format of the layers, bf16 say, which
    follows them; where there is no such copy, give the weights themselves.

    >>> x = Moments.start(torch.zeros(1, 2))
    >>> fused(lambda x, gradient: x._replace(w=x.w - gradient), x.w)(x, torch.ones(1, 2), x.w)
    >>> x.w.tolist()
    [[-1.0, -1.0]]
    """
    if isinstance(step, partial) and step.func is clipped_adam_step:
        return after_clipping(step.keywords, like)
    if isinstance(step, partial) and step.func is adam_step and like.dtype == torch.float32:
        if can_use_triton(like):
            return partial(adam_on_gpu, **step.keywords)
        if like.is_cpu and native.load() is not None:
            return partial(adam_on_cpu, **step.keywords)

    def in_place(x: Moments, gradient: Tensor, short: Tensor) -> None:
        for old, new in zip(x, step(x, gradient), strict=True):
            if new is not old:
                old.copy_(new)
        if short is not x.w:
            short.copy_(x.w)

    return in_place


def after_clipping(settings: dict[str, Any], like: Tensor) -> InPlace:
    """Adam's step in place, on a gradient of bounded norm."""
    clip = settings["clip"]
    adam = fused(partial(adam_step, **{k: v for k, v in settings.items() if k != "clip"}), like)
    return lambda x, gradient, short: adam(x, clipped(gradient, clip), short)


def adam_on_gpu(
    x: Moments,
    gradient: Tensor,
    short: Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """Equations (4), (5) and (3), each tensor read and written once."""
    from fedsift.engine.gpu.triton import adam_kernel  # Triton is there only beside a GPU

    block, numbers = 1024, x.w.numel()
    whole = numbers // block * block
    for first, last in ((0, whole), (whole, numbers)):
        if first < last:
            adam_kernel[(-(-(last - first) // block),)](
                x.w, x.m, x.v, gradient, short, first, last,
                lr, beta1, 1 - beta1, beta2, 1 - beta2, eps,
                SHORT=short is not x.w, EVEN=last == whole, BLOCK=block,
            )  # fmt: skip


def adam_on_cpu(
    x: Moments,
    gradient: Tensor,
    short: Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """The same on a CPU."""
    numbers = (float(number) for number in (lr, beta1, beta2, eps))
    native.kernel("adam")(*x, gradient, *numbers, x.w.numel())
    if short is not x.w:
        short.copy_(x.w)
