"""Accuracy and loss on the test set, computed in chunks."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import cross_entropy

from fedsift.seeding import torch_seed
from fedsift.task import Data, Loss, Task
from fedsift.task.losses import has_perplexity
from fedsift.task.samples import (
    DatasetItems,
    Pair,
    Tree,
    first_samples,
    map_tree,
    num_samples,
    size_of,
)

Score = tuple[int | None, float]
"""The number of correct labels and the sum of losses. The number is None where accuracy is
undefined: if the labels are not classes, one per argmax of the output."""

CHUNK = 1000
"""Test samples per chunk. This bounds memory, and a fixed size keeps results reproducible."""
TOKENS = {"cpu": 1 << 11, "cuda": 1 << 13}
"""Tokens per chunk of a language model, whose output has a number per word of its vocabulary."""


def chunk_size(task: Task) -> int:
    """Return the number of test samples per chunk."""
    if task.test is None or not has_perplexity(task.loss):
        return CHUNK
    return min(CHUNK, max(1, TOKENS[task.device.type] // labels_per_sample(task.test)))


def num_chunks(task: Task) -> int:
    """Return the number of chunks of the test set."""
    return 0 if task.test is None else -(-size_of(task.test) // chunk_size(task))


def chunk_of_test_set(task: Task, chunk: int, size: int | None = None) -> Pair:
    """Return one chunk of the test set."""
    assert task.test is not None
    size = size or chunk_size(task)
    first = chunk * size
    last = min(first + size, size_of(task.test))
    if isinstance(task.test, DatasetItems):
        seed = torch_seed(task.seed, "test items", first)
        return task.test.fetch_to_device(range(first, last), seed)
    x, y = task.test
    return map_tree(lambda t: t[first:last], x), map_tree(lambda t: t[first:last], y)


def score_output(task: Task, output: Any, labels: Tree) -> Score:
    """Return the number of correct labels and the sum of losses for a model's output."""
    loss = float(task.loss(output, labels)) * num_samples(labels)
    if has_perplexity(task.loss):
        return None, loss
    is_correct = correct_labels(output, labels, class_axis(task.loss))
    return (None if is_correct is None else int(is_correct.sum())), loss


def class_axis(loss: Loss) -> int:
    """Return the axis of the classes in a loss's input: 1 for PyTorch's cross-entropy, else -1."""
    return 1 if loss is cross_entropy else -1


def correct_labels(output: Any, labels: Tree, axis: int = -1) -> Tensor | None:
    """Return which labels are predicted; None if they are not classes, one per argmax.

    >>> correct_labels(torch.tensor([[0.1, 0.9]]), torch.tensor([1]))
    tensor([True])
    >>> correct_labels((), torch.ones(1)) is None
    True
    >>> correct_labels(torch.tensor([[0.3]]), torch.tensor([1])) is None
    True
    """
    output = getattr(output, "logits", output)  # of a Hugging Face model
    if not isinstance(output, Tensor) or not isinstance(labels, Tensor):
        return None
    if labels.is_floating_point() or output.dim() <= max(axis, 0):
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
    accuracy = sum(correct) / num_labels(task.test) if len(correct) == len(scores) else None
    return accuracy, sum(loss for _, loss in scores) / size_of(task.test)


def num_labels(data: Data) -> int:
    """Return the number of labels of a test set: of its samples, or of their positions.

    >>> num_labels((torch.zeros(3, 5), torch.zeros(3, 2)))
    6
    """
    return size_of(data) * labels_per_sample(data)


def labels_per_sample(data: Data) -> int:
    """Return the number of labels of one sample."""
    _, y = first_samples(data, 1)
    return int(y.numel())
