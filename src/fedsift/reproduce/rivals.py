"""Methods at their best: which runs there are, and which settings are chosen.

Every method has the same number of configurations. Validation runs are tested on training data that
no client has. Of a method's configurations, the one is chosen that needs the least uplink to a
target there; its test runs have other seeds. A method that reaches no target there has the
configuration with the highest accuracy. There are three targets: the task's own, and the best
accuracy of FedAdam-SSM and of FedAdam, both with the settings of the other experiments.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from fedsift.reproduce.experiments import Experiment, read_pinned
from fedsift.reproduce.parallel import unique_runs
from fedsift.reproduce.plan import (
    PlannedRun,
    Selection,
    is_chosen,
    line_runs,
    plan,
    require_known_methods,
    selected_settings,
    selected_tasks,
)
from fedsift.reproduce.results import Outcome, read_outcome
from fedsift.reproduce.traffic import accuracies, cost_to_target
from fedsift.runs.compare import megabytes

VALIDATION, TEST = "rivals/validation", "rivals/test"
"""The folders of both kinds of runs."""
TARGETS = ("task", "fedadam-ssm", "fedadam")
"""The task's own target, and the best accuracy of two methods."""


@dataclass(frozen=True)
class MethodGroup:
    """Methods that are compared on a task and setting, and run one after another."""

    task: str
    setting: str
    methods: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name in file names."""
        return f"{self.task}-{self.setting}"


def stages(
    experiments: Iterable[Experiment], selection: Selection, out: Path
) -> Iterator[list[PlannedRun]]:
    """Yield the runs of experiments in stages; a stage may depend on earlier results."""
    experiments = list(experiments)
    yield [run for e in experiments if e.kind != "rivals" for run in plan(e, selection)]
    for experiment in experiments:
        for group in groups_of(experiment, selection):
            yield selected(validation_runs(experiment, group, selection), selection)
            yield selected(test_runs(experiment, group, selection, out), selection)


def check_selection(experiment: Experiment, selection: Selection) -> None:
    """Raise ValueError if the selection does not fit the experiment."""
    if experiment.kind != "rivals":
        plan(experiment, selection)
        return
    if selection.seeds < 1:
        raise ValueError(f"seeds must be at least 1, got {selection.seeds}")
    if not (groups := groups_of(experiment, selection)):
        raise ValueError(
            f"{experiment.name} does not compare {selection.task} with --setting "
            f"{selection.setting}: leave out --setting"
        )
    runs = [run for group in groups for run in validation_runs(experiment, group, selection)]
    require_known_methods(runs, selection.methods)


def selected(runs: Iterable[PlannedRun], selection: Selection) -> list[PlannedRun]:
    """Return the runs of the selected methods."""
    return [run for run in runs if is_chosen(run, selection.methods)]


def groups_of(experiment: Experiment, selection: Selection) -> list[MethodGroup]:
    """Return the groups of the selected tasks and settings, in order of value."""
    if experiment.kind != "rivals":
        return []
    pinned = read_pinned(experiment.name)
    tasks, settings = (
        selected_tasks(experiment, selection),
        selected_settings(experiment, selection),
    )
    return [
        MethodGroup(group["task"], group["setting"], tuple(pinned["methods"][group["methods"]]))
        for group in pinned["groups"]
        if group["task"] in tasks and group["setting"] in settings
    ]


def validation_runs(
    experiment: Experiment, group: MethodGroup, selection: Selection
) -> list[PlannedRun]:
    """Return a run for each configuration, then those of the references, each run once."""
    pinned = read_pinned(experiment.name)
    runs = []
    for line in experiment.lines:
        if line["algorithm"] in group.methods:
            grid = [
                run
                for values in configurations(line, group.task)
                for run in on_validation_data(group, values, selection)
            ]
            paths = tuple(run.path for run in grid)
            runs += [replace(run, competitors=paths) for run in grid]
    for name in pinned["references"]:
        runs += on_validation_data(group, {"algorithm": name}, selection)
    return unique_runs(runs)


def configurations(line: Mapping[str, Any], task: str) -> Iterator[dict[str, Any]]:
    """Yield the configurations of a line; ``lr`` is the name of a list of learning rates.

    >>> line = {"algorithm": "sift", "density": [0.005, 0.01], "lr": "adam"}
    >>> found = list(configurations(line, "cnn-fashion-mnist"))
    >>> len(found), found[0]
    (6, {'algorithm': 'sift', 'density': 0.005, 'lr': 0.003})
    """
    rates = read_pinned("rivals")["learning_rates"][read_pinned("tasks")["tasks"][task]["model"]]
    lists = {key: rates[x] if key == "lr" else x for key, x in line.items() if key != "algorithm"}
    for values in product(*lists.values()):
        yield {"algorithm": line["algorithm"], **dict(zip(lists, values, strict=True))}


def on_validation_data(
    group: MethodGroup, line: Mapping[str, Any], selection: Selection
) -> Iterator[PlannedRun]:
    """Yield the run of a configuration on held-out training data."""
    pinned = read_pinned("rivals")
    for run in line_runs(group.task, group.setting, line, selection, [pinned["validation_seed"]]):
        config = replace(run.config, validation=pinned["validation"])
        yield replace(run, part=VALIDATION, config=config)


def on_test_data(run: PlannedRun, seed: int) -> PlannedRun:
    """Return the run of the same configuration on the test set."""
    config = replace(run.config, validation=0.0, seed=seed)
    return replace(run, part=TEST, config=config, competitors=())


def test_runs(
    experiment: Experiment, group: MethodGroup, selection: Selection, out: Path
) -> list[PlannedRun]:
    """Return the runs of the chosen configurations and of the references, seed by seed."""
    runs = validation_runs(experiment, group, selection)
    choices = choices_among([read_outcome(run, out) for run in runs])
    first = read_pinned(experiment.name)["first_test_seed"]
    lines = {
        run.label: run
        for target in TARGETS
        for method in group.methods
        for run in [choices.get((method, target))]
        if run
    }
    lines |= {run.label: run for run in runs if is_reference(run)}
    seeds = range(first, first + selection.seeds)
    return [on_test_data(run, seed) for seed in seeds for run in lines.values()]


def is_reference(run: PlannedRun) -> bool:
    """Whether a run has the settings that its method has in the other experiments."""
    return run.label in read_pinned("rivals")["references"]


def choices_among(outcomes: Sequence[Outcome]) -> dict[tuple[str, str], PlannedRun]:
    """Return the chosen validation run by method and target, where the choice is certain."""
    found = {}
    for target, levels in targets_of(outcomes).items():
        for method in dict.fromkeys(outcome.run.config.algorithm for outcome in outcomes):
            line = [o for o in outcomes if o.run.config.algorithm == method]
            best = best_of(line, levels.get(line[0].run.config.seed))
            if best is not None:
                found[method, target] = best.run
    return found


def targets_of(outcomes: Iterable[Outcome]) -> dict[str, dict[int, float]]:
    """Return the accuracy of each target by seed, as far as it is known."""
    found: dict[str, dict[int, float]] = {name: {} for name in TARGETS}
    for outcome in outcomes:
        seed = outcome.run.config.seed
        found["task"][seed] = outcome.run.target
        if outcome.run.label in found and is_complete(outcome) and outcome.history:
            found[outcome.run.label][seed] = max(accuracies(outcome))
    return found


def is_complete(outcome: Outcome) -> bool:
    """Whether a run has all its rounds, or diverged."""
    return outcome.diverged or len(outcome.history) >= outcome.run.config.rounds


def best_of(line: Sequence[Outcome], target: float | None) -> Outcome | None:
    """Return the configuration with the least uplink to a target; None if that is not known yet.

    Ties go to less traffic both ways, and then to the earlier configuration. If none reaches the
    target, the configuration with the highest accuracy is chosen.
    """
    if target is None:
        return None
    uplinks = [cost.up for outcome in line if (cost := cost_to_target(outcome, target))]
    least = min(uplinks, default=math.inf)
    if not all(is_settled(outcome, target, least) for outcome in line):
        return None
    return min(line, key=lambda outcome: rank_of(outcome, target))


def is_settled(outcome: Outcome, target: float, least: float) -> bool:
    """Whether more rounds cannot change that a run needs more than the least uplink, or not."""
    if is_complete(outcome) or cost_to_target(outcome, target) is not None:
        return True
    return bool(outcome.history) and megabytes(outcome.history[-1]) >= least


def rank_of(outcome: Outcome, target: float) -> tuple[float, float, float]:
    """Return what the outcomes of a line are sorted by; the best one comes first."""
    cost = cost_to_target(outcome, target)
    if cost is not None:
        return 0, cost.up, cost.both
    return 1, -max(accuracies(outcome), default=0.0), 0
