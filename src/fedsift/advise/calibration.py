"""The short calibration behind ``fedsift advise``: real rounds, judged on held-out data."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from fedsift.advise.search import LADDERS, Choice, Curve, Forecast, Point, Race, Tried, climb
from fedsift.algorithms import fedadam_ssm
from fedsift.data import deal, load
from fedsift.engine import Task
from fedsift.errors import Diverged
from fedsift.federation.round import (
    Federation,
)
from fedsift.federation.snapshot import (
    Snapshot,
)
from fedsift.models import build
from fedsift.runs.compare import mibit
from fedsift.runs.config import RunConfig
from fedsift.runs.run import check_output
from fedsift.seeding import stream
from fedsift.simulation import Record, engine_for, run_rounds
from fedsift.task import (
    check_model,
)
from fedsift.vector import Layout

HELD_OUT = 5
"""One sample of this many is kept from training, to judge by."""
FEWEST_ROUNDS = 5
"""A budget must pay for so many rounds of a choice, or the choice is not considered."""
MAX_ROUNDS = 30
"""No choice runs longer than this in the calibration."""
Say = Callable[[str], None]
"""Is given a line when a choice has been tried."""
Watch = Callable[[str], None]
"""Is given a line after every round."""


@dataclass(frozen=True)
class Advice:
    """What to use, what it is expected to do, why, and what to try next.

    ``predicted`` and ``predicted_default`` are Mibit a client to the target; None where the curve
    gives no forecast. ``measured`` says that the target was reached in the calibration itself.
    """

    choice: Choice
    rounds: int
    target: float
    predicted: float | None
    predicted_default: float | None
    measured: bool
    accuracy_at_budget: float | None
    reasons: tuple[str, ...]
    next: tuple[str, ...]
    tried: tuple[Tried, ...]

    def json(self) -> dict[str, Any]:
        """Everything as plain values; an infinite number of bits is null."""
        tried = [
            {
                **asdict(t.choice),
                "rounds": t.rounds,
                "mibit": t.finite,
            }
            for t in self.tried
        ]
        return {**asdict(self), "choice": asdict(self.choice), "tried": tried}


class Calibration:
    """Runs of one task, each of which can be taken up again where it stopped."""

    def __init__(self, task: Task, say: Say, watch: Watch) -> None:
        self.task, self.say, self.watch = task, say, watch
        self.snapshots: dict[Choice, Snapshot] = {}
        self.curves: dict[Choice, Curve] = {}

    @property
    def d(self) -> int:
        """Number of model parameters."""
        return self.task.layout.d

    def run(self, choice: Choice, stop: Callable[[Curve], bool]) -> Curve:
        """Train on with a choice until ``stop`` says so; a run that diverges stops too."""
        method = fedadam_ssm(**asdict(choice))
        federation = Federation(self.task, method, engine_for(self.task, method, "fp32"))
        curve = self.curves.setdefault(choice, [])
        snapshot = self.snapshots.get(choice) or federation.initial_snapshot()
        rounds = run_rounds(federation, snapshot, snapshot.round + MAX_ROUNDS)
        before = len(curve)
        try:
            while not (curve and stop(curve)):
                self.snapshots[choice], record = next(rounds)
                curve.append(point_of(record))
                self.watch(f"{choice}: {told(curve)}")
        except (StopIteration, Diverged):
            pass
        if len(curve) > before or not curve:
            self.say(f"{choice}: {told(curve)}")
        return curve


def calibration_task(config: RunConfig) -> Task:
    """The configured task with a fifth of its training data held out, in place of the test set.

    >>> task = calibration_task(RunConfig.from_values({"clients": 2}))
    >>> [len(x) for x, _ in task.clients], len(task.test[0])
    ([576, 575], 287)
    """
    dataset = load(config.dataset)
    x, y = dataset.train
    order = stream(config.seed, "held out").permutation(len(x))
    cut = len(x) // HELD_OUT
    held, rest = order[:cut], order[cut:]
    labels = dataset.labels[rest]
    parts = deal(config.partition, labels, config.clients, config.seed, config.theta)
    clients = [(x[rest[part]], y[rest[part]]) for part in parts]
    model = build(config.model, dataset.shape, config.seed, dataset.dtype)
    check_model(model, x[:2])
    check_output(model, dataset, config.model)
    batch = config.batch_size or None
    return Task(
        model, dataset.loss, clients, (x[held], y[held]), batch, config.seed, Layout.of(model)
    )


def point_of(record: Record) -> Point:
    """A round's record as a point; a loss that is no number counts as infinite.

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


def told(curve: Curve) -> str:
    """A curve's end in words.

    >>> told([Point(0.5, 0.25, 0.9)])
    '0.50 Mibit in 1 rounds, loss 0.250, accuracy 90.0 %'
    """
    if not curve:
        return "diverged in the first round"
    last = curve[-1]
    return (
        f"{last.mibit:.2f} Mibit in {len(curve)} rounds, loss {last.loss:.3f}, "
        f"accuracy {100 * last.accuracy:.1f} %"
    )


