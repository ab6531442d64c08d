"""Checks of a model and its data before training starts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parameter import is_lazy

from fedsift.task.broadcasting import check_broadcasting
from fedsift.task.samples import (
    Data,
    Pair,
    Tree,
    call_model,
    device_of,
    first_samples,
    leaves_of,
    map_tree,
    sample_shapes,
    seeded_random,
    select_rows,
)
from fedsift.task.task import Task, has_statistics
from fedsift.vector import all_finite, copy_sharing_frozen


def check_model(model: nn.Module) -> None:
    """Raise ValueError for a model whose parameters have no values yet, or no finite ones.

    >>> check_model(nn.LazyLinear(2))
    Traceback (most recent call last):
    ...
    ValueError: 'weight' of a lazy layer has no shape yet: call the model once on a sample ...
    """
    if not isinstance(model, nn.Module):
        hint = ": call it to make one" if callable(model) else ""
        raise ValueError(f"model must be a torch.nn.Module, got {describe_object(model)}{hint}")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ValueError(
                f"{name!r} of a lazy layer has no shape yet: "
                "call the model once on a sample before training"
            )
        if tensor.is_meta:
            raise ValueError(f"{name!r} is on the meta device and has no values: load the model")
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not all_finite(parameter.detach()):
            raise ValueError(f"the initial weights are not finite: {name!r} contains NaN or inf")


def check_task(task: Task, needs_gradient: bool = True) -> tuple[str, ...]:
    """Check that the model and the loss can be computed on the data.

    Both are tried on two samples of the first client, of each client whose samples have another
    shape or whose batches have another size, of each client with samples that are not finite, and
    of the test set. The class labels of all clients are checked. Returns the names of the buffers
    that training changes.

    >>> from fedsift.vector import Layout
    >>> x, y = torch.zeros(4, 3), torch.tensor([0, 1, 2, 0])
    >>> model = nn.Linear(3, 2)
    >>> check_task(Task(model, cross_entropy, [(x, y)], None, None, 0, Layout.of(model)))
    Traceback (most recent call last):
    ...
    ValueError: client 0 has the label 2, but the model's output has 2 classes: ...
    """
    if not callable(task.loss) or isinstance(task.loss, type):
        raise ValueError(
            f"loss must be a function (output, y) -> number, got {describe_object(task.loss)}"
        )
    model, tried, output = task.train_mode(copy_sharing_frozen(task.model)), set(), None
    before = {name: (x, x._version, x.clone()) for name, x in model.named_buffers()}
    for client, data in enumerate(task.clients):
        name, number = f"client {client}", min(2, task.batch_of(client))
        kind = number, sample_shapes(data) if isinstance(data, tuple) else ()
        if kind not in tried:
            output, loss = _try_samples(name, task, first_samples(data, number), model)
            tried.add(kind)
            if needs_gradient and not loss.requires_grad:
                raise ValueError(NO_GRADIENT)
        if isinstance(data, tuple):
            _check_labels(name, task, data[1], output)
            _check_finite(name, task, data, model)
    changed = _changed_buffers(model, before)
    if changed and task.is_frozen:
        raise ValueError(
            f"training changes the buffer {changed[0]!r}, which is not one of a normalization "
            "layer and cannot be frozen: use buffers='average' or 'local'"
        )
    if task.test is not None:
        check_test_data("the test set", task, task.test)
    return changed


NO_GRADIENT = (
    "the loss has no gradient: compute it from the model's output with differentiable operations "
    "of PyTorch"
)


def check_test_data(owner: str, task: Task, data: Data) -> object:
    """Return the model's output for two samples of test data.

    Raises ValueError if the model or the loss fails on them, on the labels, or on samples that are
    not finite.
    """
    model = copy_sharing_frozen(task.model).eval()
    output, _ = _try_samples(owner, task, first_samples(data), model)
    if isinstance(data, tuple):
        _check_labels(owner, task, data[1], output)
        _check_finite(owner, task, data, model)
    return output


def statistics_of(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the buffers of normalization layers with running statistics.

    >>> statistics_of(nn.Sequential(nn.BatchNorm1d(2)))
    ('0.running_mean', '0.running_var', '0.num_batches_tracked')
    """
    owners = {name for name, module in model.named_modules() if has_statistics(module)}
    return tuple(name for name, _ in model.named_buffers() if name.rpartition(".")[0] in owners)


