"""The rounds of a simulation, one after another, as an iterator."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterator, Mapping
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
from fedsift.simulation import Options, Record, check_algorithm, initial_snapshot, prepare
from fedsift.simulation.loop import run_with_initial
from fedsift.simulation.preparation import check_whole

OnRound = Callable[[Record, nn.Module], Any]
"""Called after each round with its record and the global model. Returning True stops the run."""
Steps = Generator[tuple[Snapshot, Record], None, None]


class Rounds(Iterator[tuple[Record, nn.Module, Snapshot]]):
    """The rounds of a simulation: an iterator of (record, model, snapshot).

    It may be left and continued. ``history`` has the records so far, and :attr:`result` is the
    result so far.
    """

    def __init__(
        self,
        federation: Federation,
        steps: Steps,
        settings: Mapping[str, Any],
        history: list[Record],
        on_round: OnRound | None,
    ) -> None:
        self.federation, self.settings, self.on_round = federation, settings, on_round
        self.history, self._steps = history, steps
        self.is_stopped = False
        self.snapshot, first = next(steps)
        self.history.append(first)

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
    rounds, on_round = given["rounds"], given["on_round"]
    check_whole("rounds", rounds, at_least=1)
    check_on_round(on_round)
    options = Options(**{field.name: given[field.name] for field in fields(Options)})
    algorithm = for_rounds(check_algorithm(given["algorithm"] or fedadam_ssm()), rounds)
    federation = prepare(given["model"], given["clients"], given["test"], algorithm, options)
    settings = settings_of(federation, options, rounds)
    steps = run_with_initial(federation, initial_snapshot(federation), rounds)
    return Rounds(federation, steps, settings, [], on_round)


def check_on_round(on_round: OnRound | None) -> None:
    """Raise ValueError unless a function can be called with a record and a model."""
    if on_round is None:
        return
    try:
        signature = inspect.signature(on_round)
    except (TypeError, ValueError):  # not a function, or one written in C
        signature = None
    try:
        if signature is not None:
            signature.bind(None, None)
    except TypeError:
        raise ValueError(
            f"on_round is called with (record, model); {on_round!r} takes {signature}"
        ) from None


def is_true(answer: Any) -> bool:
    """Whether a function returned True, and not just anything that counts as true.

    >>> is_true(np.bool_(True)), is_true(None), is_true([1])
    (True, False, False)
    """
    return isinstance(answer, bool | np.bool_ | Tensor) and bool(answer)
