"""Simulation of a federation on one machine."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedsift.algorithms import Algorithm, fedadam_ssm, for_rounds
from fedsift.algorithms.buffers import BUFFERS, with_buffers
from fedsift.codec.wire import WIRES
from fedsift.engine import Engine, Forked, Stacked, Task
from fedsift.engine.gpu.stacked import PRECISIONS
from fedsift.errors import Diverged
from fedsift.federation.cohort import check_cohort
from fedsift.federation.memories import OnDisk, SlotFile
from fedsift.federation.norm_bound import MAX_NORM_RATIO, check_max_norm_ratio
from fedsift.federation.round import Federation
from fedsift.federation.snapshot import RoundReport, Snapshot
from fedsift.task import Loss, Transform, Weights, check_model, check_task, check_weights
from fedsift.task.samples import as_data
from fedsift.vector import Layout, State

Record = dict[str, Any]
"""One round's metrics: a line of metrics.jsonl."""


@dataclass(frozen=True)
class Result:
    """The result of a simulation: the trained model and the metrics of each round."""

    snapshot: Snapshot
    history: list[Record]
    layout: Layout
    weights: Tensor
    """The trained model's parameters as a flat vector, followed by the buffers that training
    changes. Most methods return the global W."""

    @property
    def state(self) -> State:
        """The global state: flat vectors in the model's parameter order, such as ``state.w``."""
        return self.snapshot.state

    def load_into(self, model: nn.Module) -> None:
        """Set a model's parameters, and the buffers that training changes, to the trained ones."""
        self.layout.write(self.weights, model)


def simulate(
    model: nn.Module,
    clients: Sequence[Any],
    test: Any = None,
    algorithm: Algorithm | None = None,
    rounds: int = 30,
    batch_size: int | None = 64,
    participation: float = 1.0,
    dropout: float = 0.0,
    min_clients: int = 0,
    wire: str = "count",
    loss: Loss = nn.functional.cross_entropy,
    seed: int = 0,
    device: str | torch.device = "cpu",
    precision: str = "fp32",
    max_norm_ratio: float | None = MAX_NORM_RATIO,
    weights: Weights | None = None,
    transform: Transform | None = None,
    num_workers: int = 0,
    buffers: str = "average",
    on_round: Callable[[Record], None] | None = None,
) -> Result:
    """Train a model on clients that share updates but not data.

    Parameters
    ----------
    model
        Any module. Training starts from its current parameters and does not change them.
    clients
        The data of each client: a pair (x, y) of tensors, NumPy arrays, or nested dicts and tuples
        of them, or a map-style torch ``Dataset``, whose items are fetched at every use. A dict x is
        passed to the model as ``model(**x)``, a tuple as ``model(*x)``.
    test
        Data in the same formats, on which accuracy and loss are measured after each round.
    algorithm
        A method from ``fedsift.algorithms``; by default FedAdam-SSM with the paper's settings.
    rounds
        Number of communication rounds.
    batch_size
        Samples per local step. None takes the whole local data set in each step.
    participation
        The fraction of clients that train in each round.
    dropout
        The probability that a client trains but its update is lost.
    min_clients
        Raise :class:`TooFewClients` if a round merges fewer updates than this.
    wire
        ``"count"`` computes the exact size of every message; ``"real"`` also encodes and decodes
        it. The results are bit-identical.
    loss
        Returns a scalar, given the model's output and y.
    seed
        Seed of cohorts, mini-batches and lost updates.
    device
        The device to train on; ``"auto"`` selects CUDA if it is available.
    precision
        Precision on a GPU: ``"fp32"``, ``"tf32"`` or ``"bf16"``.
    max_norm_ratio
        Reject an update if the L2 norm of its W is more than this many times the usual norm in this
        and recent rounds. The limit for M is twice that, for V the square of the limit for M.
        0 or None disables the bound.
    weights
        The clients' weights in the mean: ``"batch"``, their mini-batch sizes, as in the paper;
        ``"examples"``, their numbers of samples; ``"equal"``; or None for the algorithm's own.
    transform
        Applied to the inputs of each training batch, on the device: ``transform(x)``. Random
        transforms are seeded by round, client and step.
    num_workers
        Processes that fetch the items of Datasets ahead of their use; 0 fetches them in the
        training process. Results do not depend on this number.
    buffers
        What happens to the buffers that training changes, such as the running statistics of batch
        normalization: ``"average"`` averages and sends them, ``"local"`` leaves each client its
        own, ``"frozen"`` keeps normalization layers in evaluation mode, at the initial values.
    on_round
        Called with the metrics of each round.

    Examples
    --------
    >>> x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    >>> y = (x.sum(1) > 0).long()
    >>> clients = [(x[:20], y[:20]), (x[20:], y[20:])]
    >>> result = simulate(nn.Linear(3, 2), clients, test=(x, y), rounds=2)
    >>> len(result.history), result.state.w.shape
    (2, torch.Size([8]))

    """
    _check_whole("rounds", rounds, at_least=1)
    federation = prepare(
        model,
        clients,
        test,
        for_rounds(check_algorithm(algorithm or fedadam_ssm()), rounds),
        Options(
            batch_size, participation, dropout, min_clients, wire, loss, seed, device, precision,
            max_norm_ratio, transform, num_workers, weights, buffers,
        ),
    )  # fmt: skip
    history: list[Record] = []
    last = initial_snapshot(federation)
    for snapshot, record in run_rounds(federation, last, rounds):
        last = snapshot
        history.append(record)
        if on_round:
            on_round(record)
    return Result(last, history, federation.task.layout, federation.model_weights(last))


