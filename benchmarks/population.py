"""The cost of a large population: 10,000 clients with 1 % per round, or 100 clients with all.

    python benchmarks/population.py --out benchmarks/results/population.json

Both train cohorts of 100 clients with six images each: the CNN on Fashion-MNIST. Their rounds
alternate; seconds are medians with quartiles. Memory is the peak of a whole ``fedsift run``, all
processes together, with shared pages counted once.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median, quantiles

from fedsift.engine import Forked
from fedsift.runs.config import RunConfig
from fedsift.runs.run import environment, federation_of
from fedsift.simulation import initial_snapshot

CLIENTS, COHORT = 10_000, 100


def config_of(algorithm: str) -> RunConfig:
    values = {"clients": CLIENTS, "participation": COHORT / CLIENTS, "dataset": "fashion-mnist"}
    return RunConfig.from_values({**values, "algorithm": algorithm, "device": "cpu"})


def compare(algorithm: str, rounds: int) -> dict[str, object]:
    many = federation_of(config_of(algorithm))
    task = replace(many.task, clients=many.task.clients[:COHORT])
    few = replace(many, task=task, engine=Forked(task, many.algorithm), participation=1.0)
    snapshots = {"many": initial_snapshot(many), "few": initial_snapshot(few)}
    seconds: dict[str, list[float]] = {"many": [], "few": []}
    for fed in (many, few):
        fed.engine.start_pool()
    for _ in range(rounds + 1):
        for name, fed in (("many", many), ("few", few)):
            began = time.perf_counter()
            snapshots[name], _ = fed.run_round(snapshots[name])
            seconds[name].append(time.perf_counter() - began)
    del seconds["many"][0], seconds["few"][0]
    row: dict[str, object] = {"algorithm": algorithm}
    for name, times in seconds.items():
        row[f"seconds_{name}"], row[f"quartiles_{name}"] = median(times), quantiles(times)[::2]
    ratios = [a / b for a, b in zip(seconds["many"], seconds["few"], strict=True)]
    return {**row, "ratio": median(ratios), "ratio_quartiles": quantiles(ratios)[::2]}


def peak_memory(algorithm: str, rounds: int) -> dict[str, float]:
    config = config_of(algorithm)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        words = ["--config", str(Path(folder) / "config.toml"), "--out", str(out)]
        (Path(folder) / "config.toml").write_text(replace(config, rounds=rounds).toml())
        began = time.perf_counter()
        process = subprocess.Popen([sys.executable, "-m", "fedsift", "run", *words])
        peak = 0.0
        while process.poll() is None:
            peak = max(peak, sum(map(proportional_memory, descendants(process.pid))))
            time.sleep(0.05)
        assert process.returncode == 0
        disk = sum(file.stat().st_size for file in out.iterdir())
        return {
            "peak_gb": peak / 1e9,
            "folder_gb": disk / 1e9,
            "rounds": rounds,
            "seconds": time.perf_counter() - began,
        }


def descendants(pid: int) -> list[int]:
    """A process and all processes that it started."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(p for child in children for p in descendants(int(child)))]


def proportional_memory(pid: int) -> float:
    """The memory of a process in bytes; a page shared by n processes counts as 1/n."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(1024.0 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    methods = ["fedadam-ssm", "efficient-adam", "onebit-adam"]
    parser.add_argument("--algorithms", nargs="+", default=methods)
    parser.add_argument("--rounds", type=int, default=15, help="rounds of each federation")
    parser.add_argument("--memory-rounds", type=int, default=30)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = []
    for algorithm in arguments.algorithms:
        row = compare(algorithm, arguments.rounds)
        row["memory"] = peak_memory(algorithm, arguments.memory_rounds)
        rows.append(row)
        print(json.dumps(row), flush=True)
    about = {"environment": environment(RunConfig(device="cpu")), "clients": CLIENTS, "rows": rows}
    if arguments.out:
        arguments.out.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
