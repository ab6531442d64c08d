"""Check the arguments of a simulation, and build its federation."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

import torch
from torch import nn

from fedsift.algorithms import Algorithm
from fedsift.algorithms.buffers import BUFFERS, with_buffers
from fedsift.codec.wire import WIRES
from fedsift.engine import Engine, Forked, Stacked, Task
from fedsift.engine.client_tests import BY_CLASS, class_shares
from fedsift.engine.evaluation import Evaluate, Evaluation, Metric
from fedsift.engine.gpu.arithmetic import PRECISIONS
from fedsift.federation.cohort import check_cohort, cohort_size
from fedsift.federation.norm_bound import MAX_NORM_RATIO, check_max_norm_ratio
from fedsift.federation.private_rounds import distributed_noise
from fedsift.federation.round import Federation
from fedsift.privacy.differential import DifferentialPrivacy
from fedsift.privacy.robust import Aggregation, check_aggregation
from fedsift.privacy.secure.settings import SecureSettings, check_can_be_secure, settings_from
from fedsift.task import Loss, Transform, Weights, check_model, check_task, check_weights
from fedsift.task.samples import as_data
from fedsift.task.synthetic import sample_shapes_of
from fedsift.vector import Layout


@dataclass(frozen=True)
class Options:
    """The arguments of :func:`fedsift.simulate` that control how it trains and evaluates."""

    batch_size: int | None = 64
    participation: float = 1.0
    dropout: float = 0.0
    min_clients: int = 0
    wire: str = "count"
    loss: Loss = nn.functional.cross_entropy
    seed: int = 0
    device: str | torch.device = "auto"
    precision: str = "fp32"
    max_norm_ratio: float | None = MAX_NORM_RATIO
    transform: Transform | None = None
    num_workers: int = 0
    weights: Weights | None = None
    buffers: str = "average"
    aggregation: Aggregation = "mean"
    metrics: Mapping[str, Metric] | None = None
    evaluate: Evaluate | None = None
    evaluate_every: int = 1
    client_tests: Sequence[Any] | str | None = None
    privacy: DifferentialPrivacy | None = None
    secure: bool | SecureSettings = False

    @property
    def sampling_rate(self) -> float:
        """The probability with which a client takes part in a private round, for who sees the sums.

        With secure aggregation this is the server, which knows who takes part.
        """
        return 1.0 if self.secure else self.participation

    def check(self, clients: int) -> None:
        """Check that every option is valid for this number of clients."""
        if self.batch_size is not None:
            check_whole("batch_size", self.batch_size, at_least=1)
        check_cohort(clients, self.participation, self.min_clients)
        check_max_norm_ratio(self.max_norm_ratio)
        check_weights(self.weights)
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")
        check_choice("precision", self.precision, PRECISIONS)
        if self.precision != "fp32" and torch.device(chosen_device(self.device)).type != "cuda":
            raise ValueError(f"precision {self.precision} needs a GPU; use fp32 on {self.device}")
        check_choice("wire", self.wire, WIRES)
        check_choice("buffers", self.buffers, BUFFERS)
        check_whole("seed", self.seed, at_least=0)
        check_whole("num_workers", self.num_workers, at_least=0)
        check_whole("evaluate_every", self.evaluate_every, at_least=1)
        if self.privacy and self.weights not in (None, "equal"):
            raise ValueError(
                f'differential privacy needs weights="equal", got weights={self.weights!r}'
            )
        if not isinstance(self.metrics, Mapping | None):
            raise ValueError(f"metrics must be a dict of functions, got {self.metrics!r}")


def prepare(
    model: nn.Module,
    clients: Sequence[Any],
    test: Any,
    algorithm: Algorithm,
    options: Options,
) -> Federation:
    """Check the arguments, move the data to the device, and return a federation ready to run."""
    check_algorithm(algorithm)
    check_aggregation(options.aggregation, algorithm)
    check_clients(clients)
    options.check(len(clients))
    check_model(model)
    device = chosen_device(options.device)
    layout = Layout.of(model)
    local = [as_data(f"client {n}", data, device, layout.dtype) for n, data in enumerate(clients)]
    tested = None if test is None else as_data("the test set", test, device, layout.dtype)
    task = Task(
        copy.deepcopy(model).to(device),
        options.loss,
        local,
        tested,
        options.batch_size,
        options.seed,
        layout,
        options.transform,
        options.num_workers,
        is_frozen=options.buffers == "frozen",
    )
    needs_gradient = algorithm.phase(1).points is None
    layout = layout.with_buffers(task.model, check_task(task, needs_gradient))
    if algorithm.makes_samples:
        layout = layout.with_sample_shapes(sample_shapes_of(task))
    algorithm = with_buffers(algorithm, layout, options.buffers)
    secure = secure_settings(options, algorithm, layout, len(clients))
    task = replace(task, layout=algorithm.layout_for(layout))
    evaluation = evaluation_of(options, task)
    evaluation.check(task)
    federation = Federation(
        task,
        algorithm,
        engine_for(task, algorithm, options.precision),
        participation=options.participation,
        dropout=options.dropout,
        min_clients=options.min_clients,
        wire=WIRES[options.wire],
        max_norm_ratio=options.max_norm_ratio,
        weights="equal" if options.privacy else options.weights,
        evaluation=evaluation,
        privacy=options.privacy,
        aggregation=options.aggregation,
        secure=secure,
    )
    distributed_noise(federation)  # refuses noise that whole numbers cannot have
    return federation


def secure_settings(
    options: Options, algorithm: Algorithm, layout: Layout, clients: int
) -> SecureSettings | None:
    """Return the settings of secure aggregation, after checking that the method allows it."""
    if (settings := settings_from(options.secure)) is None:
        return None
    check_can_be_secure(algorithm)
    if layout.buffers and options.buffers == "average":
        raise ValueError(
            'buffers="average" sends each client\'s running statistics in the clear: with secure '
            'aggregation, choose buffers="local" or "frozen"'
        )
    settings.resolved(cohort_size(options.participation, clients))
    return settings


def check_clients(clients: Any) -> None:
    """Raise ValueError unless clients is a list with at least one element.

    >>> check_clients({"a": 1})
    Traceback (most recent call last):
    ...
    ValueError: clients must be a list with the data of each client, got dict
    """
    if not isinstance(clients, Sequence) or isinstance(clients, str):
        raise ValueError(
            f"clients must be a list with the data of each client, got {type(clients).__name__}"
        )
    if not len(clients):
        raise ValueError("clients is empty: pass the data of at least one client")


def evaluation_of(options: Options, task: Task) -> Evaluation:
    """Return what is measured of the global model, with the clients' test data on the device."""
    given, shares = options.client_tests, None
    if isinstance(given, str):
        check_choice("client_tests", given, [BY_CLASS])
        given, shares = None, class_shares(task)
    if not isinstance(given, Sequence | None):
        raise ValueError(
            "client_tests must be a list with the test data of each client, or 'by-class', "
            f"got {type(given).__name__}"
        )
    client_tests = [
        as_data(f"the test data of client {n}", data, task.device, task.layout.dtype)
        for n, data in enumerate(given or ())
    ]
    return Evaluation(
        options.metrics or {}, options.evaluate, client_tests, shares, options.evaluate_every
    )