def _changed_buffers(
    model: nn.Module, before: Mapping[str, tuple[Tensor, int, Tensor]]
) -> tuple[str, ...]:
    """Return the buffers that were written to, even if with the same values, or replaced."""
    changed = []
    for name, now in model.named_buffers():
        old, version, values = before[name]
        if now is not old or now._version != version or not torch.equal(now, values):
            changed.append(name)
    return tuple(changed)


def _check_finite(owner: str, task: Task, data: Pair, model: nn.Module) -> None:
    """Raise ValueError if the loss is not finite on samples that are not finite."""
    for part, tree in zip("xy", data, strict=True):
        for leaf in filter(torch.is_floating_point, leaves_of(tree)):
            if all_finite(leaf):
                continue
            row = int((~leaf.isfinite()).nonzero()[0, 0])
            first = max(0, min(row, len(leaf) - 2))
            rows = torch.arange(first, min(first + 2, len(leaf)))  # two, for batch normalization
            samples = select_rows(data[0], rows), select_rows(data[1], rows)
            _, loss = _try_samples(owner, task, samples, model)
            if not all_finite(loss.detach()):
                raise ValueError(
                    f"{owner} has NaN or infinity in {part}, first in sample {row}, and the loss "
                    f"there is {float(loss.detach())}: remove or replace such samples"
                )


def _try_samples(owner: str, task: Task, samples: Pair, model: nn.Module) -> tuple[object, Tensor]:
    """Return the model's output and loss for samples. Raise ValueError if they fail."""
    x, y = samples
    device = device_of((x, y))
    with seeded_random(0, device):
        if model.training:
            x = one_line_errors(lambda: task.transformed(x), f"the transform fails on {owner}")
        described = describe_samples(x) + _hint_about_samples(task, x)
        output = one_line_errors(
            lambda: call_model(model, x), f"the model fails on {owner}, {described}"
        )
        _check_labels(owner, task, y, output)
        check_broadcasting(f"the loss of {owner}", task.loss, output, y)
        labels = describe_labels(y) + _hint_about_labels(task, y) + _hint_about_output(output)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", BROADCAST)
            loss = one_line_errors(
                lambda: task.loss(output, y), f"the loss fails on {owner}, {labels}"
            )
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"the loss must return a tensor with a single number, got {got}")
    return output, loss


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
    if y.dtype == torch.int64 or (y.is_floating_point() and y.dim() > 1):  # or probabilities
        return ""
    return (
        " (cross-entropy needs class labels of torch.int64: convert them with y.long() or, in "
        "NumPy, y.astype(int))"
    )


BROADCAST = "Using a target size"
"""The start of PyTorch's warning that a loss compares each output with each label."""


def _hint_about_output(output: object) -> str:
    """Return how a loss gets the predictions of a model that returns no tensor, or nothing."""
    if isinstance(output, Tensor):
        return ""
    field = "output.logits" if hasattr(output, "logits") else "a part of it"
    return f" (the model returns {describe_object(output)}: pass a loss that takes {field})"


def describe_object(x: object) -> str:
    """Return what an object is, for an error.

    >>> describe_object(nn.Linear), describe_object(len), describe_object("mse")
    ("the class 'Linear'", "the function 'len'", "'mse'")
    """
    if isinstance(x, type):
        return f"the class {x.__name__!r}"
    if callable(x) and hasattr(x, "__name__"):
        return f"the function {x.__name__!r}"
    return (
        repr(x) if isinstance(x, str | int | float | None) else f"an object of {type(x).__name__}"
    )


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
