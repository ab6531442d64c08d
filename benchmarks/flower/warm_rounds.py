"""How long a round of ``fedsift deploy demo`` takes, and what its time is spent on.

    python benchmarks/flower/warm_rounds.py --repeats 5

Each run has 7 rounds, of which the first is left out: it waits for the SuperNodes. A SuperNode's
cycle from one request to the next is split into *polling* (a SuperNode that finds no message sleeps
for three seconds, and Flower has no setting for it), *reply* (it asks every half second whether its
client has replied) and the *rest* (HTTP requests). Results of several runs are added to
``results/warm_rounds.json``, with the machine's load. On a machine that is busy with other work,
run it with real-time priority, which the processes of the demo inherit: ``chrt -r 1 python ...``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import HERE, environment

import fedsift

ROUNDS = 7
RESULTS = HERE / "results" / "warm_rounds.json"
PARTS = ("polling", "reply", "rest")
POLL_SECONDS = 3.0
"""A SuperNode without a message sleeps this long."""


def main() -> None:
    """Run the demo several times, and add the results to the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    runs = json.loads(RESULTS.read_text())["runs"] if RESULTS.exists() else []
    for _ in range(options.repeats):
        runs.append(run := measured_run())
        print(json.dumps(run), flush=True)
        content = {"runs": runs, "all": summary(runs), "environment": environment()}
        RESULTS.write_text(json.dumps(content, indent=2) + "\n")


def running_processes() -> float:
    """Return the number of processes that want to run now, without this one."""
    samples = []
    for _ in range(10):
        samples.append(int(Path("/proc/loadavg").read_text().split()[3].split("/")[0]) - 1)
        time.sleep(0.2)
    return statistics.fmean(samples)


def measured_run() -> dict[str, Any]:
    """Run the demo once; return each round's seconds and the parts of the SuperNodes' cycles."""
    folder = Path(tempfile.mkdtemp(prefix="fedsift-warm-"))
    paths = [str(Path(fedsift.__file__).parents[1]), str(HERE / "probe")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "SLEEP_NOTES": str(folder)}
    others = running_processes()
    words = ["deploy", "demo", "--rounds", str(ROUNDS), "--out", str(folder / "run")]
    subprocess.run(
        [sys.executable, "-m", "fedsift", *words],
        check=True, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    load = os.getloadavg()[0]
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    ends = [json.loads(line)["seconds"] for line in lines]
    seconds = [round(b - a, 2) for a, b in itertools.pairwise(ends)]
    parts = [cycle_parts(path) for path in folder.glob("*.jsonl")]
    shutil.rmtree(folder)
    return {
        "seconds": seconds,
        "median": statistics.median(seconds),
        **{key: round(statistics.fmean(p[key] for p in parts), 2) for key in parts[0]},
        "others_running_before": round(others, 1),
        "load_after": round(load, 1),
        "has_realtime_priority": os.sched_getscheduler(0) != os.SCHED_OTHER,
    }


def cycle_parts(path: Path) -> dict[str, float]:
    """Return the mean seconds per cycle that a SuperNode polls, waits for a reply, or works."""
    sleeps = [json.loads(line) for line in path.read_text().splitlines()]
    replies = [n for n, (length, *_) in enumerate(sleeps) if length < POLL_SECONDS]
    cycles = sleeps[replies[0] : replies[-1] + 1]
    ends = [
        after for (length, _, after), (following, *_) in itertools.pairwise(cycles)
        if length < POLL_SECONDS <= following
    ]  # fmt: skip
    number = len(ends)
    within = [x for x in cycles if ends[0] <= x[1] and x[2] <= cycles[-1][2]]
    total = cycles[-1][2] - ends[0]
    polling = sum(end - begin for length, begin, end in within if length >= POLL_SECONDS)
    reply = sum(end - begin for length, begin, end in within if length < POLL_SECONDS)
    rest = total - polling - reply
    return {"polling": polling / number, "reply": reply / number, "rest": rest / number}


def summary(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Return the mean, median and maximum over the rounds of all runs, and the mean parts."""
    seconds = [x for run in runs for x in run["seconds"]]
    parts = {key: statistics.fmean(run[key] for run in runs) for key in PARTS}
    found = {"mean": statistics.fmean(seconds), "median": statistics.median(seconds), **parts}
    return {"max": max(seconds), **{key: round(x, 2) for key, x in found.items()}}


if __name__ == "__main__":
    main()
