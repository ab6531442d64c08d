"""The rounds of a simulation, one after another, as an iterator."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from fedsift.algorithms import fedadam_ssm, for_rounds
from fedsift.api.folder import FolderRun
from fedsift.api.identity import identity_of
from fedsift.api.result import Result
from fedsift.api.settings import settings_of
from fedsift.api.start import begin_run, check_start
from fedsift.errors import Diverged
from fedsift.federation.round import Federation
from fedsift.federation.snapshot import Snapshot
from fedsift.progress import Show, round_progress
from fedsift.runs.config import PythonConfig
from fedsift.simulation import Options, Record, check_algorithm, prepare, run_rounds
from fedsift.simulation.preparation import check_whole
from fedsift.task.labels import labels_of

OnRound = Callable[..., Any]
"""Called after each round with its record and the global model. Returning True stops the run."""


class InMemoryRun:
    """A run that leaves no files."""

    is_finished = False

    def __init__(
        self, federation: Federation, start: Result | Snapshot | None, rounds: int
    ) -> None:
        begun = begin_run(federation, start)
        self.history, self.snapshot = begun.history, begun.checkpoint.snapshot
        self._steps = run_rounds(federation, self.snapshot, rounds, begun.checkpoint.seconds)

    def __iter__(self) -> Iterator[tuple[Snapshot, Record]]:
        return self._steps

    def interruptible(self) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return nullcontext()

    def finish(self, snapshot: Snapshot, history: list[Record]) -> None:
        """Do nothing after the last round."""

    def close(self) -> None:
        """Do nothing."""


class Rounds(Iterator[tuple[Record, nn.Module, Snapshot]]):
    """The rounds of a simulation: an iterator of (record, model, snapshot).

    It may be left and continued. ``history`` has the records so far, and :attr:`result` is the
    result so far. A run with a folder keeps it locked until :meth:`close` or the last round.
    """

    def __init__(
        self,
        federation: Federation,
        settings: Mapping[str, Any],
        run: InMemoryRun | FolderRun,
        on_round: OnRound | None,
        show: AbstractContextManager[Show],
    ) -> None:
        self.federation, self.settings, self.on_round = federation, settings, on_round
        self.snapshot, self.history = run.snapshot, run.history
        self._run, self._steps, self._is_stopped = run, iter(run), False
        self._display = ExitStack()
        self._show = self._display.enter_context(show)

    def __next__(self) -> tuple[Record, nn.Module, Snapshot]:
        if not self.advance():
            raise StopIteration
        return self.history[-1], self.federation.trained_model(self.snapshot), self.snapshot

    def advance(self) -> bool:
        """Run the next round; return False if there is none, after finishing the run."""
        with self._run.interruptible():
            step = None if self._is_stopped else self._next_step()
            if step is not None:
                self._take(*step)
                return True
            self._run.finish(self.snapshot, self.history)
        self.close()
        return False

    def _next_step(self) -> tuple[Snapshot, Record] | None:
        """Run a round, if there is one left."""
        try:
            return next(self._steps, None)
        except Diverged as problem:
            raise Diverged(f"{problem}; try a smaller lr") from None

    def _take(self, snapshot: Snapshot, record: Record) -> None:
        """Take a finished round: record it, show it, and pass it to the user's function."""
        self.snapshot = snapshot
        self.history.append(record)
        self._show(record)
        if self.on_round is not None:
            answer = self.on_round(record, self.federation.trained_model(snapshot))
            self._is_stopped = is_true(answer)

    def close(self) -> None:
        """End the run where it is. A run with a folder is saved, and can be continued."""
        self._steps = iter(())
        self._display.close()
        self._run.close()

    @property
    def result(self) -> Result:
        """The result up to the last round."""
        task = self.federation.task
        weights = self.federation.model_weights(self.snapshot)
        labels = labels_of(task.clients) or ()
        return Result(
            self.snapshot, list(self.history), task.layout, weights, self.settings, labels
        )


def begin_rounds(given: Mapping[str, Any], is_shown: bool) -> Rounds:
    """Check the arguments of :func:`fedsift.simulate`, and return its rounds."""
    rounds, start, on_round = given["rounds"], given["start"], with_model(given["on_round"])
    keep = given["keep_checkpoints"]
    check_whole("rounds", rounds, at_least=1)
    check_whole("keep_checkpoints", keep, at_least=1)
    options = Options(**{field.name: given[field.name] for field in fields(Options)})
    if options.privacy:
        calibrated = options.privacy.calibrated(options.sampling_rate, rounds)
        options = replace(options, privacy=calibrated)
    algorithm = for_rounds(check_algorithm(given["algorithm"] or fedadam_ssm()), rounds)
    federation = prepare(given["model"], given["clients"], given["test"], algorithm, options)
    if start is not None:
        check_start(start, federation, rounds)
    if isinstance(start, Snapshot) and given["out"] is not None:
        raise ValueError("a run folder holds the whole history: pass a Result as start")
    settings = settings_of(federation, options, rounds)
    run: InMemoryRun | FolderRun
    if given["out"] is None:
        run = InMemoryRun(federation, start, rounds)
    else:
        settings |= identity_of(federation, start) | {"keep_checkpoints": keep}
        run = FolderRun(Path(given["out"]), PythonConfig(settings), federation, start)
    show = display(algorithm.name, rounds, run) if is_shown else nullcontext(show_nothing)
    return Rounds(federation, settings, run, on_round, show)


def display(name: str, rounds: int, run: InMemoryRun | FolderRun) -> AbstractContextManager[Show]:
    """Return the progress display of a run, unless it is finished."""
    if run.is_finished:
        return nullcontext(show_nothing)
    return round_progress(name, rounds, finished=run.snapshot.round)


def show_nothing(record: Mapping[str, Any]) -> None:
    """Do not show a record."""


def with_model(on_round: OnRound | None) -> OnRound | None:
    """Return a function of (record, model), also for one that takes only the record.

    >>> seen = []
    >>> with_model(seen.append)({"round": 1}, nn.Linear(1, 1))
    >>> seen
    [{'round': 1}]
    >>> with_model(lambda: None)
    Traceback (most recent call last):
    ...
    ValueError: on_round is called with (record, model), but this function takes ()
    """
    if on_round is None or accepts_arguments(on_round, 2):
        return on_round
    if not accepts_arguments(on_round, 1):
        raise ValueError(
            "on_round is called with (record, model), but this function takes "
            f"{inspect.signature(on_round)}"
        )
    return lambda record, model: on_round(record)


def accepts_arguments(function: Callable[..., Any], arguments: int) -> bool:
    """Whether a function can be called with this many arguments."""
    try:
        inspect.signature(function).bind(*range(arguments))
    except TypeError:
        return False
    except ValueError:  # the signature of a function written in C may be unknown
        return True
    return True


def is_true(answer: Any) -> bool:
    """Whether a function returned True, and not just anything that counts as true.

    >>> is_true(np.bool_(True)), is_true(None), is_true([1])
    (True, False, False)
    """
    return isinstance(answer, bool | np.bool_ | Tensor) and bool(answer)
