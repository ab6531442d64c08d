"""Carry out planned runs. It can be done in pieces: what is finished is not done again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from fedsift.data import Dataset, load
from fedsift.data.folder import find
from fedsift.data.official_sources import SOURCES
from fedsift.errors import ConfigError, Diverged
from fedsift.reproduce.pins import Pin, Planned, Wanted, plan
from fedsift.reproduce.updates import UPDATES, measure
from fedsift.runs.compare import reached
from fedsift.runs.config import (
    read_values,
)
from fedsift.runs.disk import replace_file
from fedsift.runs.folder import RunFolder
from fedsift.runs.run import begin, federation_of, go, summarize
from fedsift.simulation import Record

DIVERGED = "diverged.txt"
"""In a run's folder if its training left the finite numbers: that is a result, too."""
Watch = Callable[[Record], None]


QUICK_TEST = 1000
"""Test samples of a quick run: on a CPU, the test of a large model takes longer than its rounds."""


@lru_cache(maxsize=1)
def loaded(name: str, quick: bool) -> Dataset:
    """A data set, kept for the next run."""
    dataset = load(name)
    x, y = dataset.test
    return replace(dataset, test=(x[:QUICK_TEST], y[:QUICK_TEST])) if quick else dataset


def to_do(
    pin: Pin, wanted: Wanted, out: Path, stop_at_target: bool, say: Callable[[str], None]
) -> list[Planned]:
    """The runs that are not done; tasks that nobody asked for by name need their data here."""
    runs = plan(pin, wanted)
    if wanted.task is None:
        for task in dict.fromkeys(run.task for run in runs if not is_here(run.config.dataset)):
            say(f"{task} is left out: its data is not here")
        runs = [run for run in runs if is_here(run.config.dataset)]
    return [run for run in runs if not is_done(run, out, stop_at_target)]


def is_here(dataset: str) -> bool:
    """Whether a data set's files are on this machine.

    >>> is_here("digits")
    True
    """
    return dataset not in SOURCES or all(find(file.path) for file in SOURCES[dataset].files)


MAY_DIFFER = {"rounds", "device", "precision", "tensorboard"}
"""Settings that a run may have otherwise than planned, and still be that run."""


def require_same(run: Planned, folder: RunFolder) -> None:
    """Refuse a folder of another run: of the quick one, say, or of another fedsift's defaults."""
    if not folder.config_file.exists():
        return
    found, planned = read_values(folder.config_file), run.config.flat()
    keys = sorted({*found, *planned} - MAY_DIFFER)
    other = [key for key in keys if found.get(key) != planned.get(key)]
    if other:
        raise ConfigError(
            f"{folder.path} holds a run with other settings ({', '.join(other)}) than planned: "
            "give another --out, or delete it"
        )


def is_done(run: Planned, out: Path, stop_at_target: bool = False) -> bool:
    """Whether a run has its rounds, has diverged or, if that is enough, has reached its target."""
    folder = RunFolder(out / run.path)
    require_same(run, folder)
    if run.measures_updates:
        return (folder.path / UPDATES).exists()
    if (folder.path / DIVERGED).exists():
        return True
    history = folder.history()
    has_ended = len(history) >= run.config.rounds or (
        stop_at_target and reached(history, run.target) is not None
    )
    return has_ended and folder.summary_file.exists()


def carry_out(run: Planned, out: Path, watch: Watch, stop_at_target: bool = False) -> None:
    """Play a run from its start, or from where it was stopped, to its end."""
    if run.measures_updates:
        measure(run, loaded(run.config.dataset, run.quick), out / run.path, watch)
    else:
        play_run(run, out, watch, stop_at_target)


def play_run(run: Planned, out: Path, watch: Watch, stop_at_target: bool) -> None:
    """Every round that is still to play, and the summary of all."""
    federation = federation_of(run.config, loaded(run.config.dataset, run.quick))
    folder = RunFolder.create_or_extend(out / run.path, run.config)
    with folder.locked():
        start = begin(folder, federation)
        history = start.history
        try:
            with closing(go(folder, federation, start, run.config.rounds)) as new:
                for record in new:
                    history.append(record)
                    watch(record)
                    if stop_at_target and reached(history, run.target):
                        break
        except Diverged as problem:
            replace_file(folder.path / DIVERGED, f"{problem}\n".encode())
        if history:
            played = replace(run.config, rounds=len(history))
            folder.finish(summarize(played, federation, history))
        # They can take gigabytes, and a table or a figure needs none of them.
        for file in (folder.checkpoint_file, folder.memory_file, folder.model_file):
            file.unlink(missing_ok=True)
