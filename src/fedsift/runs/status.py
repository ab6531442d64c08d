"""What a run on Flower is doing right now: status.json, which other processes read."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from fedsift.errors import ConfigError


@dataclass(frozen=True)
class Status:
    """What a run is doing. Times are in seconds since 1970.

    ``phase`` is "starting", "waiting" (for SuperNodes), "training", "finished" or "stopped", for
    the ``reason`` given. ``round`` is the last finished round of ``rounds``. ``connected`` counts
    the SuperNodes, of which ``wanted`` are needed; the wait ends at ``deadline``. Of the round in
    progress, ``answered`` and ``waiting_for`` name clients, or nodes whose client is not yet known,
    and ``dropped`` gives by name why an upload does not count. The rest is of the last finished
    round; bytes are totals per client so far.
    """

    phase: str = "starting"
    reason: str = ""
    round: int = 0
    rounds: int = 0
    connected: int = 0
    wanted: int = 0
    deadline: float | None = None
    answered: tuple[str, ...] = ()
    waiting_for: tuple[str, ...] = ()
    dropped: Mapping[str, str] = field(default_factory=dict)
    merged: int = 0
    rejected: int = 0
    accuracy: float | None = None
    loss: float | None = None
    uplink_bytes: float = 0.0
    downlink_bytes: float = 0.0
    round_seconds: float | None = None
    estimated_end: float | None = None
    updated: float = 0.0

    @property
    def has_ended(self) -> bool:
        """Whether the run has said that it ended."""
        return self.phase in ("finished", "stopped")

    def seconds_left(self, now: float) -> float | None:
        """Return the seconds until the wait ends, if there is one."""
        return None if self.deadline is None else max(0.0, self.deadline - now)


def write_status(file: Path, status: Status) -> None:
    """Replace the file in one step. Do not wait for the disk, and ignore a full one."""
    partial = file.with_name(file.name + ".partial")
    with suppress(OSError):
        partial.write_text(json.dumps(asdict(status), indent=2) + "\n")
        os.replace(partial, file)


def read_status(file: Path) -> Status:
    """Read the file, and refuse one that is damaged."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        status = Status(
            **{**found, **{key: tuple(found[key]) for key in ("answered", "waiting_for")}}
        )
    except FileNotFoundError:
        raise ConfigError(
            f"{file.parent} has no {file.name}: only runs on Flower write it"
        ) from None
    except (OSError, ValueError, TypeError, LookupError) as problem:
        raise ConfigError(f"{file} is damaged: {problem}") from None
    if wrong := [name for name, default in DEFAULTS.items() if not has_type(status, name, default)]:
        raise ConfigError(f"{file} is damaged: {wrong[0]} is {getattr(status, wrong[0])!r}")
    return status


DEFAULTS: Mapping[str, Any] = {f.name: getattr(Status(), f.name) for f in fields(Status)}
"""The fields of a status and their defaults, which have the type of any value."""


def has_type(status: Status, name: str, default: Any) -> bool:
    """Whether a field has the type of its default; None stands for a number that may be missing."""
    value = getattr(status, name)
    if default is None or isinstance(default, int | float):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number or (default is None and value is None)
    if isinstance(default, tuple):
        return all(isinstance(name, str) for name in value)
    return isinstance(value, type(default))
