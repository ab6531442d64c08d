"""The accuracy of the global model on each client, or its perplexity."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedsift.engine.predictions import outputs, predictions
from fedsift.engine.scoring import class_axis, correct_labels, num_labels, score_output
from fedsift.seeding import torch_seed
from fedsift.task import Data, Task
from fedsift.task.checks import check_test_data
from fedsift.task.labels import labels_of
from fedsift.task.losses import has_perplexity
from fedsift.task.samples import first_samples, seeded_random, size_of

ModelOfClient = Callable[[int], nn.Module]
"""Returns the model as a client uses it."""
MAX_LOSS = 700.0
"""Larger losses have no perplexity that is a number."""
BY_CLASS = "by-class"
"""Each client's accuracy is that on the test set, weighted by the classes of its own data."""


def check_client_tests(client_tests: Sequence[Data], task: Task) -> None:
    """Raise ValueError unless the accuracy on each client's test data can be measured."""
    clients = len(task.clients)
    if client_tests and len(client_tests) != clients:
        raise ValueError(
            f"client_tests must have the data of each of the {clients} clients, "
            f"got {len(client_tests)}"
        )
    for client, data in enumerate(client_tests):
        output = check_test_data(f"the test data of client {client}", task, data)
        _, y = first_samples(data)
        if has_perplexity(task.loss):
            continue
        if correct_labels(output, y, class_axis(task.loss)) is None:
            raise ValueError(
                f"client_tests measures accuracy, but the labels of client {client} are not "
                "classes, one per argmax of the output: measure something else with evaluate="
            )


def measure_clients(
    client_tests: Sequence[Data], task: Task, of_client: ModelOfClient
) -> list[float]:
    """Return the accuracy on each client's test data, or the perplexity of a language model."""
    measure = perplexity_on if has_perplexity(task.loss) else accuracy_on
    with seeded_random(torch_seed(task.seed, "client tests"), task.device):
        return [
            measure(replace(task, test=data), of_client(client))
            for client, data in enumerate(client_tests)
        ]


def accuracy_on(task: Task, model: nn.Module) -> float:
    """Return a model's accuracy on the task's test set, which has class labels."""
    assert task.test is not None
    correct = sum(int(is_correct.sum()) for _, is_correct in predictions(task, model))
    return correct / num_labels(task.test)


def perplexity_on(task: Task, model: nn.Module) -> float:
    """Return the exponential of a model's mean loss on the task's test set."""
    assert task.test is not None
    scores = [score_output(task, output, y) for output, y in outputs(task, model)]
    return math.exp(min(MAX_LOSS, sum(loss for _, loss in scores) / size_of(task.test)))


def class_shares(task: Task) -> NDArray[np.float64]:
    """Return the share of each class in each client's data, among the classes of the test set.

    Raise ValueError if data has no class labels.
    """
    counts = labels_of(task.clients)
    tested = None if task.test is None else labels_of([task.test])
    if counts is None or tested is None:
        raise ValueError(
            "accuracy by class needs a test set and class labels of all data: pass the test data "
            "of each client as client_tests"
        )
    width = max(len(counts[0]), len(tested[0]))
    is_tested = np.pad(np.array(tested[0]) > 0, (0, width - len(tested[0])))
    known = np.pad(np.array(counts), ((0, 0), (0, width - len(counts[0])))) * is_tested
    totals = known.sum(1, keepdims=True)
    if (totals == 0).any():
        client = int(totals.argmin())
        raise ValueError(f"client {client} has only classes that are not in the test set")
    shares: NDArray[np.float64] = known / totals
    return shares


def measure_by_class(
    shares: NDArray[np.float64], task: Task, of_client: ModelOfClient
) -> list[float]:
    """Return each client's accuracy on the test set, weighted by the shares of its classes.

    It is the accuracy to expect on a client whose data differs from the test set only in how
    frequent the classes are.
    """
    found: list[float] = []
    model, accuracy = None, np.zeros(0)
    for client, row in enumerate(shares):
        own = of_client(client)
        if own is not model:  # one model serves all clients unless they keep layers of their own
            model, accuracy = own, accuracy_of_classes(task, own, len(row))
        found.append(float(row @ accuracy))
    return found


def accuracy_of_classes(task: Task, model: nn.Module, classes: int) -> NDArray[np.float64]:
    """Return the accuracy on each class of the test set; 0 for a class that it lacks."""
    total, correct = torch.zeros(classes), torch.zeros(classes)
    with seeded_random(torch_seed(task.seed, "client tests"), task.device):
        for y, is_correct in predictions(task, model):
            total += torch.bincount(y.cpu(), minlength=classes)
            correct += torch.bincount(y[is_correct].cpu(), minlength=classes)
    found: NDArray[np.float64] = (correct / total.clamp(min=1)).double().numpy()
    return found


def summarized_perplexities(perplexities: list[float]) -> dict[str, Any]:
    """Return the columns of a record: all perplexities, and a summary as of accuracies.

    The worst perplexity is the highest, and the 90th percentile is as bad as the 10th of accuracy.

    >>> {name: x for name, x in summarized_perplexities([2.0, 4.0]).items() if "p90" not in name}
    {'client_perplexity': [2.0, 4.0], 'client_perplexity_mean': 3.0, 'client_perplexity_worst': \
4.0, 'client_perplexity_std': 1.0}
    """
    return columns("client_perplexity", perplexities, max(perplexities), percentile=90)


def summarized(accuracies: list[float]) -> dict[str, Any]:
    """Return the columns of a record: all accuracies, mean, worst, 10th percentile, deviation.

    >>> {name: x for name, x in summarized([0.5, 1.0]).items() if "p10" not in name}
    {'client_accuracy': [0.5, 1.0], 'client_accuracy_mean': 0.75, 'client_accuracy_worst': 0.5, \
'client_accuracy_std': 0.25}
    """
    return columns("client_accuracy", accuracies, min(accuracies), percentile=10)


def columns(name: str, values: list[float], worst: float, percentile: int) -> dict[str, Any]:
    """Return the columns of what was measured on each client."""
    return {
        name: values,
        f"{name}_mean": float(np.mean(values)),
        f"{name}_worst": worst,
        f"{name}_p{percentile}": float(np.percentile(values, percentile)),
        f"{name}_std": float(np.std(values)),
    }
