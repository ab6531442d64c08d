"""Calls to the SuperLink that are repeated if it fails, for example because its database is locked.

Flower repeats a call if the SuperLink cannot be reached, but not if it answers with an error of its
own. A busy SuperLink does that: SQLite waits for a lock for five seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from logging import WARNING
from typing import TypeVar

import httpx
from flwr.app import Message
from flwr.serverapp import Grid
from flwr.supercore import log

T = TypeVar("T")
WAITS = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds before each further attempt."""


def with_retries(call: Callable[[], T]) -> T:
    """Return what a call returns; try again if the SuperLink fails."""
    for seconds in WAITS:
        try:
            return call()
        except httpx.HTTPStatusError as problem:
            if not problem.response.is_server_error:
                raise
            code = problem.response.status_code
            log(WARNING, "the SuperLink failed (HTTP %s); trying again in %g s", code, seconds)
            time.sleep(seconds)
    return call()


def connected_nodes(grid: Grid) -> list[int]:
    """Return the connected SuperNodes."""
    return with_retries(lambda: sorted(grid.get_node_ids()))


def push_messages(grid: Grid, messages: Sequence[Message]) -> list[str | None]:
    """Send messages and return their ids; None for each that the SuperLink did not accept.

    A message that is sent twice arrives once, because its id is a hash of its content. The
    SuperLink accepts no message to a SuperNode that is not registered, and none that is too large.
    """
    ids: list[str | None] = list(with_retries(lambda: grid.push_messages(messages)))
    return ids or [None] * len(messages)
