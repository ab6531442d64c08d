"""How simulated messages travel: :data:`COUNTED` measures them, :data:`ENCODED` encodes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from fedsift.codec.frame import Spec, decode, encode, encoded_size
from fedsift.codec.limits import Limits
from fedsift.codec.update import Update


class Wire(Protocol):
    """A channel between the server and a client."""

    @property
    def builds_frames(self) -> bool:
        """Whether messages become frames of bytes, which need every field of their header."""

    def send(self, update: Update, spec: Spec, limits: Limits) -> tuple[Update, int]:
        """Return the update as received, and its bytes; raise :class:`FrameError` if refused."""


@dataclass(frozen=True)
class SimulatedWire:
    """A :class:`Wire` within one process, given by its function."""

    send: Callable[[Update, Spec, Limits], tuple[Update, int]]
    builds_frames: bool = True


def send_counted(update: Update, spec: Spec, limits: Limits) -> tuple[Update, int]:
    """Return the update itself, and the exact size of its frame."""
    return update, encoded_size(update, spec)


def send_encoded(update: Update, spec: Spec, limits: Limits) -> tuple[Update, int]:
    """Encode and decode the update. The sender is trusted: its values are not bounded."""
    frame = encode(update, spec)
    unbounded = replace(limits, max_abs=float("inf"))
    return decode(frame, spec.layout, unbounded).to(update.device), len(frame)


COUNTED = SimulatedWire(send_counted, builds_frames=False)
ENCODED = SimulatedWire(send_encoded)

WIRES: dict[str, Wire] = {"count": COUNTED, "real": ENCODED}
"""The wires by command-line name; both train the same model, bit for bit."""
