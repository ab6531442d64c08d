"""How a simulated message travels: only measured, or really as bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fedsift.codec.frame import Spec, decode, encode, encoded_size
from fedsift.codec.limits import Limits
from fedsift.codec.update import Update

Wire = Callable[[Update, Spec, Limits], tuple[Update, int]]
"""Takes what is sent; gives what is received and its size in bytes, or raises FrameError."""


def counted(update: Update, spec: Spec, limits: Limits) -> tuple[Update, int]:
    """The update itself, and the exact size of the frame that would carry it."""
    return update, encoded_size(update, spec)


def carried(update: Update, spec: Spec, limits: Limits) -> tuple[Update, int]:
    """The update after a journey as bytes, from a sender who is no stranger: any values will do."""
    frame = encode(update, spec)
    known = replace(limits, max_abs=float("inf"))
    return decode(frame, spec.layout, known).to(update.device), len(frame)


WIRES: dict[str, Wire] = {"count": counted, "real": carried}
"""The ways to travel by their command-line name; both train the same, bit for bit."""
