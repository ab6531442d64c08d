"""The property that is fuzzed: any bytes give an update within the limits, or a FrameError."""

import torch

from fedsift.codec import FrameError, Limits, decode
from fedsift.codec.frame import checksum
from fedsift.vector import Layout

LAYOUT = Layout(("a", "b", "c"), ((30, 20), (70_000,), (7,)), torch.float32)
LIMITS = Limits(max_weight=1e3)


def check(body: bytes) -> bool:
    """Decode a frame with this body and a correct checksum; return whether it was accepted."""
    try:
        update = decode(body + checksum(body), LAYOUT, LIMITS)
    except FrameError:
        return False
    (weight,) = update.weights
    assert 0 < weight <= 1e3
    for part in update.parts:
        if part.indices is not None and part.indices.numel():
            assert int(part.indices[0, 0]) >= 0
            assert int(part.indices[0, -1]) < LAYOUT.d
            assert bool((part.indices.diff() > 0).all())
        for role, coded in part.values.items():
            values = coded.restore()
            assert bool(torch.isfinite(values).all())
            assert values.numel() == 0 or values.abs().max() <= (1e12 if role == "v" else 1e6)
    return True
