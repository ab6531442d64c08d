"""Threads that decode and add updates on all cores, in an order that fixes the result.

Most of the work is in C, which runs without Python's lock.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


class Threads:
    """One thread per core, each of which runs torch on a single thread.

    >>> import math
    >>> with Threads() as threads:
    ...     list(threads.in_order(threads.start(math.sqrt, x) for x in (1, 4, 9)))
    [1.0, 2.0, 3.0]
    """

    def __init__(self, count: int | None = None) -> None:
        self.count = count or usable_cores()
        self.pool = ThreadPoolExecutor(self.count, "fedsift", torch.set_num_threads, (1,))

    def __enter__(self) -> Threads:
        return self

    def __exit__(self, *problem: object) -> None:
        self.pool.shutdown(cancel_futures=True)

    def start(self, function: Callable[..., Result], *arguments: Any) -> Future[Result]:
        """Call a function in a thread."""
        return self.pool.submit(function, *arguments)

    def in_order(self, calls: Iterable[Future[Result]]) -> Iterator[Result]:
        """Yield the results of calls in their order, while up to two per thread are started ahead.

        ``calls`` is a generator that starts each call when it is asked for it.
        """
        pending: deque[Future[Result]] = deque()
        for call in calls:
            pending.append(call)
            while pending and (pending[0].done() or len(pending) > 2 * self.count):
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()

    def in_slices(self, function: Callable[[int, int], None]) -> None:
        """Call ``function(slice, slices)`` for each slice of a piece of work, one per thread."""
        calls = [self.pool.submit(function, n, self.count) for n in range(1, self.count)]
        function(0, self.count)
        for call in calls:
            call.result()


def finished(result: Result) -> Future[Result]:
    """Return a call that has its result already."""
    future: Future[Result] = Future()
    future.set_result(result)
    return future


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS and Windows
        return os.cpu_count() or 1
