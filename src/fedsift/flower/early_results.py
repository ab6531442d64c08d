"""Results that arrived before those of earlier clients in the cohort."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, field, replace
from typing import BinaryIO

from fedsift.engine.contract import Missing, Received

MAX_EARLY_BYTES = 2**28
"""The most bytes of frames that wait in memory; others wait in a temporary file."""


@dataclass
class EarlyResults:
    """Results by client, which are added to the sum when it is their client's turn.

    One client that is slow, or never replies, can make all others wait. Their frames are small, but
    there may be many of them.

    >>> early = EarlyResults()
    >>> early.put(Received(3, b"frame", b"", 0.5))
    >>> early.take(2), early.take(3).frame, early.take(3)
    (None, b'frame', None)
    """

    results: dict[int, Received | Missing] = field(default_factory=dict)
    places: dict[int, tuple[int, int]] = field(default_factory=dict)
    size: int = 0
    file: BinaryIO | None = None

    def put(self, result: Received | Missing) -> None:
        """Keep a result until its client's turn."""
        if isinstance(result, Received):
            if self.size + len(result.frame) > MAX_EARLY_BYTES:
                self.places[result.client] = self._write(result.frame)
                result = replace(result, frame=b"")
            self.size += len(result.frame)
        self.results[result.client] = result

    def take(self, client: int) -> Received | Missing | None:
        """Return a client's result, which is then forgotten; None if it has not arrived."""
        result = self.results.pop(client, None)
        if isinstance(result, Received):
            self.size -= len(result.frame)
            if client in self.places:
                return replace(result, frame=self._read(*self.places.pop(client)))
        return result

    def _write(self, frame: bytes) -> tuple[int, int]:
        if self.file is None:
            self.file = tempfile.TemporaryFile()  # noqa: SIM115, deleted with this object
        start = self.file.seek(0, os.SEEK_END)
        self.file.write(frame)
        return start, len(frame)

    def _read(self, start: int, size: int) -> bytes:
        assert self.file is not None
        self.file.seek(start)
        return self.file.read(size)
