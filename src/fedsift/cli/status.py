"""Show what a run on Flower is doing, from its folder."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from rich.live import Live
from rich.markup import escape
from rich.table import Table

from fedsift.cli.exit_codes import TRAINING_FAILED, user_input
from fedsift.cli.terminal import out, plain_table
from fedsift.progress import file_size, percent
from fedsift.runs.folder import RunFolder
from fedsift.runs.status import Status, read_status

WATCH_SECONDS = 2.0
FEW = 5
"""The table names at most this many clients."""


@dataclass(frozen=True)
class StatusReading:
    """A look at a run: its status, whether it is in progress, and when that was read."""

    folder: RunFolder
    is_running: bool
    status: Status
    now: float

    @classmethod
    def at(cls, folder: RunFolder) -> StatusReading:
        """Look at the run in a folder."""
        is_running = folder.is_in_use()  # the status may be newer than this, never older
        return cls(folder, is_running, read_status(folder.status_file), time.time())

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the wait ends, if the run is waiting."""
        return self.status.seconds_left(self.now) if self.is_running else None


def show_status(path: Path, watch: bool, is_json: bool) -> int:
    """Print the status once, or until the run ends; return the exit code."""
    with user_input(), printed_json() if is_json else table_on_screen(watch) as show:
        folder = RunFolder.open(path)
        show(look := StatusReading.at(folder))
        while watch and look.is_running:
            time.sleep(WATCH_SECONDS)
            show(look := StatusReading.at(folder))
    return 0 if look.is_running else TRAINING_FAILED


@contextmanager
def printed_json() -> Iterator[Callable[[StatusReading], None]]:
    """Yield a function that prints one JSON object per line."""

    def show(look: StatusReading) -> None:
        about = {"running": look.is_running, "seconds_left": look.seconds_left}
        print(json.dumps({**about, **asdict(look.status)}), flush=True)

    yield show


@contextmanager
def table_on_screen(is_live: bool) -> Iterator[Callable[[StatusReading], None]]:
    """Yield a function that prints a table, or replaces the last one."""
    if not is_live:
        yield lambda look: out.print(status_table(look))
        return
    with Live(console=out) as live:
        yield lambda look: live.update(status_table(look), refresh=True)


def status_table(look: StatusReading) -> Table:
    """Return a status as a table."""
    table = plain_table(f"{look.folder.path}: {state_text(look)}", show_header=False)
    table.add_column(style="dim")
    table.add_column()
    for name, value in status_rows(look).items():
        table.add_row(name, escape(value))
    return table


def state_text(look: StatusReading) -> str:
    """Return in a few words what the run is doing."""
    status = look.status
    if not look.is_running:
        return status.phase if status.has_ended else "stopped without a word: it was killed"
    return {"waiting": "waiting for SuperNodes"}.get(status.phase, status.phase)


def status_rows(look: StatusReading) -> dict[str, str]:
    """Return the names and values of the table."""
    status = look.status
    rows = {"round": f"{status.round} of {status.rounds} finished"}
    if status.reason:
        rows["reason"] = status.reason
    if status.round:
        rows["last round"] = f"{status.merged} merged, {status.rejected} rejected"
        rows["accuracy"] = percent(status.accuracy)
        rows["uplink per client"] = file_size(status.uplink_bytes)
        rows["downlink per client"] = file_size(status.downlink_bytes)
    if look.is_running:
        rows |= waiting_rows(look)
    if status.dropped:
        rows["dropped"] = "\n".join(dropped_lines(status.dropped))
    rows["updated"] = time_text(status.updated, look.now)
    return rows


def waiting_rows(look: StatusReading) -> dict[str, str]:
    """Return for whom a run waits, and when it should end."""
    status, rows = look.status, {}
    left = "" if look.seconds_left is None else f", {look.seconds_left:.0f} s left"
    if status.phase == "waiting":
        rows["SuperNodes"] = f"{status.connected} of {status.wanted} connected{left}"
    elif status.phase == "training":
        rows["answered"] = first_names(status.answered)
        rows["waiting for"] = first_names(status.waiting_for) + (left if status.waiting_for else "")
    if status.estimated_end is not None:
        rows["estimated end"] = time_text(status.estimated_end, look.now)
    return rows


def first_names(names: tuple[str, ...]) -> str:
    """Return the first few names and the number of the others.

    >>> first_names(("client 1", "client 2")), first_names(())
    ('client 1, client 2', 'nobody')
    """
    more = [f"{len(names) - FEW} more"] if len(names) > FEW else []
    return ", ".join([*names[:FEW], *more]) or "nobody"


def dropped_lines(dropped: Mapping[str, str]) -> list[str]:
    """Return a line for each of the first clients whose upload does not count."""
    lines = [f"{name}: {why}" for name, why in dropped.items()]
    return [*lines[:FEW], *([f"{len(lines) - FEW} more"] if len(lines) > FEW else [])]


def time_text(seconds: float, now: float) -> str:
    """Return a time of day, with the date if it is another day."""
    then, today = datetime.fromtimestamp(seconds), datetime.fromtimestamp(now)
    return f"{then:%H:%M:%S}" if then.date() == today.date() else f"{then:%Y-%m-%d %H:%M:%S}"
