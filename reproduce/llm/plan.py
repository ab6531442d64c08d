"""Which runs there are: the methods, and the same small grid of learning rates for each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from methods import fedavg_adam, flasc

from fedsift import algorithms
from fedsift.algorithms import Algorithm

TASKS = ("sotu", "shakespeare")
CLIENTS, BLOCK_LENGTH, BATCH_SIZE, LOCAL_STEPS, ROUNDS = 20, 128, 8, 10, 40
RANK, ALPHA = 16, 32.0
EVERY = 4
"""Rounds between evaluations."""
VALIDATION_BLOCKS = 8
"""Blocks per client on which learning rates are chosen."""
GRID = (1.0, 0.3, 3.0, 0.1)
"""Multiples of a method's base learning rate, in the order in which they are run."""
SEEDS = (0, 1, 2)
"""Seed 0 has the whole grid, the others the learning rate that it chose on validation data."""
ADAM, SGD, SLOPES = 1e-3, 0.1, 3e-5
"""The base learning rates of local Adam, local SGD and steps along random directions."""
EPS = 1e-12
"""ε inside Adam's root: 1e-6 outside, as in PyTorch."""

Best = Mapping[tuple[str, str], tuple[float, str]]
"""The learning rate and ε that were chosen for a task and a method."""


@dataclass(frozen=True)
class Line:
    """One method with its settings; its learning rate is chosen from the grid."""

    make: Callable[..., Algorithm]
    base: float = ADAM
    settings: Mapping[str, Any] = field(default_factory=dict)
    rounds: int = ROUNDS


LINES: dict[str, Line] = {
    "fedavg-adam": Line(fedavg_adam),
    "fedavg-sgd": Line(algorithms.fedavg, SGD, {"momentum": 0.9}),
    "fedadam": Line(algorithms.fedadam),
    "fedadam-ssm": Line(algorithms.fedadam_ssm, settings={"density": 0.05}),
    "flasc-25": Line(flasc, settings={"density": 0.25}),
    "flasc-5": Line(flasc, settings={"density": 0.05}),
    "sift": Line(algorithms.sift),
    "sift-warmup-4": Line(algorithms.sift, settings={"warmup_rounds": 4}),
    "sift-beta2-99": Line(algorithms.sift, settings={"beta2": 0.99}),
    "sift-average-25": Line(algorithms.sift, settings={"average": 0.25}),
    "sift-down-1": Line(algorithms.sift, settings={"down_density": 0.01}),
    "sift-5": Line(algorithms.sift, settings={"density": 0.05}),
    "sift-0.3": Line(algorithms.sift, settings={"density": 0.003}),
    "sift-0.1": Line(algorithms.sift, settings={"density": 0.001}),
    "sift-0.1-down-1": Line(algorithms.sift, settings={"density": 0.001, "down_density": 0.01}),
    "decomfl": Line(algorithms.decomfl, SLOPES, {"perturbations": 2}, rounds=200),
}
"""The methods by name; a number after the name is the density in percent, up or down."""
FIRST = ("fedavg-adam", "sift", "fedadam-ssm", "fedadam")
"""The methods that are run first."""

URGENT = (
    ("fedavg-adam", 0.3),  # sets the target if it is better than at the base rate
    ("sift", 0.3),
    ("sift-beta2-99", 3.0),
    ("fedadam-ssm", 1.0),
    ("sift-5", 1.0),
    ("sift-beta2-99", 1.0),
    ("sift-average-25", 1.0),
    ("fedadam-ssm", 0.3),
    ("sift-0.3", 1.0),
    ("sift-down-1", 1.0),
    ("flasc-25", 1.0),
    ("fedadam", 1.0),
)
"""The methods and multiples of their learning rate that decide most, on the first task.

Without bias correction, ten steps of Adam along one gradient move 13 times as far from V = 0 as
from a V of many rounds, if β2 is 0.999, and 4 times as far if it is 0.99. FedAvg starts each round
with V = 0. sift keeps V: its steps shrink over the rounds, and a larger learning rate is too large
at first.
Gradients of two blocks had norms of 0.7 to 1.2 in the first five steps, so that sift's bound, which
is at least 1, hardly acts on them.
"""


@dataclass(frozen=True)
class Run:
    """One run: a line on a task, with a learning rate, ε of Adam and a seed."""

    task: str
    name: str
    lr: float
    eps: float
    seed: int

    @property
    def line(self) -> Line:
        """The method and its settings."""
        return LINES[self.name]

    @property
    def path(self) -> Path:
        """The run's folder below that of all runs."""
        eps = f"-eps-{self.eps:g}" if self.has_eps else ""
        return Path(self.task, self.name, f"lr-{self.lr:g}{eps}", f"seed-{self.seed}")

    @property
    def has_eps(self) -> bool:
        """Whether clients run Adam."""
        return self.line.base == ADAM

    def algorithm(self) -> Algorithm:
        """Make the algorithm with its settings."""
        settings = {**self.line.settings, "local_steps": LOCAL_STEPS, "lr": self.lr}
        return self.line.make(**settings, **({"eps": self.eps} if self.has_eps else {}))


def grid_runs(
    tasks: Sequence[str], names: Sequence[str], grid: Sequence[float], eps: Sequence[float]
) -> Iterator[Run]:
    """Yield the runs of seed 0: URGENT ones, then FIRST on every task, last the longest lines."""
    chosen = [(name, task, multiple) for name in names for task in tasks for multiple in grid]
    order = list(grid)
    for name, task, multiple in sorted(chosen, key=lambda x: (priority(*x), order.index(x[2]))):
        lr = float(f"{multiple * LINES[name].base:.6g}")
        for value in eps if LINES[name].base == ADAM else eps[:1]:
            yield Run(task, name, lr, value, seed=0)


def priority(name: str, task: str, multiple: float) -> tuple[object, ...]:
    """Return what orders a method on a task, with a learning rate, among all others."""
    order, place = list(dict.fromkeys([*FIRST, *LINES])), len(URGENT)
    if task == TASKS[0] and (name, multiple) in URGENT:
        place = URGENT.index((name, multiple))
    rounds = LINES[name].rounds
    return place, rounds, name not in FIRST, TASKS.index(task), order.index(name)


def repeated(runs: Iterable[Run], best: Best, seeds: Sequence[int]) -> Iterator[Run]:
    """Yield the further seeds of those runs whose settings were chosen."""
    for run in runs:
        if best.get((run.task, run.name)) == (run.lr, f"{run.eps:g}" if run.has_eps else ""):
            yield from (replace(run, seed=seed) for seed in seeds if seed != run.seed)
