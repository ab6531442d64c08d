"""Fuzz the decoder: any bytes give an update within the limits, or a FrameError, soon.

    python fuzz/decode_frame.py fuzz/corpus -max_total_time=600

The fuzzer changes the body of a frame; the checksum is put right, so that its changes reach the
checks behind it. fuzz/run starts one such process a core and counts the frames.
"""

import sys

import atheris

with atheris.instrument_imports(include=["fedsift.codec"]):
    import torch

    from fedsift.codec import FrameError, Limits, decode
    from fedsift.codec.frame import checksum
    from fedsift.vector import Layout

LAYOUT = Layout(("a", "b", "c"), ((30, 20), (70_000,), (7,)), torch.float32)
LIMITS = Limits(max_weight=1e3)


def check(body: bytes) -> None:
    """Decode a frame of this body; what is accepted must be sound."""
    try:
        update = decode(body + checksum(body), LAYOUT, LIMITS)
    except FrameError:
        return
    (weight,) = update.weights
    assert 0 < weight <= 1e3
    for part in update.parts:
        if part.indices is not None:
            assert part.indices.shape[1] <= LAYOUT.d
            assert part.indices.numel() == 0 or int(part.indices[0, 0]) >= 0
            assert part.indices.numel() == 0 or int(part.indices[0, -1]) < LAYOUT.d
            assert bool((part.indices.diff() > 0).all())
        for role, coded in part.values.items():
            values = coded.restore()
            assert bool(torch.isfinite(values).all())
            assert values.numel() == 0 or float(values.abs().max()) <= (
                1e12 if role == "v" else 1e6
            )


if __name__ == "__main__":
    torch.set_num_threads(1)
    atheris.Setup(sys.argv, check)
    atheris.Fuzz()
