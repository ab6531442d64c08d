"""The one exception that bytes from outside can raise."""

from __future__ import annotations

import numpy as np


class FrameError(ValueError):
    """Bytes that no honest sender could have sent; the message is the reason."""


def require(condition: bool | np.bool_, reason: str) -> None:
    """Refuse a frame unless the condition holds."""
    if not condition:
        raise FrameError(reason)
