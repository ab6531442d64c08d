"""What others see of a run in progress: log lines, status.json, and a report that updates."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from logging import INFO
from typing import Any

from flwr.supercore import log

from fedsift.report.html import report_on
from fedsift.runs.folder import RunFolder
from fedsift.runs.status import Status, write_status
from fedsift.simulation import Record

WRITE_SECONDS = 0.5
"""The status is written at most this often while the server waits."""
HEARTBEAT_SECONDS = 5.0
"""An unchanged status is written this often while the server waits."""
LOG_SECONDS = 10.0
"""Seconds between two log lines while the server waits."""
REPORT_SECONDS = 15.0
"""Seconds between two reports of a run in progress, at least."""
RELOAD_SECONDS = 15.0
"""Such a report reloads itself this often."""
REPORT_SHARE = 0.05
"""Reports take at most this share of the time."""


class RunWatch:
    """The status of a run in progress, as it is logged and written to the folder."""

    def __init__(self, folder: RunFolder, rounds: int, history: Sequence[Record]) -> None:
        self.folder = folder
        self.status = Status(rounds=rounds)
        self.written, self.written_at, self.logged_at = Status(), 0.0, 0.0
        self.report_due = time.monotonic() + REPORT_SECONDS
        if history:
            self.status = replace(self.status, **of_record(history[-1], None, rounds))

    def waiting_for_nodes(self, connected: int, wanted: int, deadline: float) -> None:
        """Say that the server waits for SuperNodes, until a time of ``time.monotonic()``."""
        has_changed = (connected, "waiting") != (self.status.connected, self.status.phase)
        left = self._waiting("waiting", deadline, connected=connected, wanted=wanted)
        if self._is_log_due(has_changed):
            names = f"{wanted} SuperNode{'s' * (wanted != 1)}"
            log(INFO, "waiting for %s, %s connected, %.0f s left", names, connected, left)

    def nodes_connected(self, connected: int, wanted: int) -> None:
        """Take how many SuperNodes are connected as a round starts."""
        self.status = replace(self.status, connected=connected, wanted=wanted)

    def waiting_for_replies(
        self,
        answered: Sequence[str],
        waiting_for: Sequence[str],
        dropped: Mapping[str, str],
        deadline: float,
    ) -> None:
        """Say whose replies the server waits for, until a time of ``time.monotonic()``."""
        if self.status.phase != "training" or self.status.deadline is None:
            self.logged_at = time.monotonic()  # most rounds end before there is anything to say
        left = self._waiting(
            "training", deadline, answered=tuple(answered), waiting_for=tuple(waiting_for),
            dropped=dict(dropped),
        )  # fmt: skip
        if waiting_for and self._is_log_due(has_changed=False):
            log(
                INFO, "waiting for %s, %s answered, %.0f s left",
                shortened(waiting_for), len(answered), left,
            )  # fmt: skip

    def round_finished(self, record: Record, before: Record | None) -> None:
        """Take a finished round, and write the report if it is due."""
        found = of_record(record, before, self.status.rounds)
        self._update(deadline=None, waiting_for=(), phase="training", **found)
        if time.monotonic() >= self.report_due:
            began = time.monotonic()
            report_on([self.folder.path], self.folder.report_file, reload_seconds=RELOAD_SECONDS)
            took = time.monotonic() - began
            self.report_due = began + max(REPORT_SECONDS, took / REPORT_SHARE)

    @contextmanager
    def until_end(self) -> Iterator[None]:
        """Inside the block, write the status; at its end, whether the run finished or why not."""
        self._update(phase="starting")
        try:
            yield
        except BaseException as problem:
            self._update(phase="stopped", reason=reason_of(problem), deadline=None)
            raise
        self._update(phase="finished", deadline=None, estimated_end=None)

    def _waiting(self, phase: str, deadline: float, **changes: Any) -> float:
        """Change the status while waiting; return the seconds left."""
        left, known = max(0.0, deadline - time.monotonic()), self.status.deadline
        end = time.time() + left
        if known is not None and abs(known - end) < 1:
            end = known  # the same deadline, up to the resolution of the clocks
        self.status = replace(self.status, phase=phase, deadline=end, **changes)
        has_changed = replace(self.written, updated=0) != replace(self.status, updated=0)
        wait = WRITE_SECONDS if has_changed else HEARTBEAT_SECONDS
        if self.written.phase != phase or time.monotonic() - self.written_at >= wait:
            self._write()
        return left

    def _update(self, **changes: Any) -> None:
        self.status = replace(self.status, **changes)
        self._write()

    def _write(self) -> None:
        self.status = self.written = replace(self.status, updated=time.time())
        self.written_at = time.monotonic()
        write_status(self.folder.status_file, self.status)

    def _is_log_due(self, has_changed: bool) -> bool:
        now = time.monotonic()
        if not has_changed and now - self.logged_at < LOG_SECONDS:
            return False
        self.logged_at = now
        return True


def reason_of(problem: BaseException) -> str:
    """Return why a run stopped, on one line.

    >>> reason_of(ValueError("no space left")), reason_of(SystemExit(0))
    ('ValueError: no space left', 'the server was told to end')
    """
    if isinstance(problem, SystemExit):  # what Flower makes of signals, and of a lost SuperLink
        return "the server was told to end"
    return " ".join(f"{type(problem).__name__}: {problem}".split()).removesuffix(":")


def of_record(record: Record, before: Record | None, rounds: int) -> dict[str, Any]:
    """Return what a status takes from a round's metrics, given those of the round before."""
    seconds, round = float(record["seconds"]), int(record["round"])
    mean = seconds / round if round else None
    return {
        "round": round,
        "merged": record["clients"],
        "rejected": record.get("rejected") or 0,
        "accuracy": record["accuracy"],
        "loss": record["loss"],
        "uplink_bytes": record["uplink_bytes"],
        "downlink_bytes": record["downlink_bytes"],
        "dropped": {name_of(key): why for key, why in (record.get("problems") or {}).items()},
        "round_seconds": seconds - float(before["seconds"]) if before else mean,
        "estimated_end": None if mean is None else time.time() + (rounds - round) * mean,
    }


def name_of(key: str) -> str:
    """Return the name of a client or node under which the metrics list its problem.

    >>> name_of("3"), name_of("node 17")
    ('client 3', 'node 17')
    """
    return f"client {key}" if key.isdigit() else key


def shortened(names: Sequence[str], most: int = 5) -> str:
    """Return a list of names as text, of which only the first few are given.

    >>> shortened(["client 1", "client 2", "client 3"], most=2)
    'client 1, client 2 and 1 more'
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