@dataclass(frozen=True)
class Options:
    """The arguments of :func:`simulate` that control how it runs."""

    batch_size: int | None
    participation: float
    dropout: float
    min_clients: int
    wire: str
    loss: Loss
    seed: int
    device: str | torch.device
    precision: str = "fp32"
    max_norm_ratio: float | None = MAX_NORM_RATIO
    transform: Transform | None = None
    num_workers: int = 0
    weights: Weights | None = None
    buffers: str = "average"

    def check(self, clients: int) -> None:
        """Check that every option is valid for this number of clients."""
        if self.batch_size is not None:
            _check_whole("batch_size", self.batch_size, at_least=1)
        check_cohort(clients, self.participation, self.min_clients)
        check_max_norm_ratio(self.max_norm_ratio)
        check_weights(self.weights)
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")
        _check_choice("precision", self.precision, PRECISIONS)
        if self.precision != "fp32" and torch.device(chosen_device(self.device)).type != "cuda":
            raise ValueError(f"precision {self.precision} needs a GPU; use fp32 on {self.device}")
        _check_choice("wire", self.wire, WIRES)
        _check_choice("buffers", self.buffers, BUFFERS)
        _check_whole("seed", self.seed, at_least=0)
        _check_whole("num_workers", self.num_workers, at_least=0)


def prepare(
    model: nn.Module,
    clients: Sequence[Any],
    test: Any,
    algorithm: Algorithm,
    options: Options,
) -> Federation:
    """Check the arguments, move the data to the device, and return a federation ready to run."""
    check_algorithm(algorithm)
    if not len(clients):
        raise ValueError("clients is empty: pass the data of at least one client")
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
    layout = layout.with_buffers(task.model, check_task(task))
    algorithm = with_buffers(algorithm, layout, options.buffers)
    task = replace(task, layout=algorithm.layout_for(layout))
    return Federation(
        task,
        algorithm,
        engine_for(task, algorithm, options.precision),
        participation=options.participation,
        dropout=options.dropout,
        min_clients=options.min_clients,
        wire=WIRES[options.wire],
        max_norm_ratio=options.max_norm_ratio,
        weights=options.weights,
    )


def check_algorithm(algorithm: Any) -> Algorithm:
    """Return an algorithm; refuse anything else."""
    if not isinstance(algorithm, Algorithm):
        raise ValueError(
            "algorithm must be made by a function of fedsift.algorithms, such as fedadam_ssm(), "
            f"got {algorithm!r}"
        )
    return algorithm


def engine_for(task: Task, algorithm: Algorithm, precision: str) -> Engine:
    """Return the fastest engine for the device of the task's tensors."""
    if task.device.type == "cuda":
        return Stacked(task, algorithm, precision)
    return Forked(task, algorithm)


def initial_snapshot(federation: Federation, path: Path | None = None) -> Snapshot:
    """Return the snapshot before round 1. Large client memories go to a file (default: unnamed)."""
    start = federation.initial_snapshot()
    if not federation.needs_memory_file:
        return start
    file = SlotFile(federation.memory_lengths, start.state.w, path)
    return replace(start, client_memory=OnDisk(file))


def run_rounds(
    federation: Federation, snapshot: Snapshot, rounds: int, seconds: float = 0.0
) -> Iterator[tuple[Snapshot, Record]]:
    """Run the rounds after a snapshot, up to ``rounds``; yield each snapshot with its record."""
    while snapshot.round < rounds:
        began = time.perf_counter()
        try:
            snapshot, report = federation.run_round(snapshot)
        except Diverged as problem:
            raise Diverged(f"training diverged in round {snapshot.round + 1}: {problem}") from None
        accuracy, loss = federation.engine.evaluate(federation.model_weights(snapshot))
        seconds += time.perf_counter() - began
        yield snapshot, record_of(snapshot, accuracy, loss, report, seconds)


def record_of(
    snapshot: Snapshot,
    accuracy: float | None,
    loss: float | None,
    report: RoundReport,
    seconds: float,
) -> Record:
    """Return a round's line of metrics.jsonl; traffic and seconds are totals so far."""
    return {
        "round": snapshot.round,
        "accuracy": finite_or_none(accuracy),
        "loss": finite_or_none(loss),
        **asdict(report),
        "uplink_bits_paper": snapshot.traffic.uplink_bits_paper,
        "uplink_bytes": snapshot.traffic.uplink_bytes,
        "downlink_bytes": snapshot.traffic.downlink_bytes,
        "seconds": seconds,
    }


def finite_or_none(x: float | None) -> float | None:
    """Return a number if JSON can represent it, else None.

    >>> finite_or_none(0.5), finite_or_none(math.nan)
    (0.5, None)
    """
    return x if x is not None and math.isfinite(x) else None


def chosen_device(device: str | torch.device) -> str | torch.device:
    """Return the device to train on; ``auto`` selects CUDA if it is available."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    requested = torch.device(device)
    if requested.type == "cuda" and requested.index not in (None, torch.cuda.current_device()):
        raise ValueError(
            f"{requested} is not the current GPU: call torch.cuda.set_device({requested.index}), "
            "and pass device='cuda'"
        )
    return device


def _check_choice(name: str, value: str, choices: Collection[str]) -> None:
    if value not in choices:
        raise ValueError(f"unknown {name} {value!r}; choose one of: {', '.join(choices)}")


def _check_whole(name: str, value: Any, at_least: int) -> None:
    if not isinstance(value, Integral) or value < at_least:
        raise ValueError(f"{name} must be a whole number of at least {at_least}, got {value!r}")
