"""Many planned runs, one after another or several side by side in processes of their own.

A small model leaves most of a GPU idle, so that four runs at once take little longer than one.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.synchronize import Event
from pathlib import Path

from fedsift.reproduce.pins import Planned
from fedsift.reproduce.runner import DIVERGED, carry_out
from fedsift.runs.folder import RunFolder
from fedsift.simulation import Record


@dataclass(frozen=True)
class How:
    """Where the runs go, when each may end, when all must, and how many run at once."""

    out: Path
    stop_at_target: bool = False
    until: float = math.inf
    jobs: int = 1

    def __post_init__(self) -> None:
        if self.jobs < 1:
            raise ValueError(f"jobs must be at least 1, got {self.jobs}")


@dataclass(frozen=True)
class End:
    """How a run ended."""

    words: str
    has_failed: bool = False
    is_cut_off: bool = False


class TimeIsUp(Exception):
    """The time that was given is over, or somebody wants an end."""


def carried_out(runs: Sequence[Planned], how: How) -> Iterator[tuple[Planned, End]]:
    """Each run with its end, as they end."""
    if how.jobs == 1:
        for run in runs:
            yield run, one(run, how)
        return
    context = get_context("spawn")
    stop = context.Event()
    pool = ProcessPoolExecutor(how.jobs, context, initializer=obey, initargs=(stop,))
    try:
        ends = {pool.submit(one, run, how): run for run in runs}
        for end in as_completed(ends):
            yield ends[end], end_of(end)
    finally:  # also on Ctrl-C: what is at work ends with its round, and nothing new begins
        stop.set()
        pool.shutdown(cancel_futures=True)


orders: list[Event] = []
"""Of a process in the pool: set when it is to stop."""


def obey(stop: Event) -> None:
    """Let the first process alone hear of Ctrl-C, and do what it says."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    orders.append(stop)


def end_of(run: Future[End]) -> End:
    """How a run ended, even if its process was killed, which ends the others' too."""
    try:
        return run.result()
    except BrokenProcessPool:
        return End("FAILED: a process was killed, of this run or beside it", has_failed=True)


def one(run: Planned, how: How) -> End:
    """A run and its end: whatever goes wrong in it, the others are not to blame."""

    def watch(record: Record | None = None) -> None:
        if time.monotonic() >= how.until or any(stop.is_set() for stop in orders):
            raise TimeIsUp

    try:
        watch()
        carry_out(run, how.out, watch, how.stop_at_target)
    except TimeIsUp:
        return End("cut off", is_cut_off=True)
    except Exception as problem:
        words = f"FAILED: {type(problem).__name__}: {' '.join(str(problem).split())}"
        return End(words, has_failed=True)
    return End(in_words(run, RunFolder(how.out / run.path)))


def in_words(run: Planned, folder: RunFolder) -> str:
    """What a finished run came to."""
    if run.measures_updates:
        return "measured"
    if (folder.path / DIVERGED).exists():
        return "diverged"
    last = "{round} rounds, accuracy {accuracy:.4f}, {seconds:.1f} s"
    return last.format(**folder.history()[-1])
