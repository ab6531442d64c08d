"""``python -m fedsift.reproduce table1``: the runs alone, with nothing but the core installed.

For a GPU machine that has torch, numpy, safetensors, constriction and tomli-w. It leaves the run
folders from which ``fedsift reproduce table1 --no-run`` makes the results on another machine.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fedsift.reproduce.pins import PINS, Pin, Wanted
from fedsift.reproduce.runner import carry_out, to_do
from fedsift.simulation import Record


def main(words: list[str] | None = None) -> None:
    """Parse, and carry out every run that is not done."""
    parser = argparse.ArgumentParser(prog="python -m fedsift.reproduce", description=__doc__)
    parser.add_argument("names", nargs="+", choices=PINS, metavar="NAME", help=", ".join(PINS))
    parser.add_argument("--task")
    parser.add_argument("--setting")
    parser.add_argument("--methods", default="", help="separated by commas")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--stop-at-target", action="store_true")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--out", type=Path, default=Path("runs/reproduce"))
    given = vars(parser.parse_args(words))
    names, out, stop = (given.pop(key) for key in ("names", "out", "stop_at_target"))
    methods = tuple(filter(None, given.pop("methods").split(",")))
    wanted = Wanted(**given, methods=methods)
    try:
        for name in names:
            reproduce(Pin.of(name), wanted, out, stop)
    except ValueError as problem:
        parser.error(str(problem))


def reproduce(pin: Pin, wanted: Wanted, out: Path, stop_at_target: bool) -> None:
    """The runs of one table or figure, a line of text for each."""
    for run in to_do(pin, wanted, out, stop_at_target, say):
        records: list[Record] = []
        carry_out(run, out, records.append, stop_at_target)
        last = "{round} rounds, accuracy {accuracy:.4f}, {seconds:.1f} s"
        say(f"{pin.name} {run.path}: {last.format(**records[-1]) if records else 'diverged'}")


def say(line: str) -> None:
    """A line for whoever watches."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