def advise(
    task: Task,
    *,
    budget_mibit: float = 50.0,
    target: float | None = None,
    rounds: int = 5,
    say: Say = lambda line: None,
    watch: Watch = lambda line: None,
) -> Advice:
    """Calibrate on a task and say which L, learning rate and density to use.

    The task's test set is what the choices are judged by: give held-out data there, as
    :func:`calibration_task` does, not what you will report on. The paper's defaults set the line
    that every other choice races to: they train to the ``target``, but for no more than 30 rounds,
    or for the given ``rounds`` where there is no target. ``say`` is told of every choice that was
    tried, ``watch`` of every round.

    >>> x = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
    >>> y = (x[:, 0] > 0).long()
    >>> clients, model = [(x[:20], y[:20]), (x[20:], y[20:])], nn.Linear(2, 2)
    >>> task = Task(model, nn.functional.cross_entropy, clients, (x, y), None, 0, Layout.of(model))
    >>> advise(task, rounds=1).choice.lr in LADDERS["lr"]
    True
    """
    if target is not None and not 0 < target < 1:
        raise ValueError(f"target must be in (0, 1), got {target}")
    if rounds < 1:
        raise ValueError(f"calibration-rounds must be at least 1, got {rounds}")
    calibration = Calibration(task, say, watch)
    start = first_choice(calibration.d, budget_mibit)
    far = rounds if target is None else MAX_ROUNDS
    reference = list(calibration.run(start, lambda c: len(c) >= far or _best(c) >= (target or 1)))
    if not reference:
        raise Diverged("the paper's defaults diverged in the first round: nothing to compare with")
    line = min(_best(reference), target or 1)
    race = Race(calibration.run, line, MAX_ROUNDS)
    best = climb(race, start, lambda c: affordable(c, calibration.d, budget_mibit))
    say(f"best: {best}; it goes on to as many bits as the defaults had")
    enough = reference[-1].mibit
    calibration.run(best, lambda c: c[-1].mibit >= enough or len(c) >= MAX_ROUNDS)
    return _conclude(calibration, race, start, best, target or line, budget_mibit)


def _best(curve: Curve) -> float:
    return max(point.accuracy for point in curve)


def first_choice(d: int, budget_mibit: float) -> Choice:
    """The paper's defaults, or the densest choice of the ladder that the budget can pay for.

    >>> first_choice(21_840, 50.0)
    Choice(local_steps=30, lr=0.001, density=0.05)
    >>> first_choice(21_840, 0.2).density
    0.01
    """
    if not budget_mibit > 0 or not math.isfinite(budget_mibit):
        raise ValueError(f"budget-mbit must be a positive number, got {budget_mibit}")
    for density in sorted(LADDERS["density"], reverse=True):
        choice = replace(Choice(), density=density)
        if affordable(choice, d, budget_mibit):
            return choice
    least = FEWEST_ROUNDS * choice.mibit(d)
    raise ValueError(
        f"budget-mbit must be at least {least:.3g}: {FEWEST_ROUNDS} rounds at density "
        f"{choice.density:g}, got {budget_mibit}"
    )


def affordable(choice: Choice, d: int, budget_mibit: float) -> bool:
    """Whether the budget pays for a few rounds.

    >>> affordable(Choice(), 21_840, 0.5), affordable(Choice(), 21_840, 50.0)
    (False, True)
    """
    return FEWEST_ROUNDS * choice.mibit(d) <= budget_mibit


def _conclude(
    calibration: Calibration, race: Race, start: Choice, best: Choice, goal: float, budget: float
) -> Advice:
    curves = calibration.curves
    forecast = Forecast.of(curves[best])
    measured = any(point.accuracy >= goal for point in curves[best])
    at_budget = None if forecast is None else forecast.accuracy(max(budget, curves[best][0].mibit))
    return Advice(
        choice=best,
        rounds=int(budget / best.mibit(calibration.d)),
        target=goal,
        predicted=mibit_to(curves[best], goal),
        predicted_default=mibit_to(curves[start], goal),
        measured=measured,
        accuracy_at_budget=at_budget,
        reasons=tuple(reasons(race)),
        next=tuple(next_steps(best, start)),
        tried=tuple(race.tried.values()),
    )


FARTHEST = 1e9
"""Mibit that nobody will send: a forecast of more says that the accuracy is not reached."""


def mibit_to(curve: Curve, accuracy: float) -> float | None:
    """Mibit to an accuracy: as measured, or else by the curve's forecast.

    >>> mibit_to([Point(1.0, 1.0, 0.5), Point(2.0, 0.5, 0.8)], 0.7)
    2.0
    """
    for point in curve:
        if point.accuracy >= accuracy:
            return point.mibit
    forecast = Forecast.of(curve)
    if forecast is None or accuracy >= 1:
        return None
    mibit = forecast.mibit(accuracy)
    return mibit if mibit < FARTHEST else None


def reasons(race: Race) -> list[str]:
    """One line a duel: what two values of a setting needed to cross the same line."""
    lines = [f"every choice raced to {100 * race.line:.1f} % on held-out data"]
    for name, best, other in race.duels:
        pair = " against ".join(_told(race.tried[choice], name) for choice in (other, best))
        lines.append(f"{name.replace('_', '-')}: {pair}")
    return list(dict.fromkeys(lines))


def _told(tried: Tried, name: str) -> str:
    needed = "overtaken" if tried.finite is None else f"{tried.mibit:.3g} Mibit"
    return f"{getattr(tried.choice, name):g} ({needed})"


def next_steps(best: Choice, start: Choice) -> list[str]:
    """What the calibration leaves open.

    >>> next_steps(Choice(local_steps=10), Choice())
    ['density 0.05 is the last that was tried: look above it too', 'local-steps 10 is the ...']
    """
    lines: list[str] = []
    for name in LADDERS:
        ladder, value = sorted(LADDERS[name]), getattr(best, name)
        if value in (ladder[0], ladder[-1]):
            flag = name.replace("_", "-")
            side = "below" if value == ladder[0] else "above"
            lines.append(f"{flag} {value:g} is the last that was tried: look {side} it too")
    if best == start:
        lines.append("nothing beat the start in so short a run: try --calibration-rounds 15")
    return lines
