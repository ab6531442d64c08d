"""The results of tuned methods: traffic and time to three targets, and accuracy within a budget."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fedsift.federation.cohort import cohort_size
from fedsift.reproduce.experiments import Experiment, read_pinned
from fedsift.reproduce.plan import Selection
from fedsift.reproduce.results import Outcome, environments, read_outcome
from fedsift.reproduce.rivals import (
    TARGETS,
    MethodGroup,
    choices_among,
    groups_of,
    is_complete,
    is_reference,
    on_test_data,
    targets_of,
    validation_runs,
)
from fedsift.reproduce.rows import mean
from fedsift.reproduce.traffic import Cost, accuracies, cost_to_target
from fedsift.runs.compare import megabytes
from fedsift.runs.config import RunConfig

Row = dict[str, Any]
PLACES = ("device", "precision", "commit")


@dataclass(frozen=True)
class Entry:
    """A row of a table: a method with the settings chosen for each target, or a reference.

    ``lines`` has the label of the configuration by target, where it is known.
    """

    method: str
    is_tuned: bool
    lines: Mapping[str, str]


@dataclass(frozen=True)
class TunedRuns:
    """All runs on a task and setting; ``tests`` has the seeds of each line by label."""

    group: MethodGroup
    validation: Sequence[Outcome]
    tests: Mapping[str, Sequence[Outcome]]

    @cached_property
    def levels(self) -> dict[str, dict[int, float]]:
        """The accuracy of each target by seed of the test runs."""
        return targets_of(outcome for line in self.tests.values() for outcome in line)

    @cached_property
    def entries(self) -> list[Entry]:
        """Every method, then the references; a method without a choice has no lines."""
        choices = choices_among(self.validation)
        tuned = [
            Entry(name, True, {t: choices[name, t].label for t in TARGETS if (name, t) in choices})
            for name in self.group.methods
        ]
        references = read_pinned("rivals")["references"]
        return tuned + [Entry(name, False, dict.fromkeys(TARGETS, name)) for name in references]

    def accuracy_of(self, target: str) -> float | None:
        """Return the accuracy of a target as the mean over the seeds of the test runs, if known."""
        if target == "task":
            return self.validation[0].run.target
        return mean(list(self.levels[target].values()))

    def chosen_for(self, label: str) -> list[str]:
        """Return the targets for which a configuration was chosen."""
        tuned = [entry for entry in self.entries if entry.is_tuned]
        return [t for t in TARGETS if any(entry.lines.get(t) == label for entry in tuned)]


def read_comparisons(experiment: Experiment, selection: Selection, out: Path) -> list[TunedRuns]:
    """Return every task and setting that has runs in a folder."""
    every = Selection(rounds=selection.rounds, quick=selection.quick)
    found = (read_comparison(experiment, g, every, out) for g in whole_groups(experiment, every))
    return [comparison for comparison in found if any(o.history for o in comparison.validation)]


def whole_groups(experiment: Experiment, selection: Selection) -> list[MethodGroup]:
    """Return one group for each task and setting, with all its methods."""
    methods: dict[tuple[str, str], list[str]] = {}
    for group in groups_of(experiment, selection):
        known = methods.setdefault((group.task, group.setting), [])
        known += [name for name in group.methods if name not in known]
    return [MethodGroup(*key, tuple(names)) for key, names in methods.items()]


def read_comparison(
    experiment: Experiment, group: MethodGroup, selection: Selection, out: Path
) -> TunedRuns:
    """Return the runs of a task and setting; test runs of the chosen settings alone."""
    runs = validation_runs(experiment, group, selection)
    validation = [read_outcome(run, out) for run in runs]
    lines = [*choices_among(validation).values(), *filter(is_reference, runs)]
    tests = {}
    for run in {run.label: run for run in lines}.values():
        folder = (out / on_test_data(run, 0).path).parent
        seeds = sorted(int(path.name.removeprefix("seed-")) for path in folder.glob("seed-*"))
        outcomes = [read_outcome(on_test_data(run, seed), out) for seed in seeds]
        tests[run.label] = [outcome for outcome in outcomes if outcome.history]
    return TunedRuns(group, validation, tests)


def summarize_rivals(comparisons: Sequence[TunedRuns]) -> list[Row]:
    """Return a row for each task, setting, method and target."""
    rows = [row for comparison in comparisons for row in summaries(comparison)]
    tuned = {row_key(row): row["up"] for row in rows if row["tuned"]}
    for row in rows:
        ssm = tuned.get(row_key({**row, "method": "fedadam-ssm"}))
        row["ratio"] = ssm / row["up"] if ssm and row["up"] else None
    return rows


def row_key(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what a row is about."""
    return tuple(row[name] for name in ("task", "setting", "method", "target"))


def summaries(comparison: TunedRuns) -> Iterator[Row]:
    """Yield the rows of a task and setting."""
    for target in TARGETS:
        for entry in comparison.entries:
            yield summary_of(comparison, entry, target)


