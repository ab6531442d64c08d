"""Show the rounds of a run and warn of a round that merged no update."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

from fedsift.cli.terminal import err
from fedsift.progress import Show, round_progress, times_fewer
from fedsift.progress.display import lines
from fedsift.runs.compare import dense_fedadam_bytes
from fedsift.runs.config import RunConfig


@contextmanager
def run_progress(config: RunConfig, parameters: int, finished: int = 0) -> Iterator[Show]:
    """Yield a function that shows a round's record; ``finished`` rounds are already done."""
    with ExitStack() as stack:
        displays = [stack.enter_context(d) for d in displays_of(config, parameters, finished)]
        has_warned = False

        def show(record: Mapping[str, Any]) -> None:
            nonlocal has_warned
            if record["round"] and not record["clients"] and not has_warned:
                err.print(empty_round(record), style="yellow", markup=False, highlight=False)
                has_warned = True
            for display in displays:
                display(record)

        yield show


def displays_of(
    config: RunConfig, parameters: int, finished: int
) -> Sequence[AbstractContextManager[Show]]:
    """Return a bar for a terminal on stderr, and lines for stdout if it is not a terminal."""
    name, rounds, is_log = config.algorithm, config.rounds, not sys.stdout.isatty()
    note = partial(fewer_than_dense, config, parameters)
    logs = [lines(name, rounds, sys.stdout)] if is_log else []
    if is_log and not err.is_terminal:
        return logs
    return [round_progress(name, rounds, finished, note=note), *logs]


def fewer_than_dense(config: RunConfig, parameters: int, record: Mapping[str, Any]) -> str:
    """Return how many times fewer bytes were sent than dense FedAdam would send."""
    dense = dense_fedadam_bytes(parameters, record["round"], config.clients, config.participation)
    return f"{times_fewer(record['uplink_bytes'], dense)} fewer than dense FedAdam"


def empty_round(record: Mapping[str, Any]) -> str:
    """Return a warning for a round that changed nothing.

    >>> empty_round({"round": 2, "problems": {"0": "a value is too large"}})
    'warning: round 2 merged no update: client 0: a value is too large'
    >>> empty_round({"round": 2, "problems": {}})
    'warning: round 2 merged no update: all were lost'
    """
    reasons = [f"client {client}: {why}" for client, why in record["problems"].items()]
    reason = reasons[0] if reasons else "all were lost"
    return f"warning: round {record['round']} merged no update: {reason}"
