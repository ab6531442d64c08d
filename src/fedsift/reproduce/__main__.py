"""``python -m fedsift.reproduce table1``: the runs alone, with nothing but the core installed.

For a GPU machine that has torch, numpy, safetensors, constriction and tomli-w. It leaves the run
folders from which ``fedsift reproduce table1 --no-run`` makes the results on another machine. Runs
that are done are not done again, and one that fails does not keep the others from being done.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from fedsift.reproduce.pins import PINS, Pin, Planned, Wanted, split
from fedsift.reproduce.runner import to_do
from fedsift.reproduce.together import How, carried_out


def main(words: list[str] | None = None) -> None:
    """Parse, and carry out every run that is not done."""
    parser = argparse.ArgumentParser(prog="python -m fedsift.reproduce", description=__doc__)
    parser.add_argument("names", nargs="+", choices=PINS, metavar="NAME", help=", ".join(PINS))
    parser.add_argument("--task", help="one or several, separated by commas")
    parser.add_argument("--setting")
    parser.add_argument("--methods", default="", help="separated by commas")
    parser.add_argument("--seeds", type=int, default=3, help="3 by default; one with --quick")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--stop-at-target", action="store_true")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--out", type=Path, help="runs/reproduce by default, or runs/quick")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="stop, ready to be continued, after so many"
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side on one device")
    given = vars(parser.parse_args(words))
    until = time.monotonic() + 60 * given.pop("minutes")
    names, out, stop, jobs = (given.pop(key) for key in ("names", "out", "stop_at_target", "jobs"))
    methods = split(given.pop("methods"))
    wanted = Wanted(**given, methods=methods)
    if wanted.quick:
        wanted = replace(wanted, seeds=min(wanted.seeds, 1))
    out = out or Path("runs/quick" if wanted.quick else "runs/reproduce")
    try:
        how = How(out, stop, until, jobs)
        todo = [run for name in names for run in to_do(Pin.of(name), wanted, out, stop, say)]
    except ValueError as problem:
        parser.error(str(problem))
    try:
        carry_out_all(each_once(todo), how)
    except KeyboardInterrupt:
        say("stopped: the same command goes on from here")
        sys.exit(130)


def each_once(runs: Iterable[Planned]) -> list[Planned]:
    """Runs that figures share, once, with the most rounds that any of them wants."""
    found: dict[Path, Planned] = {}
    for run in runs:
        known = found.setdefault(run.path, run)
        if run.config.rounds > known.config.rounds:
            found[run.path] = run
    return list(found.values())


def carry_out_all(todo: list[Planned], how: How) -> None:
    """Run after run, a line of text for each; ends with exit code 1 if one of them failed."""
    failed = left = 0
    for n, (run, end) in enumerate(carried_out(todo, how), 1):
        failed += end.has_failed
        left += end.is_cut_off
        if not end.is_cut_off:
            say(f"[{n}/{len(todo)}] {run.path}: {end.words}")
    if left:
        say(f"the time is up: {left} runs are left, and the same command goes on")
    if failed:
        sys.exit(f"{failed} of {len(todo)} runs failed; the same command tries them again")


def say(line: str) -> None:
    """A line for whoever watches."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
