"""A method's local step in place. Adam's step is a single kernel on GPUs and CPUs.

Written as separate tensor operations, Adam reads and writes each of its tensors several times. The
kernels read and write each tensor once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedsift.adam import AdamStep, clipped
from fedsift.algorithms.checks import checked_state
from fedsift.algorithms.method import Memory, Step
from fedsift.algorithms.step_context import StepContext
from fedsift.engine.cpu import native
from fedsift.selection.backend import can_use_triton
from fedsift.vector import State

S = TypeVar("S")
InPlace = Callable[[State, Tensor, Tensor, StepContext], None]


def fused(step: Step, like: Tensor) -> InPlace:
    """Return the same step as a function that overwrites its input with the result.

    Its third argument is a copy of the weights in the layers' number format, such as bf16, which is
    updated as well. If there is no such copy, pass the weights themselves.

    >>> x = State(w=torch.zeros(1, 2))
    >>> step = fused(lambda x, gradient, context: x.replace(w=x.w - gradient), x.w)
    >>> step(x, torch.ones(1, 2), x.w, None)
    >>> x.w.tolist()
    [[-1.0, -1.0]]
    """
    if type(step) is AdamStep and step.is_clipped:
        adam, bound = fused(replace(step, clip=math.inf), like), step.clip
        return lambda x, gradient, *rest: adam(x, clipped(gradient, bound), *rest)
    if type(step) is AdamStep and like.dtype == torch.float32:
        if can_use_triton(like):
            numbers = torch.tensor(numbers_of(step), dtype=torch.float64, device=like.device)
            return partial(adam_on_gpu, with_numbers(step, numbers))
        if like.is_cpu and native.load() is not None:
            return adam_on_cpu(step)
    return partial(copy_result, step)


def copy_result(
    step: Step, x: State, gradient: Tensor, low_precision: Tensor, context: StepContext
) -> None:
    """Take any step and copy its result over its input."""
    result = step(x, gradient, context)
    after, memory = result if isinstance(result, tuple) else (result, None)
    copies = list(zip(x, checked_state(after, x, "step"), strict=True))
    if memory is not None:
        copies += memory_copies(context.memory, memory)
    copy_all(copies)
    if low_precision is not x.w:
        low_precision.copy_(x.w)


def memory_copies(before: Memory, after: Memory) -> list[tuple[Tensor, Tensor]]:
    """Return the old and new vectors of a memory, for those that a step returned.

    >>> memory_copies({"c": torch.zeros(1, 1)}, {"d": torch.ones(1, 1)})
    Traceback (most recent call last):
    ...
    ValueError: step returned memory named d; the method declares c
    """
    if not set(after) <= set(before):
        got, declared = (", ".join(sorted(x)) or "nothing" for x in (after, before))
        raise ValueError(f"step returned memory named {got}; the method declares {declared}")
    return [(before[name], x) for name, x in after.items()]


def copy_all(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Copy new tensors over old ones, none of which is overwritten before it is read."""
    changed = [(old, new) for old, new in pairs if new is not old]
    overwritten = {old.untyped_storage().data_ptr() for old, _ in changed}
    safe = [
        (old, new.clone() if new.untyped_storage().data_ptr() in overwritten else new)
        for old, new in changed
    ]
    for old, new in safe:
        old.copy_(new)


def with_numbers(step: S, numbers: Tensor) -> S:
    """Return a step that reads its finite floating-point numbers from a tensor.

    A CUDA graph of that step follows when the tensor is overwritten. The tensor is float64, so that
    1 - beta does not lose digits.

    >>> step = AdamStep(0.1, 0.9, 0.99, 1e-6)
    >>> with_numbers(step, torch.tensor(numbers_of(step), dtype=torch.float64)).lr
    tensor(0.1000, dtype=torch.float64)
    """
    names = number_names(step)
    changed: Any = dict(zip(names, numbers.unbind(), strict=True)) if names else {}
    return replace(step, **changed) if names else step  # type: ignore[type-var]


def numbers_of(step: Any) -> list[float]:
    """Return the finite floating-point numbers of a step that is a frozen dataclass."""
    return [getattr(step, name) for name in number_names(step)]


def number_names(step: Any) -> tuple[str, ...]:
    """Return the fields of a frozen dataclass that hold finite floating-point numbers.

    >>> number_names(AdamStep(0.1, 0.9, 0.99, 1e-6, clip=math.inf))
    ('lr', 'beta1', 'beta2', 'eps')
    """
    values = {f.name: getattr(step, f.name) for f in fields(step)} if is_frozen(step) else {}
    return tuple(k for k, x in values.items() if isinstance(x, float) and math.isfinite(x))


def is_frozen(step: Any) -> bool:
    """Whether a step is an instance of a frozen dataclass."""
    parameters = getattr(type(step), "__dataclass_params__", None)
    return parameters is not None and bool(parameters.frozen)


def adam_on_gpu(
    step: AdamStep, x: State, gradient: Tensor, low_precision: Tensor, context: StepContext
) -> None:
    """Take an unclipped Adam step with a Triton kernel. The step's numbers are tensors."""
    from fedsift.engine.gpu.triton import adam_kernel  # Triton is installed only with a GPU

    block, numbers = 1024, x.w.numel()
    whole = numbers // block * block
    for first, last in ((0, whole), (whole, numbers)):
        if first < last:
            adam_kernel[(-(-(last - first) // block),)](
                x.w, x.m, x.v, gradient, low_precision, first, last,
                step.lr, step.beta1, step.beta2, step.eps,
                LOW_PRECISION=low_precision is not x.w, EVEN=last == whole, BLOCK=block,
            )  # fmt: skip


def adam_on_cpu(step: AdamStep) -> InPlace:
    """Return an unclipped Adam step as a call of a C kernel."""
    numbers = [float(number) for number in (step.lr, step.beta1, step.beta2, step.eps)]
    kernel = native.kernel("adam")

    def take(x: State, gradient: Tensor, low_precision: Tensor, context: StepContext) -> None:
        kernel(x.w, x.m, x.v, gradient, *numbers, x.w.numel())
        if low_precision is not x.w:
            low_precision.copy_(x.w)

    return take
