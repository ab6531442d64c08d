"""The short calibration behind ``fedsift advise``: real rounds, judged on held-out data."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.nn.functional import cross_entropy

from fedsift.advise.coordinate_search import CoordinateSearch
from fedsift.advise.forecast import Curve, Forecast, Point, best_accuracy, predicted_mibit
from fedsift.advise.held_out import held_out_parts, hold_out
from fedsift.advise.hyperparameters import CANDIDATES, Hyperparameters
from fedsift.advise.recommendation import Advice, next_steps, recommended_rounds, search_reasons
from fedsift.algorithms import fedadam_ssm
from fedsift.engine import Task
from fedsift.errors import Diverged
from fedsift.federation.round import Federation
from fedsift.federation.snapshot import Snapshot
from fedsift.runs.compare import mibit
from fedsift.runs.config import RunConfig
from fedsift.runs.parts import Parts
from fedsift.simulation import Options, Record, engine_for, prepare, run_rounds
from fedsift.task import Loss, statistics_of
from fedsift.vector import Layout

MIN_ROUNDS = 5
"""Settings are considered only if the budget allows this many rounds."""
MAX_ROUNDS = 30
"""No settings are trained for more rounds than this."""
LineCallback = Callable[[str], None]
"""Receives a line of progress."""


class CalibrationRuns:
    """Training runs of one task with different settings; each can be continued."""

    def __init__(self, task: Task, on_settings: LineCallback, on_round: LineCallback) -> None:
        self.task, self.on_settings, self.on_round = task, on_settings, on_round
        self.snapshots: dict[Hyperparameters, Snapshot] = {}
        self.curves: dict[Hyperparameters, Curve] = {}

    def train(self, settings: Hyperparameters, stop: Callable[[Curve], bool]) -> Curve:
        """Continue the run with these settings until ``stop`` is true or it diverges."""
        method = settings.method_for(self.task.layout)
        task = replace(self.task, layout=method.layout_for(self.task.layout))
        federation = Federation(task, method, engine_for(task, method, "fp32"))
        curve = self.curves.setdefault(settings, [])
        snapshot = self.snapshots.get(settings) or federation.initial_snapshot()
        rounds = run_rounds(federation, snapshot, snapshot.round + MAX_ROUNDS)
        before = len(curve)
        try:
            while not (curve and stop(curve)):
                self.snapshots[settings], record = next(rounds)
                curve.append(point_of(record))
                self.on_round(f"{settings}: {curve_summary(curve)}")
        except (StopIteration, Diverged):
            pass
        if len(curve) > before or not curve:
            self.on_settings(f"{settings}: {curve_summary(curve)}")
        return curve


def calibration_task(config: RunConfig) -> Task:
    """Return the configured task, tested on a held-out fifth of its training data.

    >>> task = calibration_task(RunConfig.from_values({"clients": 2}))
    >>> [len(x) for x, _ in task.clients], len(task.test[0])
    ([576, 575], 287)
    """
    return task_of(held_out_parts(config), config.batch_size or None, config.seed)


def task_of(parts: Parts, batch_size: int | None, seed: int) -> Task:
    """Return the task of training a model on the clients' data."""
    options = Options(batch_size, loss=parts.loss, seed=seed, device="cpu")
    return prepare(parts.model, parts.clients, parts.test, fedadam_ssm(), options).task


def point_of(record: Record) -> Point:
    """Return a round's record as a point of the curve; a missing loss counts as infinite.

    >>> point_of({"uplink_bits_paper": 2**20, "loss": None, "accuracy": 0.5})
    Point(mibit=1.0, loss=inf, accuracy=0.5)
    """
    loss = record["loss"]
    if record["accuracy"] is None:
        raise ValueError("advise compares accuracies: give the task a test set with class labels")
    return Point(
        mibit(record),
        math.inf if loss is None else float(loss),
        float(record["accuracy"]),
    )


def curve_summary(curve: Curve) -> str:
    """Return a description of a curve's last point.

    >>> curve_summary([Point(0.5, 0.25, 0.9)])
    'round 1, 0.50 Mibit per client, loss 0.250, accuracy 90.0 %'
    >>> curve_summary([Point(0.00123, 0.25, 0.9)])
    'round 1, 0.0012 Mibit per client, loss 0.250, accuracy 90.0 %'
    """
    if not curve:
        return "diverged in the first round"
    last = curve[-1]
    sent = f"{last.mibit:.2f}" if last.mibit >= 0.1 else f"{last.mibit:.2g}"
    return (
        f"round {len(curve)}, {sent} Mibit per client, loss {last.loss:.3f}, "
        f"accuracy {100 * last.accuracy:.1f} %"
    )


def _ignore(line: str) -> None:
    pass


