"""Checks of a model and its data before training starts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parameter import is_lazy

from fedsift.task.samples import (
    Data,
    Tree,
    call_model,
    device_of,
    first_samples,
    map_tree,
    sample_shapes,
    seeded_random,
)
from fedsift.task.task import Task, all_finite


def check_model(model: nn.Module) -> None:
    """Raise ValueError for a model that cannot be trained by averaging its parameters.

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


def check_task(task: Task) -> None:
    """Raise ValueError if the model or the loss cannot be computed on the data.

    Both are tried on two samples of the first client, of each client whose samples have another
    shape, and of the test set. The class labels of all clients are checked.

    >>> from fedsift.vector import Layout
    >>> x, y = torch.zeros(4, 3), torch.tensor([0, 1, 2, 0])
    >>> model = nn.Linear(3, 2)
    >>> check_task(Task(model, cross_entropy, [(x, y)], None, None, 0, Layout.of(model)))
    Traceback (most recent call last):
    ...
    ValueError: client 0 has the label 2, but the model's output has 2 classes: ...
    """
    model, tried, output = copy.deepcopy(task.model).train(), set(), None
    for client, data in enumerate(task.clients):
        name = f"client {client}"
        shapes = sample_shapes(data) if isinstance(data, tuple) else ()
        if shapes not in tried:
            output = _try_samples(name, task, data, model)
            tried.add(shapes)
        if isinstance(data, tuple):
            _check_labels(name, task, data[1], output)
    _check_buffers(task.model, model)
    if task.test is not None:
        _try_samples("the test set", task, task.test, model.eval())


def first_output(owner: str, task: Task, data: Data) -> object:
    """Return the model's output for two samples of test data; raise ValueError if it fails."""
    return _try_samples(owner, task, data, copy.deepcopy(task.model).eval())


def _check_buffers(before: nn.Module, after: nn.Module) -> None:
    """Raise ValueError if a forward pass in training mode has changed a buffer."""
    old = dict(before.named_buffers())
    for name, buffer in after.named_buffers():
        if not torch.equal(buffer, old[name]):
            raise ValueError(
                f"training changes the buffer {name!r}, which is not a parameter: "
                "it would stay on the client and not be averaged"
            )


def _try_samples(owner: str, task: Task, data: Data, model: nn.Module) -> object:
    """Return the model's output for two samples. Raise ValueError if it or the loss fails."""
    x, y = first_samples(data)
    device = device_of((x, y))
    with seeded_random(0, device):
        if model.training and task.transform is not None:
            transform = task.transform
            x = one_line_errors(lambda: transform(x), f"the transform fails on {owner}")
        samples = describe_samples(x) + _hint_about_samples(task, x)
        output = one_line_errors(
            lambda: call_model(model, x), f"the model fails on {owner}, {samples}"
        )
        _check_labels(owner, task, data[1] if isinstance(data, tuple) else y, output)
        labels = describe_labels(y) + _hint_about_labels(task, y)
        loss = one_line_errors(lambda: task.loss(output, y), f"the loss fails on {owner}, {labels}")
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"the loss must return a tensor with a single number, got {got}")
    return output


def _hint_about_samples(task: Task, x: Tree) -> str:
    """Return a likely reason why the model fails on samples, or nothing."""
    if not isinstance(x, Tensor):
        return ""
    if x.is_floating_point() and x.dtype != task.layout.dtype:
        return f" (the model's parameters are {task.layout.dtype})"
    first, _ = first_samples(task.clients[0], 1)
    if isinstance(first, Tensor) and x.shape[1:] != first.shape[1:]:
        return f" (those of client 0 have shape {tuple(first.shape[1:])})"
    return ""


def _hint_about_labels(task: Task, y: Tree) -> str:
    """Return a likely reason why the loss fails on labels, or nothing."""
    if task.loss is not cross_entropy or not isinstance(y, Tensor):
        return ""
    if y.is_floating_point() or y.dtype == torch.int64:
        return ""
    return " (cross-entropy needs class labels of torch.int64: convert them with y.long())"


def _check_labels(owner: str, task: Task, labels: Tree, output: object) -> None:
    """Raise ValueError if a label of cross-entropy is not one of the classes in the output."""
    if not (task.loss is cross_entropy and isinstance(output, Tensor) and output.dim() == 2):
        return
    if not isinstance(labels, Tensor) or labels.is_floating_point():
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


def describe_samples(x: Tree) -> str:
    """Return the shapes and data types of samples.

    >>> describe_samples({"a": torch.zeros(2, 3)})
    "samples {'a': 'shape (3,) and dtype torch.float32'}"
    """
    found = map_tree(lambda t: f"shape {tuple(t.shape[1:])} and dtype {t.dtype}", x)
    return f"samples of {found}" if isinstance(found, str) else f"samples {found}"


def describe_labels(y: Tree) -> str:
    """Return the shapes and data types of a batch of labels."""
    found = map_tree(lambda t: f"shape {tuple(t.shape)} and dtype {t.dtype}", y)
    return f"labels of {found}" if isinstance(found, str) else f"labels {found}"


def one_line_errors(call: Callable[[], Any], message: str) -> Any:
    """Return the result of a call to a user's function. Raise any error as a ValueError."""
    try:
        return call()
    except Exception as problem:  # a user's function may raise anything
        reason = next(iter(str(problem).strip().splitlines()), type(problem).__name__)
        raise ValueError(f"{message}: {reason}") from problem
