"""Accuracy and loss on the test set, computed in chunks."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import cross_entropy

from fedsift.task import Data, Loss, Task

Score = tuple[int | None, float]
"""The number of correct labels and the sum of losses. The number is None where accuracy is
undefined: if the labels are not classes, one per argmax of the output."""

CHUNK = 1000
"""Test samples per chunk. This bounds memory, and a fixed size keeps results reproducible."""


def num_chunks(task: Task) -> int:
    """Return the number of chunks of the test set."""
    return 0 if task.test is None else -(-len(task.test[0]) // CHUNK)


def chunk_of_test_set(task: Task, chunk: int) -> Data:
    """Return one chunk of the test set."""
    assert task.test is not None
    x, y = task.test
    rows = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
    return x[rows], y[rows]


def score_output(task: Task, output: Any, labels: Tensor) -> Score:
    """Return the number of correct labels and the sum of losses for a model's output."""
    loss = float(task.loss(output, labels)) * len(labels)
    is_correct = correct_labels(output, labels, class_axis(task.loss))
    return (None if is_correct is None else int(is_correct.sum())), loss


def class_axis(loss: Loss) -> int:
    """Return the axis of the classes in a loss's input: 1 for PyTorch's cross-entropy, else -1."""
    return 1 if loss is cross_entropy else -1


def correct_labels(output: Any, labels: Tensor, axis: int = -1) -> Tensor | None:
    """Return which labels are predicted; None if they are not classes, one per argmax.

    >>> correct_labels(torch.tensor([[0.1, 0.9]]), torch.tensor([1]))
    tensor([True])
    >>> correct_labels((), torch.ones(1)) is None
    True
    >>> correct_labels(torch.tensor([[0.3]]), torch.tensor([1])) is None
    True
    """
    if not isinstance(output, Tensor) or labels.is_floating_point() or output.dim() <= max(axis, 0):
        return None
    if output.shape[axis] == 1:  # one logit, as for a binary cross-entropy: its argmax is always 0
        return None
    predicted = output.argmax(axis)
    return predicted == labels if predicted.shape == labels.shape else None


def total_score(task: Task, scores: list[Score]) -> tuple[float | None, float | None]:
    """Return accuracy (for class labels) and mean loss from the scores of all chunks."""
    if task.test is None:
        return None, None
    correct = [number for number, _ in scores if number is not None]
    accuracy = sum(correct) / task.test[1].numel() if len(correct) == len(scores) else None
    return accuracy, sum(loss for _, loss in scores) / len(task.test[0])
