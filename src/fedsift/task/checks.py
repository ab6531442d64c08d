"""Checks of a model and its data before training starts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parameter import is_lazy

from fedsift.task.task import Data, Task, all_finite


def check_model(model: nn.Module, sample: Tensor | None = None) -> None:
    """Raise ValueError for a model that cannot be trained by averaging its parameters.

    With a sample, the model is also run once to see whether training changes its buffers.

    >>> check_model(nn.Sequential(nn.BatchNorm1d(2)))
    Traceback (most recent call last):
    ...
    ValueError: layer '0' keeps running statistics, which cannot be averaged over clients: ...
    """
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ValueError(
                f"parameter {name!r} of a lazy layer has no shape yet: "
                "call the model once on a sample before training"
            )
        if parameter.requires_grad and not all_finite(parameter.detach()):
            raise ValueError(f"the initial weights are not finite: {name!r} contains NaN or inf")
    for name, module in model.named_modules():
        if getattr(module, "track_running_stats", False):
            raise ValueError(
                f"layer {name!r} keeps running statistics, which cannot be averaged over clients: "
                "use GroupNorm, or track_running_stats=False"
            )
    if sample is not None and any(True for _ in model.buffers()):
        _check_buffers(model, sample)


def _check_buffers(model: nn.Module, sample: Tensor) -> None:
    """Raise ValueError if a forward pass in training mode changes a buffer."""
    tried = copy.deepcopy(model).train()
    with torch.random.fork_rng(), torch.no_grad():
        _one_line_errors(lambda: tried(sample), f"the model fails on {_describe(sample)}")
    before = dict(model.named_buffers())
    for name, buffer in tried.named_buffers():
        if not torch.equal(buffer, before[name]):
            raise ValueError(
                f"training changes the buffer {name!r}, which is not a parameter: "
                "it would stay on the client and not be averaged"
            )


def check_task(task: Task) -> None:
    """Raise ValueError if the model or the loss cannot be computed on the data.

    Both are tried on two samples of the first client and of the test set. The class labels of all
    clients are checked.

    >>> from fedsift.vector import Layout
    >>> x, y = torch.zeros(4, 3), torch.tensor([0, 1, 2, 0])
    >>> model = nn.Linear(3, 2)
    >>> check_task(Task(model, cross_entropy, [(x, y)], None, None, 0, Layout.of(model)))
    Traceback (most recent call last):
    ...
    ValueError: client 0 has the label 2, but the model's output has 2 classes: ...
    """
    model = copy.deepcopy(task.model)
    output = _try_samples("client 0", task, task.clients[0], model.train())
    for client, (_, labels) in enumerate(task.clients):
        _check_labels(f"client {client}", task, labels, output)
    if task.test is not None:
        _try_samples("the test set", task, task.test, model.eval())


def _try_samples(owner: str, task: Task, data: Data, model: nn.Module) -> object:
    """Return the model's output for two samples. Raise ValueError if it or the loss fails."""
    x, y = (part[:2] for part in data)
    samples, labels = _describe(x), f"labels of shape {tuple(y.shape)} and dtype {y.dtype}"
    if x.is_floating_point() and x.dtype != task.layout.dtype:
        samples += f" (the model's parameters are {task.layout.dtype})"
    elif x.shape[1:] != (first := task.clients[0][0]).shape[1:]:
        samples += f" (those of client 0 have shape {tuple(first.shape[1:])})"
    if task.loss is cross_entropy and not y.is_floating_point() and y.dtype != torch.int64:
        labels += " (cross-entropy needs class labels of torch.int64: convert them with y.long())"
    with torch.random.fork_rng([x.device] if x.is_cuda else []):
        output = _one_line_errors(lambda: model(x), f"the model fails on {owner}, {samples}")
        _check_labels(owner, task, data[1], output)
        loss = _one_line_errors(
            lambda: task.loss(output, y), f"the loss fails on {owner}, {labels}"
        )
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"the loss must return a tensor with a single number, got {got}")
    return output


def _check_labels(owner: str, task: Task, labels: Tensor, output: object) -> None:
    """Raise ValueError if a label of cross-entropy is not one of the classes in the output."""
    if not (task.loss is cross_entropy and isinstance(output, Tensor) and output.dim() == 2):
        return
    if labels.is_floating_point():
        return
    classes = output.shape[1]
    wrong = labels[((labels < 0) & (labels != IGNORED_LABEL)) | (labels >= classes)]
    if len(wrong):
        raise ValueError(
            f"{owner} has the label {int(wrong[0])}, but the model's output has {classes} classes: "
            f"labels must be 0 to {classes - 1}"
        )


IGNORED_LABEL = -100
"""The label of samples that PyTorch's cross-entropy ignores."""


def _describe(x: Tensor) -> str:
    return f"samples of shape {tuple(x.shape[1:])} and dtype {x.dtype}"


def _one_line_errors(call: Callable[[], Any], message: str) -> Any:
    """Return the result of a call. Raise errors that data may cause as a one-line ValueError."""
    try:
        return call()
    except (IndexError, RuntimeError, TypeError, ValueError) as problem:
        reason = next(iter(str(problem).strip().splitlines()), type(problem).__name__)
        raise ValueError(f"{message}: {reason}") from problem
