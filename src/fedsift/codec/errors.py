"""The exceptions of the codec."""

from __future__ import annotations

import numpy as np


class FrameError(ValueError):
    """A frame that is damaged, malformed or not the expected one; the message gives the reason."""


class NotFiniteError(ValueError):
    """The values to encode contain NaN or infinity, because training has diverged."""


def require(condition: bool | np.bool_, reason: str) -> None:
    """Raise :class:`FrameError` with the reason unless the condition holds."""
    if not condition:
        raise FrameError(reason)
