"""What is measured of the global model besides accuracy and loss: own metrics, and each client."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedsift.engine.client_tests import (
    ModelOfClient,
    check_client_tests,
    measure_by_class,
    measure_clients,
    summarized,
    summarized_perplexities,
)
from fedsift.engine.predictions import outputs
from fedsift.seeding import torch_seed
from fedsift.task import Data, Task
from fedsift.task.broadcasting import check_broadcasting
from fedsift.task.checks import one_line_errors
from fedsift.task.losses import has_perplexity
from fedsift.task.samples import Tree, call_model, first_samples, num_samples, seeded_random
from fedsift.vector import copy_sharing_frozen

Metric = Callable[[Any, Any], float]
"""A function of the model's output and y that returns a number."""
Evaluate = Callable[[nn.Module], Mapping[str, Any]]
"""A function of the global model that returns named numbers."""

OWN_COLUMNS = (
    "round", "clients", "rejected", "clamped", "train_loss", "problems", "uplink_bits_paper",
    "uplink_bytes", "downlink_bytes", "seconds", "client_accuracy", "client_accuracy_mean",
    "client_accuracy_worst", "client_accuracy_p10", "client_accuracy_std", "perplexity",
    "client_perplexity", "client_perplexity_mean", "client_perplexity_worst",
    "client_perplexity_p90", "client_perplexity_std",
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
        Data of each client, on which the accuracy of the global model is measured, or the
        perplexity of a language model.
    class_shares
        The share of each class in each client's data, shape (clients, classes). The accuracy on
        each client is then that on the test set, weighted by these shares.
    every
        Rounds between evaluations. The initial model and the last round are always evaluated.

    """

    metrics: Mapping[str, Metric] = field(default_factory=dict)
    function: Evaluate | None = None
    client_tests: Sequence[Data] = ()
    class_shares: NDArray[np.float64] | None = None
    every: int = 1

    @property
    def is_empty(self) -> bool:
        """Whether nothing but accuracy and loss is measured."""
        return not (self.metrics or self.function or self.has_client_tests)

    @property
    def has_client_tests(self) -> bool:
        """Whether the accuracy on each client is measured."""
        return bool(self.client_tests) or self.class_shares is not None

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
        check_shapes(self.metrics, task)
        check_client_tests(self.client_tests, task)

    def measure(self, task: Task, model: nn.Module, of_client: ModelOfClient) -> dict[str, Any]:
        """Return everything that is measured of a model, by column.

        ``of_client`` returns the model as a client uses it, with the client's own buffers.
        """
        found: dict[str, Any] = {**measure_metrics(self.metrics, task, model)}
        if self.client_tests:
            summary = summarized_perplexities if has_perplexity(task.loss) else summarized
            found |= summary(measure_clients(self.client_tests, task, of_client))
        if self.class_shares is not None:
            found |= summarized(measure_by_class(self.class_shares, task, of_client))
        if self.function is not None:
            named = call_function(self.function, task, model)
            if both := [name for name in named if name in self.metrics]:
                raise ValueError(f"metrics and evaluate both measure {both[0]!r}: rename one")
            found |= named
        return found


def check_name(name: Any, task: Task) -> None:
    """Raise ValueError for a metric that cannot have a column of its own."""
    taken = OWN_COLUMNS if task.test is None else (*OWN_COLUMNS, "accuracy", "loss")
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"the name of a metric must be a text, got {name!r}")
    if name in taken:
        raise ValueError(f"a metric cannot be called {name!r}: records have a column of that name")


def check_shapes(metrics: Mapping[str, Metric], task: Task) -> None:
    """Raise ValueError for a metric that compares each output with the labels of all samples."""
    if not metrics or task.test is None:
        return
    x, y = first_samples(task.test)
    with torch.no_grad(), seeded_random(0, task.device):
        output = call_model(copy_sharing_frozen(task.model).eval(), x)
        for name, metric in metrics.items():
            check_broadcasting(f"the metric {name!r}", metric, output, y)


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
            partial(float, value), f"evaluate must return a dict of numbers; {name!r} is not one"
        )
        for name, value in found.items()
    }


NOTHING_ELSE = Evaluation()
"""Measures accuracy and loss only, after every round."""
