"""Execute planned runs. A finished run is not repeated; an interrupted one is continued."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import fields, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from fedsift.data import Dataset, load
from fedsift.data.folder import find_file
from fedsift.data.official_sources import SOURCES
from fedsift.errors import ConfigError, Diverged
from fedsift.reproduce.plan import PlannedRun, Selection
from fedsift.reproduce.updates import UPDATES, measure_updates
from fedsift.runs.compare import reached
from fedsift.runs.config import RunConfig, read_values
from fedsift.runs.disk import replace_file
from fedsift.runs.folder import RunFolder
from fedsift.runs.records import last_round
from fedsift.runs.run import federation_of, restore_run, run_summary, train_rounds
from fedsift.simulation import Record

DIVERGED = "diverged.txt"
"""File in the folder of a run whose training diverged, which counts as a result."""
OnRecord = Callable[[Record], None]


QUICK_TEST = 1000
"""Test samples of a quick run: on a CPU, testing a large model takes longer than its rounds."""


@lru_cache(maxsize=1)
def cached_dataset(name: str, quick: bool) -> Dataset:
    """Return a data set, and keep it for the next run."""
    dataset = load(name)
    x, y = dataset.test
    return replace(dataset, test=(x[:QUICK_TEST], y[:QUICK_TEST])) if quick else dataset


def unfinished_runs(
    runs: Sequence[PlannedRun],
    selection: Selection,
    out: Path,
    stop_at_target: bool,
    warn: Callable[[str], None],
) -> list[PlannedRun]:
    """Return the runs that still have to be executed.

    If no task was selected by name, tasks without data on this machine are skipped with a warning.
    """
    if selection.task is None:
        for task in dict.fromkeys(run.task for run in runs if not has_data(run.config.dataset)):
            warn(f"skipped {task}: its data is not on this machine")
        runs = [run for run in runs if has_data(run.config.dataset)]
    return [run for run in runs if not is_finished(run, out, stop_at_target)]


def has_data(dataset: str) -> bool:
    """Return whether a data set's files are on this machine.

    >>> has_data("digits")
    True
    """
    return dataset not in SOURCES or all(find_file(file.path) for file in SOURCES[dataset].files)


def require_executable(runs: Sequence[PlannedRun]) -> None:
    """Refuse runs without data on this machine, or with a device or precision that it lacks."""
    for dataset in {run.config.dataset for run in runs if not has_data(run.config.dataset)}:
        load(dataset)  # raises an error that names the command to get the data
    for run in runs[:1]:
        federation_of(run.config, cached_dataset(run.config.dataset, run.quick))


MAY_DIFFER = {"rounds", "device", "precision", "tensorboard", "keep_checkpoints", "num_workers"}
"""Settings in which a run may differ from the planned one."""


@cache
def defaults_of(algorithm: str) -> dict[str, Any]:
    """Return the defaults of the settings that every run has.

    Early runs lack settings that did not exist yet. A default does what fedsift did before.
    """
    values = RunConfig.from_values({"algorithm": algorithm}).flat()
    return {field.name: values[field.name] for field in fields(RunConfig) if field.name in values}


def require_same_settings(run: PlannedRun, folder: RunFolder) -> None:
    """Refuse a folder that holds a different run, such as the quick version of this one."""
    if not folder.config_file.exists():
        return
    recorded, planned = read_values(folder.config_file), run.config.flat()
    found = {**defaults_of(run.config.algorithm), **recorded}
    keys = sorted({*found, *planned} - MAY_DIFFER)
    differing = [key for key in keys if found.get(key) != planned.get(key)]
    if differing:
        raise ConfigError(
            f"{folder.path} holds a run with other settings ({', '.join(differing)}) than planned: "
            "give another --out, or delete it"
        )


def is_finished(run: PlannedRun, out: Path, stop_at_target: bool = False) -> bool:
    """Return whether a run has all its rounds or has diverged.

    With ``stop_at_target``, a run that need not continue is finished, too.
    """
    folder = RunFolder(out / run.path)
    require_same_settings(run, folder)
    if run.measures_updates:
        return (folder.path / UPDATES).exists()
    if (folder.path / DIVERGED).exists():
        return True
    history = folder.history()
    has_ended = last_round(history) >= run.config.rounds or (
        stop_at_target and may_stop(run, history, least_uplink(run, out))
    )
    return has_ended and folder.summary_file.exists()


def may_stop(run: PlannedRun, history: Sequence[Record], least: float) -> bool:
    """Return whether a run has reached its target, or sent at least what a competitor needed."""
    if reached(history, run.target) is not None:
        return True
    return bool(history) and history[-1]["uplink_bytes"] >= least


def least_uplink(run: PlannedRun, out: Path) -> float:
    """Return the fewest bytes that a finished competitor needed to the target of a run."""
    histories = [RunFolder(out / path).history() for path in run.competitors if path != run.path]
    hits = [hit for history in histories if (hit := reached(history, run.target))]
    return min((hit["uplink_bytes"] for hit in hits), default=math.inf)


def execute_run(
    run: PlannedRun, out: Path, on_record: OnRecord, stop_at_target: bool = False
) -> None:
    """Execute a run, from its start or from its last checkpoint to its end."""
    if run.measures_updates:
        dataset = cached_dataset(run.config.dataset, run.quick)
        measure_updates(run, dataset, out / run.path, on_record)
    else:
        train_run(run, out, on_record, stop_at_target)


def train_run(run: PlannedRun, out: Path, on_record: OnRecord, stop_at_target: bool) -> None:
    """Train the remaining rounds of a run, and write the summary of all rounds."""
    federation = federation_of(run.config, cached_dataset(run.config.dataset, run.quick))
    folder = RunFolder.create_or_extend(out / run.path, run.config)
    with folder.locked():
        start = restore_run(folder, federation)
        history, least = start.history, least_uplink(run, out)
        try:
            with closing(train_rounds(folder, federation, start, run.config.rounds)) as records:
                for record in records:
                    history.append(record)
                    on_record(record)
                    if stop_at_target and may_stop(run, history, least):
                        break
        except Diverged as problem:
            replace_file(folder.path / DIVERGED, f"{problem}\n".encode())
        if last_round(history):
            trained = replace(run.config, rounds=last_round(history))
            folder.write_summary(run_summary(trained, federation, history))
        # These files can take gigabytes, and no table or figure needs them.
        for file in (folder.checkpoint_file, folder.memory_file, folder.model_file):
            file.unlink(missing_ok=True)
