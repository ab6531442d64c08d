"""Fuzz the decoder: any bytes give an update within the limits, or a FrameError, soon.

    python fuzz/decode_frame.py fuzz/corpus -max_total_time=600

The fuzzer changes the body of a frame; the checksum is put right, so that its changes reach the
checks behind it. fuzz/run starts one such process a core and counts the frames.
"""

import sys

import atheris

with atheris.instrument_imports(include=["fedsift.codec"]):
    from check import check


def one(body: bytes) -> None:
    """What the fuzzer calls; it wants nothing back."""
    check(body)


if __name__ == "__main__":
    atheris.Setup(sys.argv, one)
    atheris.Fuzz()
