"""The shapes of samples that a method synthesizes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedsift.task.checks import one_line_errors
from fedsift.task.samples import Tree, first_samples, seeded_random
from fedsift.task.task import Loss, Task
from fedsift.vector import SampleShapes


def sample_shapes_of(task: Task) -> SampleShapes:
    """Return the shapes of an input, and of its label, in the form of the model's output.

    Raises ValueError if a method could not synthesize them.
    """
    x, _ = first_samples(task.clients[0], 1)
    if task.transform is not None:
        with seeded_random(0):
            x = task.transform(x)
    shape = input_shape(x)
    return shape, output_shape(task.model, task.loss, torch.zeros(1, *shape).to(x))


def input_shape(x: Tree) -> tuple[int, ...]:
    """Return the shape of one input; refuse inputs that no descent could find.

    >>> input_shape(torch.zeros(5, 3, 8, 8))
    (3, 8, 8)
    >>> input_shape(torch.zeros(5, 3, dtype=torch.int64))
    Traceback (most recent call last):
    ...
    ValueError: synthetic samples need inputs that are one tensor of floating-point numbers, got \
torch.int64
    """
    if isinstance(x, Tensor) and x.is_floating_point():
        return tuple(x.shape[1:])
    got = x.dtype if isinstance(x, Tensor) else type(x).__name__
    raise ValueError(
        f"synthetic samples need inputs that are one tensor of floating-point numbers, got {got}"
    )


def output_shape(model: nn.Module, loss: Loss, x: Tensor) -> tuple[int, ...]:
    """Return the shape of the model's output for one input; refuse a loss without soft labels.

    >>> from torch.nn.functional import cross_entropy
    >>> output_shape(nn.Linear(3, 2), cross_entropy, torch.zeros(1, 3))
    (2,)
    """
    is_training = model.training
    with torch.no_grad():
        output = one_line_errors(
            lambda: model.eval()(x), f"the model fails on one input of shape {tuple(x.shape[1:])}"
        )
    model.train(is_training)
    if not isinstance(output, Tensor) or len(output) != 1:
        raise ValueError("synthetic samples need a model that returns one tensor")
    one_line_errors(
        lambda: loss(output, torch.zeros_like(output)),
        "synthetic samples need a loss that accepts labels in the form of the model's output, "
        "such as class probabilities",
    )
    return tuple(output.shape[1:])
