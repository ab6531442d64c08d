"""Fuzz what the server does with clients' messages: it reads or refuses them, and cheaply.

    python fuzz/read_reply.py fuzz/replies -max_total_time=600

The fuzzer's bytes are choices of changes to honest replies; see check_reply.py.
"""

import sys

import atheris

with atheris.instrument_imports(include=["fedsift.flower", "flwr.supercore.inflatable"]):
    from check_reply import check


def fuzz_one(choices: bytes) -> None:
    """Check one input; the fuzzer expects no return value."""
    check(choices)


if __name__ == "__main__":
    atheris.Setup(sys.argv, fuzz_one)
    atheris.Fuzz()
