"""Execute many planned runs, one after another or in parallel processes.

A small model leaves most of a GPU idle, so four runs at once take little longer than one.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.synchronize import Event
from pathlib import Path

from fedsift.reproduce.plan import PlannedRun
from fedsift.reproduce.runner import DIVERGED, execute_run
from fedsift.runs.folder import RunFolder
from fedsift.simulation import Record

OnRunRecord = Callable[[PlannedRun, Record], None]


@dataclass(frozen=True)
class BatchOptions:
    """Where the runs are written, when they stop, and how many run at once.

    ``deadline`` is a value of ``time.monotonic()``.
    """

    out: Path
    stop_at_target: bool = False
    deadline: float = math.inf
    jobs: int = 1

    def __post_init__(self) -> None:
        if self.jobs < 1:
            raise ValueError(f"jobs must be at least 1, got {self.jobs}")


@dataclass(frozen=True)
class RunStatus:
    """How a run ended, in words. An unfinished run was stopped and can be continued."""

    text: str
    has_failed: bool = False
    is_unfinished: bool = False


class StoppedEarly(Exception):
    """The deadline has passed, or the user pressed Ctrl-C."""


def unique_runs(runs: Iterable[PlannedRun]) -> list[PlannedRun]:
    """Return each run once; of runs that experiments share, the one with the most rounds."""
    unique: dict[Path, PlannedRun] = {}
    for run in runs:
        known = unique.setdefault(run.path, run)
        if run.config.rounds > known.config.rounds:
            unique[run.path] = run
    return list(unique.values())


def execute_runs(
    runs: Sequence[PlannedRun],
    options: BatchOptions,
    on_record: OnRunRecord = lambda run, record: None,
) -> Iterator[tuple[PlannedRun, RunStatus]]:
    """Execute the runs, and yield each with its status when it ends.

    A run that fails does not stop the others. ``on_record`` is called after every round,
    but only with ``jobs=1``.
    """
    if options.jobs == 1:
        for run in runs:
            yield run, _run_status(run, options, on_record)
        return
    context = get_context("spawn")
    stop = context.Event()
    pool = ProcessPoolExecutor(options.jobs, context, initializer=_start_worker, initargs=(stop,))
    try:
        futures = {pool.submit(_run_status, run, options): run for run in runs}
        for future in as_completed(futures):
            yield futures[future], _future_status(future)
    finally:  # also after Ctrl-C: active runs stop after their round, and no other run starts
        stop.set()
        pool.shutdown(cancel_futures=True)


_stop_events: list[Event] = []
"""In a worker process: the event that is set when the worker has to stop."""


def _start_worker(stop: Event) -> None:
    """Ignore Ctrl-C in a worker process; the main process receives it and sets ``stop``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _stop_events.append(stop)


def _future_status(future: Future[RunStatus]) -> RunStatus:
    """Return a run's status, even if a worker was killed, which breaks the whole pool."""
    try:
        return future.result()
    except BrokenProcessPool:
        return RunStatus("FAILED: this run's process or a parallel one was killed", has_failed=True)


def _run_status(
    run: PlannedRun, options: BatchOptions, on_record: OnRunRecord | None = None
) -> RunStatus:
    """Execute a run and return its status. Every error becomes a status."""

    def check(record: Record | None = None) -> None:
        if record is not None and on_record is not None:
            on_record(run, record)
        if time.monotonic() >= options.deadline or any(stop.is_set() for stop in _stop_events):
            raise StoppedEarly

    try:
        check()
        execute_run(run, options.out, check, options.stop_at_target)
    except StoppedEarly:
        return RunStatus("stopped early", is_unfinished=True)
    except Exception as problem:
        text = f"FAILED: {type(problem).__name__}: {' '.join(str(problem).split())}"
        return RunStatus(text, has_failed=True)
    return RunStatus(_result_text(run, RunFolder(options.out / run.path)))


def _result_text(run: PlannedRun, folder: RunFolder) -> str:
    """Describe the result of a finished run."""
    if run.measures_updates:
        return "measured"
    if (folder.path / DIVERGED).exists():
        return "diverged"
    last = "{round} rounds, accuracy {accuracy:.4f}, {seconds:.1f} s"
    return last.format(**folder.history()[-1])
