"""What is wrong with a frame that came, and with values that were to go into one."""

from __future__ import annotations

import numpy as np


class FrameError(ValueError):
    """Bytes that no honest sender could have sent; the message is the reason."""


class NotFiniteError(ValueError):
    """Values that were to be sent are not numbers: a training that has diverged."""


def require(condition: bool | np.bool_, reason: str) -> None:
    """Refuse a frame unless the condition holds."""
    if not condition:
        raise FrameError(reason)
