"""The same work in fedsift, Flower's simulation, pfl-research and a plain loop, side by side.

    python benchmarks/peers/run.py

It makes the peers' environments under ``benchmarks/peers/environments`` if they are not there (a
few minutes, 3 GB), runs every system in turn, several times, and writes
``benchmarks/results/peers.json`` and the table in ``benchmarks/README.md``. The work is 20 clients
x 30 Adam steps x 64 images on the paper's CNN and Fashion-MNIST, in 5 rounds, without tests of the
model. Each system uses every core in the way that it has for that: fedsift its processes, Flower an
actor a core, pfl-research one process by default or one a core with torchrun, the plain loop
PyTorch's threads. fedsift also sparsifies, encodes and counts bytes.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path
from statistics import median, quantiles

from fedsift.runs.config import RunConfig
from fedsift.runs.run import environment

HERE = Path(__file__).parent
RESULTS, README = HERE.parent / "results" / "peers.json", HERE.parent / "README.md"
PACKAGES = {
    "flower": ["torch==2.13.0", "flwr[simulation]==1.41.0"],
    "pfl": ["torch==2.13.0", "pfl[pytorch]==0.6.0"],
}
NAMES = {
    "fedsift": "fedsift",
    "flower": "Flower 1.41.0, simulation",
    "pfl": "pfl-research 0.6.0",
    "pfl-torchrun": "pfl-research 0.6.0, torchrun",
    "plain": "a plain PyTorch loop",
}
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}


def interpreter(system: str, folder: Path) -> Path:
    """Return the Python that runs a system, after creating its environment if there is none."""
    system = system.removesuffix("-torchrun")
    if system not in PACKAGES:
        return Path(sys.executable)
    python = folder / system / "bin" / "python"
    if not (folder / system / "ready").exists():
        print(f"making the environment of {NAMES[system]} ...", flush=True)
        venv.create(folder / system, with_pip=True)
        words = [python, "-m", "pip", "install", "--quiet", *PACKAGES[system]]
        subprocess.run(words, check=True)
        (folder / system / "ready").touch()
    return python


def run(system: str, python: Path, rounds: int) -> dict[str, object]:
    """Seconds of each round, and of everything from start to end."""
    cores = str(len(os.sched_getaffinity(0)))
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", cores]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rounds.json"
        name, _, launcher = system.partition("-")
        script = [str(HERE / f"with_{name}.py"), str(rounds), str(out)]
        surroundings = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
        paths = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
        surroundings |= {**QUIET, "FLWR_HOME": folder, "PYTHONPATH": paths}
        began = time.perf_counter()
        done = subprocess.run(
            [str(python), *(launch if launcher else []), *script],
            env=surroundings, capture_output=True, text=True,
        )  # fmt: skip
        seconds = time.perf_counter() - began
        if not out.exists():
            raise SystemExit(f"{system} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        return {"system": system, "rounds": json.loads(out.read_text()), "total": seconds}


def summary(runs: list[dict[str, object]]) -> list[dict[str, object]]:
    """Medians and quartiles by system, and ratios to fedsift taken repeat by repeat."""
    rows = []
    of = {s: [r for r in runs if r["system"] == s] for s in NAMES}
    later = {s: [median(r["rounds"][1:]) for r in of[s]] for s in of}
    total = {s: [r["total"] for r in of[s]] for s in of}
    for system in (s for s in NAMES if of[s]):
        row: dict[str, object] = {"system": system}
        for name, values in (("round", later), ("total", total)):
            ratios = [a / b for a, b in zip(values[system], values["fedsift"], strict=True)]
            row |= {name: median(values[system]), f"{name}_quartiles": spread(values[system])}
            row |= {f"{name}_ratio": median(ratios), f"{name}_ratio_quartiles": spread(ratios)}
        rows.append(row)
    return rows


def spread(values: list[float]) -> list[float]:
    """The first and the third quartile."""
    return quantiles(values)[::2] if len(values) > 1 else [values[0]] * 2


def table(result: dict[str, object]) -> str:
    """The summary in Markdown."""
    head = f"seconds from start to end of {result['rounds']} rounds"
    lines = [
        f"| system | seconds per round | times fedsift's | {head} | times fedsift's |",
        "|---|---|---|---|---|",
    ]
    for row in result["summary"]:
        cells = [NAMES[row["system"]]]
        for key in ("round", "round_ratio", "total", "total_ratio"):
            low, high = row[f"{key}_quartiles"]
            cells.append(f"{row[key]:.2f} ({low:.2f} to {high:.2f})")
        lines.append("| " + " | ".join(cells) + " |")
    about = result["environment"]
    lines += [
        "",
        f"Medians of {result['repeats']} runs each, in turn, with quartiles; {about['device']}, "
        f"torch {about['torch']}, commit {about['commit']}.",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--systems", nargs="+", default=list(NAMES), choices=list(NAMES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--environments", type=Path, default=HERE / "environments")
    parser.add_argument("--dry", action="store_true", help="print, and write no file")
    given = parser.parse_args()
    pythons = {system: interpreter(system, given.environments) for system in given.systems}
    runs = []
    for repeat in range(given.repeats):
        for system, python in pythons.items():
            runs.append(run(system, python, given.rounds))
            last = runs[-1]
            print(
                f"{repeat + 1}/{given.repeats} {NAMES[system]}: {last['total']:.1f} s", flush=True
            )
    result = {
        "environment": environment(RunConfig(device="cpu")),
        "rounds": given.rounds,
        "repeats": given.repeats,
        "summary": summary(runs),
        "runs": runs,
    }
    print(table(result))
    if not given.dry:
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")
        text = README.read_text(encoding="utf-8")
        mark = r"(<!-- peers -->\n).*?(<!-- /peers -->)"
        changed = re.sub(mark, lambda m: f"{m[1]}{table(result)}\n{m[2]}", text, flags=re.DOTALL)
        README.write_text(changed, encoding="utf-8")


if __name__ == "__main__":
    main()