def check_algorithm(algorithm: Any) -> Algorithm:
    """Return an algorithm; refuse anything else."""
    if not isinstance(algorithm, Algorithm):
        raise ValueError(
            "algorithm must be made by a function of fedsift.algorithms, such as fedadam_ssm(), "
            f"got {algorithm!r}" + (": add parentheses" if callable(algorithm) else "")
        )
    return algorithm


def engine_for(task: Task, algorithm: Algorithm, precision: str) -> Engine:
    """Return the fastest engine for the device of the task's tensors."""
    if task.device.type == "cuda":
        return Stacked(task, algorithm, precision)
    return Forked(task, algorithm)


def chosen_device(device: str | torch.device) -> str | torch.device:
    """Return the device to train on; ``auto`` selects CUDA if it is available."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        requested = torch.device(device)
    except RuntimeError:
        raise ValueError(f"unknown device {device!r}; choose auto, cpu or cuda") from None
    if requested.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {str(device)!r}, but PyTorch finds no GPU: use 'cpu' or 'auto'")
    if requested.type == "cuda" and requested.index not in (None, torch.cuda.current_device()):
        raise ValueError(
            f"{requested} is not the current GPU: call torch.cuda.set_device({requested.index}), "
            "and pass device='cuda'"
        )
    return device


def check_choice(name: str, value: str, choices: Collection[str]) -> None:
    """Raise ValueError unless a value is one of the choices."""
    if value not in choices:
        raise ValueError(f"unknown {name} {value!r}; choose one of: {', '.join(choices)}")


def check_whole(name: str, value: Any, at_least: int) -> None:
    """Raise ValueError unless a value is a whole number of at least this."""
    if not isinstance(value, Integral) or value < at_least:
        raise ValueError(f"{name} must be a whole number of at least {at_least}, got {value!r}")