def summary_of(comparison: TunedRuns, entry: Entry, target: str) -> Row:
    """Return the means over the seeds of a method, and their range; None if there are no runs."""
    group, label = comparison.group, entry.lines.get(target)
    levels = comparison.levels[target]
    seeds = comparison.tests.get(label or "", ())
    line = [outcome for outcome in seeds if outcome.run.config.seed in levels]
    hits = [cost_to_target(o, levels[o.run.config.seed]) for o in line]
    costs = [cost for cost in hits if cost]
    whole = [is_complete(outcome) for outcome in line]
    return {
        "task": group.task,
        "setting": group.setting,
        "method": entry.method,
        "tuned": entry.is_tuned,
        "target": target,
        "line": label,
        "accuracy": comparison.accuracy_of(target),
        "seeds": [outcome.run.config.seed for outcome in line],
        "reached": len(costs),
        **statistics(costs if len(costs) == len(line) else []),
        **times(line, costs),
        "best_accuracy": mean([max(accuracies(o)) for o in line]) if all(whole) else None,
        "final_accuracy": mean([accuracies(o)[-1] for o in line]) if all(whole) else None,
        "within": within_budgets(line) if target == "task" else {},
        "environment": environments(line),
    }


def statistics(costs: Sequence[Cost]) -> Row:
    """Return the means of the costs of all seeds in MB, and the ranges of what is sent."""
    found: Row = {}
    for name in ("round", "up", "down", "both"):
        values = [float(getattr(cost, name)) for cost in costs]
        found[name] = mean(values)
        if name in ("up", "both"):
            found[f"{name}_range"] = [min(values), max(values)] if values else None
    return found


def times(line: Sequence[Outcome], costs: Sequence[Cost]) -> Row:
    """Return the mean seconds to a target on each link; None unless all seeds reached it."""
    pairs = list(zip(line, costs, strict=True)) if len(costs) == len(line) else []
    return {
        f"seconds_{link:g}_mbit": mean([seconds_to(o.run.config, cost, link) for o, cost in pairs])
        for link in read_pinned("rivals")["time"]["links"]
    }


def seconds_to(config: RunConfig, cost: Cost, mbit: float) -> float:
    """Return the time of a client that takes part in every round: to compute, send and receive.

    The uplink is a mean over all clients, and so less than what such a client sends.
    """
    share = cohort_size(config.participation, config.clients) / config.clients
    per_gradient = read_pinned("rivals")["time"]["seconds_per_gradient"][config.model]
    compute = cost.round * gradients_per_round(config) * per_gradient
    return float(compute + 8 * (cost.up / share + cost.down) / mbit)


def gradients_per_round(config: RunConfig) -> float:
    """Return a client's work in a round, in gradients of a mini-batch.

    A gradient counts as three forward passes. E-3SFC's search takes second derivatives of a single
    sample, which count as three gradients of it.
    """
    settings = config.flat()
    steps = settings.get("local_steps", 1)
    if "perturbations" in settings:
        return float(steps * 2 * settings["perturbations"] / 3)
    return float(steps + 3 * settings.get("sample_steps", 0) / config.batch_size)


def within_budgets(line: Sequence[Outcome]) -> dict[str, float | None]:
    """Return the mean accuracy after the last round within each budget of uplink, in MB."""
    if not line:
        return {}
    budgets = read_pinned("rivals")["budgets"][line[0].run.config.model]
    return {f"{budget:g}": mean([accuracy_within(o, budget) for o in line]) for budget in budgets}


def accuracy_within(outcome: Outcome, budget: float) -> float | None:
    """Return a run's accuracy after the last round within a budget.

    None if there is no such round, or if the run ended early and might have had further ones.
    """
    known = [record for record in outcome.history if megabytes(record) <= budget]
    may_continue = len(known) == len(outcome.history) and not is_complete(outcome)
    return None if may_continue or not known else float(known[-1]["accuracy"] or 0)


def run_rows(comparisons: Sequence[TunedRuns]) -> list[Row]:
    """Return a row for each run, first those on validation data."""
    return [
        row_of_run(comparison, outcome, levels)
        for comparison in comparisons
        for levels, outcomes in (
            (targets_of(comparison.validation), comparison.validation),
            (comparison.levels, [o for line in comparison.tests.values() for o in line]),
        )
        for outcome in outcomes
        if outcome.history
    ]


def row_of_run(
    comparison: TunedRuns, outcome: Outcome, levels: Mapping[str, Mapping[int, float]]
) -> Row:
    """Return what a run needed to each target, and where it ran."""
    run, found = outcome.run, accuracies(outcome)
    row: Row = {
        "task": run.task,
        "setting": run.setting,
        "data": "validation" if run.config.validation else "test",
        "line": run.label,
        "seed": run.config.seed,
        "chosen_for": comparison.chosen_for(run.label),
        "rounds": len(found),
        "is_complete": is_complete(outcome),
        "best_accuracy": max(found),
        "final_accuracy": found[-1],
    }
    for target in TARGETS:
        level = levels[target].get(run.config.seed)
        cost = cost_to_target(outcome, level)
        row[f"{target}_target"] = level
        for name in ("round", "up", "down"):
            row[f"{target}_{name}"] = cost and round(getattr(cost, name), 7)
    return row | {name: outcome.environment.get(name) for name in PLACES}
