"""The outputs of a model on the test set, and which labels it predicts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fedsift.engine.scoring import chunk_of_test_set, class_axis, correct_labels, num_chunks
from fedsift.task import Task
from fedsift.task.samples import Tree, call_model
from fedsift.task.threads import one_thread


def outputs(task: Task, model: nn.Module) -> Iterator[tuple[Any, Tree]]:
    """Yield the model's output and the labels, for each chunk of the test set."""
    for chunk in range(num_chunks(task)):
        x, y = chunk_of_test_set(task, chunk)
        with torch.no_grad(), one_thread():
            output = call_model(model, x)
        yield output, y


def predictions(task: Task, model: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the class labels and which of them are predicted, for each chunk of the test set."""
    for output, y in outputs(task, model):
        is_correct = correct_labels(output, y, class_axis(task.loss))
        if is_correct is not None:
            yield y, is_correct
