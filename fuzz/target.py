"""Fuzz one target with atheris.

    python fuzz/target.py decode_frame fuzz/corpus -max_total_time=600

- decode_frame: any bytes quickly give an update within the limits, or a FrameError. The fuzzer
  changes the body of a frame. The checksum is corrected, so that the changes reach the checks
  behind it.
- read_reply: the server reads clients' messages or refuses them, and cheaply
- read_request: a client trains on a server's messages, or refuses them in one line

For the last two, the fuzzer's bytes are choices of changes to honest messages. fuzz/run starts one
process per core and counts the inputs.
"""

import sys
from importlib import import_module

import atheris

TARGETS = {
    "decode_frame": ("check", ["fedsift.codec"]),
    "read_reply": ("check_reply", ["fedsift.flower", "flwr.supercore.inflatable"]),
    "read_request": ("check_request", ["fedsift.flower", "flwr.supercore.inflatable"]),
}
"""The module with the property that must hold, and the packages whose branches guide the fuzzer."""


def main() -> None:
    """Fuzz the target that the first argument names."""
    module, instrumented = TARGETS[sys.argv.pop(1)]
    with atheris.instrument_imports(include=instrumented):
        check = import_module(module).check

    def fuzz_one(data: bytes) -> None:
        check(data)  # the fuzzer expects no return value

    atheris.Setup(sys.argv, fuzz_one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
