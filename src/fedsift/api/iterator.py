"""The rounds of a simulation, one after another, as an iterator."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any

import numpy as np
from torch import Tensor, nn

from fedsift.algorithms import fedadam_ssm, for_rounds
from fedsift.api.result import Result
from fedsift.api.settings import settings_of
from fedsift.federation.round import Federation
from fedsift.federation.snapshot import Snapshot
from fedsift.runs.uploads import labels_of
from fedsift.simulation import (
    Options,
    Record,
    check_algorithm,
    initial_record,
    initial_snapshot,
    prepare,
    run_rounds,
)
from fedsift.simulation.preparation import check_whole

OnRound = Callable[..., Any]
"""Called after each round with its record and the global model. Returning True stops the run."""
Steps = Iterator[tuple[Snapshot, Record]]


class Rounds(Iterator[tuple[Record, nn.Module, Snapshot]]):
    """The rounds of a simulation: an iterator of (record, model, snapshot).

    It may be left and continued. ``history`` has the records so far, and :attr:`result` is the
    result so far.
    """

    def __init__(
        self,
        federation: Federation,
        settings: Mapping[str, Any],
        snapshot: Snapshot,
        history: list[Record],
        steps: Steps,
        on_round: OnRound | None,
    ) -> None:
        self.federation, self.settings, self.on_round = federation, settings, on_round
        self.snapshot, self.history, self._steps = snapshot, history, steps
        self.is_stopped = False

    def __next__(self) -> tuple[Record, nn.Module, Snapshot]:
        if not self.advance():
            raise StopIteration
        return self.history[-1], self.federation.trained_model(self.snapshot), self.snapshot

    def advance(self) -> bool:
        """Run the next round; return False if there is none."""
        if self.is_stopped:
            return False
        try:
            self.snapshot, record = next(self._steps)
        except StopIteration:
            return False
        self.history.append(record)
        if self.on_round is not None:
            answer = self.on_round(record, self.federation.trained_model(self.snapshot))
            self.is_stopped = is_true(answer)
        return True

    @property
    def result(self) -> Result:
        """The result up to the last round."""
        task = self.federation.task
        weights = self.federation.model_weights(self.snapshot)
        labels = labels_of(task) or ()
        return Result(
            self.snapshot, list(self.history), task.layout, weights, self.settings, labels
        )


def begin(given: Mapping[str, Any]) -> Rounds:
    """Check the arguments of :func:`fedsift.simulate`, and return its rounds."""
    rounds, on_round = given["rounds"], with_model(given["on_round"])
    check_whole("rounds", rounds, at_least=1)
    options = Options(**{field.name: given[field.name] for field in fields(Options)})
    algorithm = for_rounds(check_algorithm(given["algorithm"] or fedadam_ssm()), rounds)
    federation = prepare(given["model"], given["clients"], given["test"], algorithm, options)
    settings = settings_of(federation, options, rounds)
    start = initial_snapshot(federation)
    history = [initial_record(federation, start)]
    return Rounds(
        federation, settings, start, history, run_rounds(federation, start, rounds), on_round
    )


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
    if on_round is None or takes(on_round, 2):
        return on_round
    if not takes(on_round, 1):
        raise ValueError(
            "on_round is called with (record, model), but this function takes "
            f"{inspect.signature(on_round)}"
        )
    return lambda record, model: on_round(record)


def takes(function: Callable[..., Any], arguments: int) -> bool:
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
