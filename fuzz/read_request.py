"""Fuzz what a client does with a server's messages: it trains, or refuses them in one line.

    python fuzz/read_request.py fuzz/requests -max_total_time=600

The fuzzer's bytes are choices of changes to honest requests; see check_request.py.
"""

import sys

import atheris

with atheris.instrument_imports(include=["fedsift.flower", "flwr.supercore.inflatable"]):
    from check_request import check


def fuzz_one(choices: bytes) -> None:
    """Check one input; the fuzzer expects no return value."""
    check(choices)


if __name__ == "__main__":
    atheris.Setup(sys.argv, fuzz_one)
    atheris.Fuzz()
