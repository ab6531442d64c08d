"""Shut down cleanly on SIGTERM, which batch systems and containers send."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from fedsift.cli.exit_codes import TERMINATED
from fedsift.engine.processes.torchrun import ranks


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Inside the block, let SIGTERM raise SystemExit, so that a run is saved.

    Forked processes ignore the signal because they end with this one. Under torchrun, the
    engine handles the signal.
    """
    if ranks() > 1:
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
