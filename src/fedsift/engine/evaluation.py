"""What is measured of the global model besides accuracy and loss: own metrics, and each client."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from fedsift.engine.scoring import (
    chunk_of_test_set,
    class_axis,
    correct_labels,
    num_chunks,
    num_labels,
)
from fedsift.seeding import torch_seed
from fedsift.task import Data, Task
from fedsift.task.checks import first_output, one_line_errors
from fedsift.task.samples import Tree, call_model, first_samples, num_samples, seeded_random
from fedsift.task.threads import one_thread

Metric = Callable[[Any, Any], float]
"""A function of the model's output and y that returns a number."""
Evaluate = Callable[[nn.Module], Mapping[str, Any]]
"""A function of the global model that returns named numbers."""
ModelOfClient = Callable[[int], nn.Module]

OWN_COLUMNS = (
    "round", "clients", "rejected", "clamped", "train_loss", "problems", "uplink_bits_paper",
    "uplink_bytes", "downlink_bytes", "seconds", "client_accuracy", "client_accuracy_mean",
    "client_accuracy_worst", "client_accuracy_p10", "client_accuracy_std",
)  # fmt: skip
"""Columns of a record that no metric may have. Accuracy and loss belong to the test set."""


@dataclass(frozen=True)
class Evaluation:
    """What is measured of the global model, and how often.

    Parameters
    ----------
    metrics
        Functions ``(output, y) -> number`` by name. They are called with at most 1000 test samples
        at a time, and averaged over the test set, weighted by samples.
    function
        Called with the model, in evaluation mode; returns named numbers.
    client_tests
        Data of each client, on which the accuracy of the global model is measured.
    every
        Rounds between evaluations. The initial model and the last round are always evaluated.

    """

    metrics: Mapping[str, Metric] = field(default_factory=dict)
    function: Evaluate | None = None
    client_tests: Sequence[Data] = ()
    every: int = 1

    @property
    def is_empty(self) -> bool:
        """Whether nothing but accuracy and loss is measured."""
        return not (self.metrics or self.function or self.client_tests)

    def is_due(self, round: int, last: int) -> bool:
        """Whether a round of a run is evaluated."""
        return round % self.every == 0 or round == last

    def check(self, task: Task) -> None:
        """Raise ValueError if something cannot be measured on this task."""
        if self.metrics and task.test is None:
            raise ValueError("metrics are averaged over the test set: pass test=(x, y)")
        for name, metric in self.metrics.items():
            check_name(name, task)
            if not callable(metric):
                raise ValueError(f"the metric {name!r} must be a function (output, y) -> number")
        if self.function is not None and not callable(self.function):
            raise ValueError("evaluate must be a function (model) -> dict of numbers")
        check_client_tests(self.client_tests, task)

    def measure(self, task: Task, model: nn.Module, of_client: ModelOfClient) -> dict[str, Any]:
        """Return everything that is measured of a model, by column.

        ``of_client`` returns the model as a client uses it, with the client's own buffers.
        """
        found: dict[str, Any] = {**measure_metrics(self.metrics, task, model)}
        if self.client_tests:
            found |= measure_clients(self.client_tests, task, of_client)
        if self.function is not None:
            found |= call_function(self.function, task, model)
        return found


def check_name(name: Any, task: Task) -> None:
    """Raise ValueError for a metric that cannot have a column of its own."""
    taken = OWN_COLUMNS if task.test is None else (*OWN_COLUMNS, "accuracy", "loss")
    if not isinstance(name, str) or name in taken:
        raise ValueError(f"a metric cannot be called {name!r}: records have a column of that name")


def check_client_tests(client_tests: Sequence[Data], task: Task) -> None:
    """Raise ValueError unless the accuracy on each client's test data can be measured."""
    clients = len(task.clients)
    if client_tests and len(client_tests) != clients:
        raise ValueError(
            f"client_tests must have the data of each of the {clients} clients, "
            f"got {len(client_tests)}"
        )
    for client, data in enumerate(client_tests):
        output = first_output(f"the test data of client {client}", task, data)
        _, y = first_samples(data)
        if correct_labels(output, y, class_axis(task.loss)) is None:
            raise ValueError(
                f"client_tests measures accuracy, but the labels of client {client} are not "
                "classes, one per argmax of the output: measure something else with evaluate="
            )


def outputs(task: Task, model: nn.Module) -> Iterator[tuple[Any, Tree]]:
    """Yield the model's output and the labels, for each chunk of the test set."""
    for chunk in range(num_chunks(task)):
        x, y = chunk_of_test_set(task, chunk)
        with torch.no_grad(), one_thread():
            output = call_model(model, x)
        yield output, y


def measure_metrics(
    metrics: Mapping[str, Metric], task: Task, model: nn.Module
) -> dict[str, float]:
    """Return the mean of each metric over the test set."""
    totals, samples = dict.fromkeys(metrics, 0.0), 0
    if not metrics:
        return totals
    with torch.no_grad(), seeded_random(torch_seed(task.seed, "metrics"), task.device):
        for output, y in outputs(task, model):
            samples += num_samples(y)
            for name, metric in metrics.items():
                value = one_line_errors(
                    partial(number_of, metric, output, y), f"the metric {name!r} fails"
                )
                totals[name] += value * num_samples(y)
    return {name: total / samples for name, total in totals.items()}


def number_of(metric: Metric, output: Any, y: Tree) -> float:
    """Return the number that a metric gives for some samples."""
    return float(metric(output, y))


def measure_clients(
    client_tests: Sequence[Data], task: Task, of_client: ModelOfClient
) -> dict[str, float | list[float]]:
    """Return the accuracy on each client's test data: all, mean, worst, 10th percentile, std."""
    with seeded_random(torch_seed(task.seed, "client tests"), task.device):
        found = [
            accuracy_on(replace(task, test=data), of_client(client))
            for client, data in enumerate(client_tests)
        ]
    return {
        "client_accuracy": found,
        "client_accuracy_mean": float(np.mean(found)),
        "client_accuracy_worst": min(found),
        "client_accuracy_p10": float(np.percentile(found, 10)),
        "client_accuracy_std": float(np.std(found)),
    }


def accuracy_on(task: Task, model: nn.Module) -> float:
    """Return a model's accuracy on the task's test set, which has class labels."""
    assert task.test is not None
    correct = 0
    for output, y in outputs(task, model):
        is_correct = correct_labels(output, y, class_axis(task.loss))
        correct += 0 if is_correct is None else int(is_correct.sum())
    return correct / num_labels(task.test)


def call_function(function: Evaluate, task: Task, model: nn.Module) -> dict[str, float]:
    """Return the numbers that the user's function measures of a model."""
    with torch.no_grad(), seeded_random(torch_seed(task.seed, "evaluate"), task.device):
        found = one_line_errors(lambda: function(model), "evaluate fails")
    if not isinstance(found, Mapping):
        raise ValueError(f"evaluate must return a dict of numbers, got {type(found).__name__}")
    for name in found:
        check_name(name, task)
    return {
        name: one_line_errors(
            partial(float, value), f"evaluate must return a dict of numbers; {name!r} is none"
        )
        for name, value in found.items()
    }


NOTHING_ELSE = Evaluation()
"""Measures accuracy and loss only, after every round."""
