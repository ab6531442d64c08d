"""Shut down cleanly on SIGTERM, which batch systems and containers send."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from fedsift.engine.processes.torchrun import ranks

TERMINATED = 143
"""Exit code after SIGTERM: 128 plus the signal's number, as in a shell."""


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Inside the block, let SIGTERM raise SystemExit, so that a run is saved.

    Forked processes ignore the signal because they end with this one. Under torchrun, the
    engine handles the signal. Only the main thread can handle signals, and a handler of the
    user's is left alone.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if ranks() > 1 or not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    process = os.getpid()

    def raise_exit(number: int, frame: FrameType | None) -> None:
        if os.getpid() == process:
            signal.signal(number, signal.SIG_IGN)  # saving takes a moment: do not interrupt it
            raise SystemExit(TERMINATED)

    before = signal.signal(signal.SIGTERM, raise_exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
