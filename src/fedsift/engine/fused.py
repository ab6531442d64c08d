"""A method's local step in place. Adam's step is a single kernel on GPUs and CPUs.

Written as separate tensor operations, Adam reads and writes each of its tensors several times. The
kernels read and write each tensor once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from fedsift.adam import AdamStep, clipped
from fedsift.algorithms.method import Step
from fedsift.engine.cpu import native
from fedsift.selection.backend import can_use_triton
from fedsift.vector import Moments

InPlace = Callable[[Moments, Tensor, Tensor], None]


def fused(step: Step, like: Tensor) -> InPlace:
    """Return the same step as a function that overwrites its input with the result.

    Its last argument is a copy of the weights in the layers' number format, such as bf16, which is
    updated as well. If there is no such copy, pass the weights themselves.

    >>> x = Moments.start(torch.zeros(1, 2))
    >>> fused(lambda x, gradient: x._replace(w=x.w - gradient), x.w)(x, torch.ones(1, 2), x.w)
    >>> x.w.tolist()
    [[-1.0, -1.0]]
    """
    if isinstance(step, AdamStep) and step.is_clipped:
        adam, bound = fused(replace(step, clip=math.inf), like), step.clip
        return lambda x, gradient, low_precision: adam(x, clipped(gradient, bound), low_precision)
    if isinstance(step, AdamStep) and like.dtype == torch.float32:
        if can_use_triton(like):
            return partial(adam_on_gpu, step)
        if like.is_cpu and native.load() is not None:
            return partial(adam_on_cpu, step)
    return partial(copy_result, step)


def copy_result(step: Step, x: Moments, gradient: Tensor, low_precision: Tensor) -> None:
    """Take any step and copy its result over its input."""
    for old, new in zip(x, step(x, gradient), strict=True):
        if new is not old:
            old.copy_(new)
    if low_precision is not x.w:
        low_precision.copy_(x.w)


def adam_on_gpu(step: AdamStep, x: Moments, gradient: Tensor, low_precision: Tensor) -> None:
    """Take an unclipped Adam step with a Triton kernel."""
    from fedsift.engine.gpu.triton import adam_kernel  # Triton is installed only with a GPU

    block, numbers = 1024, x.w.numel()
    whole = numbers // block * block
    for first, last in ((0, whole), (whole, numbers)):
        if first < last:
            adam_kernel[(-(-(last - first) // block),)](
                x.w, x.m, x.v, gradient, low_precision, first, last,
                step.lr, step.beta1, 1 - step.beta1, step.beta2, 1 - step.beta2, step.eps,
                LOW_PRECISION=low_precision is not x.w, EVEN=last == whole, BLOCK=block,
            )  # fmt: skip


def adam_on_cpu(step: AdamStep, x: Moments, gradient: Tensor, low_precision: Tensor) -> None:
    """Take an unclipped Adam step with a C kernel."""
    numbers = (float(number) for number in (step.lr, step.beta1, step.beta2, step.eps))
    native.kernel("adam")(*x, gradient, *numbers, x.w.numel())
    if low_precision is not x.w:
        low_precision.copy_(x.w)
