"""The runs of an experiment that a user selects, each with its complete configuration."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedsift.reproduce.experiments import Experiment, read_pinned, split_names, task_names
from fedsift.runs.compare import config_of
from fedsift.runs.config import RunConfig


@dataclass(frozen=True)
class Selection:
    """The part of an experiment to run. None takes the value from the pinned file.

    ``task`` may hold several names, separated by commas. A name in ``methods`` is an algorithm,
    which selects all of its lines, or the label of one line, such as ``fedsgd@lr=0.1``.
    """

    task: str | None = None
    setting: str | None = None
    methods: tuple[str, ...] = ()
    seeds: int = 3
    rounds: int | None = None
    quick: bool = False
    device: str = "auto"
    precision: str = "fp32"


@dataclass(frozen=True)
class PlannedRun:
    """One run of an experiment. Runs that experiments share have the same path.

    ``part`` is the folder of the experiment's own runs, for those that no other one shares. Of the
    ``competitors``, paths of runs with other settings, the one with the least uplink to the target
    is chosen; so a run may end when it has sent more.
    """

    task: str
    setting: str
    label: str
    config: RunConfig
    target: float
    measures_updates: bool = False
    quick: bool = False
    part: str = ""
    competitors: tuple[Path, ...] = ()

    @property
    def path(self) -> Path:
        """The run's folder, relative to the folder of all runs."""
        folder = "updates" if self.measures_updates else self.label
        return Path(self.part, self.task, self.setting, folder, f"seed-{self.config.seed}")


def plan(experiment: Experiment, selection: Selection) -> list[PlannedRun]:
    """Return the selected runs of an experiment; the seeds of a line are adjacent.

    >>> selection = Selection(task="cnn-fashion-mnist", setting="iid", seeds=1)
    >>> [run.label for run in plan(Experiment.load("fig5"), selection)]
    ['fedadam-ssm@local_steps=3', 'fedadam-ssm@local_steps=10', 'fedadam-ssm', \
'fedadam-ssm@local_steps=100']
    """
    if selection.seeds < 1:
        raise ValueError(f"seeds must be at least 1, got {selection.seeds}")
    runs = [
        replace(run, measures_updates=experiment.kind == "updates")
        for task in selected_tasks(experiment, selection)
        for setting in selected_settings(experiment, selection)
        for line in experiment.lines
        for run in line_runs(task, setting, line, selection, range(selection.seeds))
    ]
    require_known_methods(runs, selection.methods)
    return [run for run in runs if is_chosen(run, selection.methods)]


def selected_tasks(experiment: Experiment, selection: Selection) -> tuple[str, ...]:
    """Return the tasks that are selected, or all of them."""
    if selection.task is None:
        return experiment.tasks
    tasks = split_names(selection.task)
    for name in tasks:
        if name in task_names() and name not in experiment.tasks:
            known = ", ".join(experiment.tasks)
            raise ValueError(f"{experiment.name} has no task {name!r}; choose one of: {known}")
    _require_known("task", tasks, experiment.tasks)
    return tasks


def selected_settings(experiment: Experiment, selection: Selection) -> tuple[str, ...]:
    """Return the settings that are selected, or all of them."""
    if selection.setting is None:
        return experiment.settings
    _require_known("setting", split_names(selection.setting), ("iid", "noniid"))
    # Fig. 4 compares the settings, so it always has all of them.
    return experiment.settings if experiment.kind == "settings" else split_names(selection.setting)


def require_known_methods(runs: Iterable[PlannedRun], methods: Iterable[str]) -> None:
    """Raise ValueError if a name is neither an algorithm nor a line of these runs."""
    names = [name for run in runs for name in (run.config.algorithm, run.label)]
    _require_known("method", methods, dict.fromkeys(names))


def is_chosen(run: PlannedRun, methods: Sequence[str]) -> bool:
    """Return whether the algorithm or the line of a run is selected."""
    return not methods or run.config.algorithm in methods or run.label in methods


def _require_known(kind: str, names: Iterable[str], known: Iterable[str]) -> None:
    known = list(known)
    for name in names:
        if name not in known:
            raise ValueError(f"unknown {kind} {name!r}; choose one of: {', '.join(known)}")


def line_runs(
    task: str, setting: str, line: Mapping[str, Any], selection: Selection, seeds: Iterable[int]
) -> Iterator[PlannedRun]:
    """Yield the runs of a line: one method with its settings, on one task and setting."""
    algorithm, own = line["algorithm"], {k: v for k, v in line.items() if k != "algorithm"}
    values = _values(task, setting, algorithm, selection)
    target = values.pop("target")
    defaults = config_of(algorithm, values).flat()
    unusual = {k: v for k, v in own.items() if defaults[k] != v and k != "rounds"}
    rounds = {} if selection.rounds is None else {"rounds": selection.rounds}
    label = _label(algorithm, unusual)
    for seed in seeds:
        config = config_of(algorithm, values | own | rounds | {"seed": seed})
        yield PlannedRun(task, setting, label, config, target, quick=selection.quick)


def _label(algorithm: str, unusual: Mapping[str, Any]) -> str:
    settings = ",".join(f"{key}={value}" for key, value in unusual.items())
    return f"{algorithm}@{settings}" if settings else algorithm


def _values(task: str, setting: str, algorithm: str, selection: Selection) -> dict[str, Any]:
    """Return a method's settings on a task, with the rounds and target of the setting."""
    pinned = read_pinned("tasks")
    layers = [pinned["tasks"][task]]
    if selection.quick:
        layers.append(pinned["tasks"][task]["quick"])
    values: dict[str, Any] = {"device": selection.device, "precision": selection.precision}
    tables = ("methods", "quick", "settings")
    for layer in layers:
        values |= {key: value for key, value in layer.items() if key not in tables}
    for layer in layers:
        values |= layer.get("methods", {}).get(algorithm, {})
    for key in ("rounds", "target"):
        if isinstance(values[key], Mapping):  # by setting; Fig. 4's other settings are non-IID
            values[key] = values[key].get(setting, values[key]["noniid"])
    task_setting = layers[0].get("settings", {}).get(setting, {})
    return {**values, **pinned["settings"][setting], **task_setting}
