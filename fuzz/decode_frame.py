"""Fuzz the decoder: any bytes quickly give an update within the limits, or a FrameError.

    python fuzz/decode_frame.py fuzz/corpus -max_total_time=600

The fuzzer changes the body of a frame. The checksum is corrected, so the changes reach the checks
behind it. fuzz/run starts one process per core and counts the frames.
"""

import sys

import atheris

with atheris.instrument_imports(include=["fedsift.codec"]):
    from check import check


def fuzz_one(body: bytes) -> None:
    """Check one input; the fuzzer expects no return value."""
    check(body)


if __name__ == "__main__":
    atheris.Setup(sys.argv, fuzz_one)
    atheris.Fuzz()
