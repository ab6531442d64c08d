"""A method's local step in place; Adam's on a GPU as one kernel.

Written out, Adam's step reads and writes each of its tensors several times; fused, once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from fedsift.adam import adam_step
from fedsift.algorithms.method import Step
from fedsift.vector import Moments

InPlace = Callable[[Moments, Tensor, Tensor], None]


def fused(step: Step, like: Tensor) -> InPlace:
    """The same step, writing its result over its input.

    The last argument receives the new weights, too, in its own number format, unless it is the
    weights themselves.

    >>> x = Moments.start(torch.zeros(1, 2))
    >>> fused(lambda x, gradient: x._replace(w=x.w - gradient), x.w)(x, torch.ones(1, 2), x.w)
    >>> x.w.tolist()
    [[-1.0, -1.0]]
    """
    is_adam = isinstance(step, partial) and step.func is adam_step
    if is_adam and like.is_cuda and like.dtype == torch.float32:
        return partial(adam_in_one_pass, **step.keywords)  # type: ignore[attr-defined]

    def in_place(x: Moments, gradient: Tensor, short: Tensor) -> None:
        for old, new in zip(x, step(x, gradient), strict=True):
            if new is not old:
                old.copy_(new)
        if short is not x.w:
            short.copy_(x.w)

    return in_place


def adam_in_one_pass(
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
    from fedsift.engine.kernels import adam_kernel  # Triton is there only beside a GPU

    block, numbers = 1024, x.w.numel()
    whole = numbers // block * block
    for first, last in ((0, whole), (whole, numbers)):
        if first < last:
            adam_kernel[(-(-(last - first) // block),)](
                x.w, x.m, x.v, gradient, short, first, last,
                lr, beta1, 1 - beta1, beta2, 1 - beta2, eps,
                SHORT=short is not x.w, EVEN=last == whole, BLOCK=block,
            )  # fmt: skip