def advise(
    model: nn.Module,
    clients: Sequence[Any],
    *,
    loss: Loss = cross_entropy,
    batch_size: int | None = 64,
    seed: int = 0,
    budget_mibit: float = 50.0,
    target: float | None = None,
    rounds: int = 5,
    on_settings: LineCallback = _ignore,
    on_round: LineCallback = _ignore,
) -> Advice:
    """Recommend L, the learning rate, the density and the rounds for a model and its data.

    The arguments are those of :func:`fedsift.simulate`, and those of :func:`calibrate`. A fifth of
    each client's samples is held out to judge the settings. The model is not changed.

    >>> x = torch.randn(50, 2, generator=torch.Generator().manual_seed(0))
    >>> y = (x[:, 0] > 0).long()
    >>> advice = advise(nn.Linear(2, 2), [(x[:25], y[:25]), (x[25:], y[25:])], rounds=1)
    >>> advice.choice.lr in CANDIDATES["lr"]
    True
    """
    kept, held = hold_out(clients, seed, Layout.of(model).dtype)
    task = task_of(Parts(model, kept, held, loss), batch_size, seed)
    return calibrate(
        task,
        budget_mibit=budget_mibit,
        target=target,
        rounds=rounds,
        on_settings=on_settings,
        on_round=on_round,
    )


def calibrate(
    task: Task,
    *,
    budget_mibit: float = 50.0,
    target: float | None = None,
    rounds: int = 5,
    on_settings: LineCallback = _ignore,
    on_round: LineCallback = _ignore,
) -> Advice:
    """Train on a task, and recommend L, the learning rate, the density and the rounds.

    The settings are judged by the task's test set: give held-out data there, as
    :func:`calibration_task` does, not the data you report results on. First the paper's defaults
    train for at most 30 rounds to the ``target`` or, without a target, for the given ``rounds``.
    Other settings are then compared by the uplink with which they reach the same accuracy.
    ``on_settings`` receives a line for all settings tried, ``on_round`` a line per round.

    """
    if target is not None and not 0 < target < 1:
        raise ValueError(f"target must be in (0, 1), got {target}")
    if rounds < 1:
        raise ValueError(f"calibration-rounds must be at least 1, got {rounds}")
    task = with_statistics(task)
    runs = CalibrationRuns(task, on_settings, on_round)
    start = initial_settings(task.layout, budget_mibit)
    enough, goal = (rounds, 1.0) if target is None else (MAX_ROUNDS, target)
    reference = list(runs.train(start, lambda c: len(c) >= enough or best_accuracy(c) >= goal))
    if not reference:
        raise Diverged("the paper's defaults diverged in the first round: nothing to compare with")
    accuracy = min(best_accuracy(reference), goal)
    search = CoordinateSearch(
        runs.train, accuracy, MAX_ROUNDS, lambda x: is_affordable(x, task.layout, budget_mibit)
    )
    best = search.compare_methods(search.run(start))
    on_settings(f"best: {best}; training continues to the uplink of the initial settings")
    sent = reference[-1].mibit
    runs.train(best, lambda c: c[-1].mibit >= sent or len(c) >= MAX_ROUNDS)
    return _advice(runs, search, start, best, target, budget_mibit)


def initial_settings(layout: Layout, budget_mibit: float) -> Hyperparameters:
    """Return the paper's defaults, with a smaller density if the budget requires it.

    >>> layout = Layout.of(nn.Linear(783, 28))
    >>> initial_settings(layout, 50.0)
    Hyperparameters(local_steps=30, lr=0.001, density=0.05, algorithm='fedadam-ssm')
    >>> initial_settings(layout, 0.2).density
    0.01
    """
    if not budget_mibit > 0 or not math.isfinite(budget_mibit):
        raise ValueError(f"budget-mbit must be a positive number, got {budget_mibit}")
    for density in sorted(CANDIDATES["density"], reverse=True):
        settings = replace(Hyperparameters(), density=density)
        if is_affordable(settings, layout, budget_mibit):
            return settings
    least = MIN_ROUNDS * settings.mibit(layout)
    raise ValueError(
        f"budget-mbit must be at least {least:.3g} to allow {MIN_ROUNDS} rounds at density "
        f"{settings.density:g}, got {budget_mibit}"
    )


def is_affordable(settings: Hyperparameters, layout: Layout, budget_mibit: float) -> bool:
    """Return whether the budget allows :data:`MIN_ROUNDS` rounds.

    >>> layout = Layout.of(nn.Linear(783, 28))
    >>> [is_affordable(Hyperparameters(), layout, budget) for budget in (0.5, 50)]
    [False, True]
    """
    return MIN_ROUNDS * settings.mibit(layout) <= budget_mibit


def with_statistics(task: Task) -> Task:
    """Return a task whose layout includes the running statistics of the model's layers."""
    if task.layout.buffers is not None:
        return task
    return replace(task, layout=task.layout.with_buffers(task.model, statistics_of(task.model)))


def _advice(
    runs: CalibrationRuns,
    search: CoordinateSearch,
    start: Hyperparameters,
    best: Hyperparameters,
    target: float | None,
    budget: float,
) -> Advice:
    curve, goal = runs.curves[best], target or search.accuracy
    forecast = Forecast.fit(curve)
    at_budget = None if forecast is None else forecast.accuracy(max(budget, curve[0].mibit))
    rounds, why = recommended_rounds(curve, target, best.mibit(runs.task.layout), budget)
    return Advice(
        choice=best,
        rounds=rounds,
        target=goal,
        predicted=predicted_mibit(curve, goal),
        predicted_default=predicted_mibit(runs.curves[start], goal),
        measured=best_accuracy(curve) >= goal,
        accuracy_at_budget=at_budget,
        reasons=(*search_reasons(search), why),
        next=tuple(next_steps(best, start)),
        tried=tuple(search.measured.values()),
    )
