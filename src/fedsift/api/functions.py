"""Simulate a federation on one machine: as a whole, or round by round."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from fedsift.algorithms import Algorithm
from fedsift.api.iterator import OnRound, Rounds, begin_rounds
from fedsift.api.result import Result
from fedsift.engine.evaluation import Evaluate, Metric
from fedsift.federation.norm_bound import MAX_NORM_RATIO
from fedsift.federation.snapshot import Snapshot
from fedsift.privacy import DifferentialPrivacy, SecureSettings
from fedsift.privacy.robust import Aggregation
from fedsift.progress import training_warning
from fedsift.runs.config import KEEP_CHECKPOINTS
from fedsift.task import Loss, Transform, Weights

P = ParamSpec("P")
R = TypeVar("R")


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
    device: str | torch.device = "auto",
    precision: str = "fp32",
    max_norm_ratio: float | None = MAX_NORM_RATIO,
    weights: Weights | None = None,
    transform: Transform | None = None,
    num_workers: int = 0,
    buffers: str = "average",
    aggregation: Aggregation = "mean",
    on_round: OnRound | None = None,
    metrics: Mapping[str, Metric] | None = None,
    evaluate: Evaluate | None = None,
    evaluate_every: int = 1,
    client_tests: Sequence[Any] | str | None = None,
    privacy: DifferentialPrivacy | None = None,
    secure: bool | SecureSettings = False,
    out: str | Path | None = None,
    keep_checkpoints: int = KEEP_CHECKPOINTS,
    start: Result | Snapshot | None = None,
    progress: bool | None = None,
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
        Number of communication rounds in total, including those before ``start``.
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
    aggregation
        How updates are merged: ``"mean"``, weighted; or, against hostile clients, the ``"median"``
        of each coordinate, or its ``"trimmed"`` mean without the lowest and highest fifth. The last
        two need a method whose clients send the same coordinates, and memory for all updates.
    on_round
        Called after each round: ``on_round(record, model)``, with the round's metrics and a copy of
        the global model. If it returns True, training stops, and ``simulate`` returns the result.
    metrics
        Functions by name, ``(output, y) -> float``, averaged over the test set and weighted by
        samples. Each is called with at most 1000 samples at a time, and becomes a column of the
        history.
    evaluate
        A function of the global model that returns a dict of numbers, in addition to ``test`` or
        instead of it. Each number becomes a column of the history.
    evaluate_every
        Rounds between evaluations. The initial model and the last round are always evaluated.
    client_tests
        Test data of each client, in the formats of ``clients``. The history gets the accuracy of
        the global model on each of them, with its mean, minimum, 10th percentile and deviation.
        ``"by-class"`` tests every client on ``test``, weighted by the classes of its own data.
    privacy
        A :class:`fedsift.privacy.DifferentialPrivacy`: each client takes part in a round with
        probability ``participation``, its update is clipped, and the sum gets noise. The history
        gets the column ``epsilon``, and training stops before the budget is exceeded.
    secure
        True aggregates securely: the server gets the sum of the clients' values only. Every message
        of the protocol is built and counted; lost clients (``dropout``) are lost at a random stage.
        It needs a method whose clients send whole numbers at the same coordinates, such as
        ``sift_common``. A :class:`fedsift.privacy.SecureSettings` sets its neighbors and threshold.
    out
        A run folder, as ``fedsift run`` writes it: metrics, checkpoints, model, report. If it holds
        an unfinished run of the same settings and data, that run is continued; the result of a
        finished one is returned without training. Any other run is refused.
    keep_checkpoints
        Number of checkpoints that the folder keeps, so that :func:`fedsift.runs.rollback` can
        return to them.
    start
        An earlier :class:`Result`, or a snapshot of it: training continues from its state, its
        memories and its round number, in place of the model's parameters. ``rounds`` is the total,
        including the rounds of ``start``; schedules follow that total.
    progress
        None shows a bar in a terminal or notebook, and writes one line per round to stderr
        elsewhere. False shows nothing.

    Examples
    --------
    >>> x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    >>> y = (x.sum(1) > 0).long()
    >>> clients = [(x[:20], y[:20]), (x[20:], y[20:])]
    >>> result = simulate(nn.Linear(3, 2), clients, test=(x, y), rounds=2)
    >>> [record["round"] for record in result.history], result.state.w.shape
    ([0, 1, 2], torch.Size([8]))

    """
    run = begin_rounds(locals(), is_shown=progress is not False)
    with closing(run):
        while run.advance():
            pass
    result = run.result
    if text := training_warning(result.history, result.labels, run.settings.get("lr"), dashes=""):
        warnings.warn(text.removeprefix("warning: "), stacklevel=2)
    return result


def same_arguments(function: Callable[P, Any]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """Give a function the signature of another, except for what it returns."""

    def decorate(decorated: Callable[..., R]) -> Callable[P, R]:
        decorated.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
        return decorated

    return decorate


@same_arguments(simulate)
def rounds(*args: Any, **kwargs: Any) -> Rounds:
    """Simulate round by round, with the arguments of :func:`simulate`.

    Nothing is shown unless ``progress`` is True.

    The iterator yields (record, model, snapshot) after each round: the round's metrics, a copy of
    the global model, and everything needed to continue from there. It has the records so far as
    ``history``, of which the first is the initial model, and the result so far as ``result``.

    >>> x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    >>> y = (x.sum(1) > 0).long()
    >>> run = rounds(nn.Linear(3, 2), [(x, y)], test=(x, y), rounds=50)
    >>> for record, model, snapshot in run:
    ...     if record["round"] == 2:
    ...         break
    >>> run.result.snapshot.round, len(run.history)
    (2, 3)
    """
    given = inspect.signature(simulate).bind(*args, **kwargs)
    given.apply_defaults()
    return begin_rounds(given.arguments, is_shown=bool(given.arguments["progress"]))
