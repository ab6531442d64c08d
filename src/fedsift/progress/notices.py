"""Messages that are shown once, next to the progress, such as how a GPU runs the training."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

LOGGER = logging.getLogger("fedsift")


class NoticeHandler(logging.Handler):
    """Writes each message as a line to stderr, above a progress bar if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a message."""
        print(self.format(record), file=sys.stderr, flush=True)


@contextmanager
def notices() -> Iterator[None]:
    """Show messages logged at level INFO, once even if displays are nested."""
    if any(isinstance(handler, NoticeHandler) for handler in LOGGER.handlers):
        yield
        return
    handler, level = NoticeHandler(), LOGGER.level
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    try:
        yield
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.setLevel(level)
