"""Train the variants of sift and other methods on the paper's tasks, and tabulate their traffic.

    python reproduce/sift/ablate.py --tasks cnn-fashion-mnist --settings iid,noniid --device cuda

It needs only fedsift's core dependencies: torch, numpy, safetensors, constriction, tomli-w. The
table OUT/ablation.csv is rewritten after each run. A job that is killed loses at most one run, and
the same command continues it. Runs that are in that table or in the one next to this file are
skipped.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

from variants import VARIANTS

from fedsift.reproduce.experiments import Experiment, read_pinned
from fedsift.reproduce.parallel import BatchOptions, execute_runs
from fedsift.reproduce.plan import PlannedRun, Selection, plan
from fedsift.reproduce.results import Outcome, read_outcome
from fedsift.reproduce.runner import is_finished
from fedsift.runs.compare import reached
from fedsift.runs.disk import replace_file
from fedsift.simulation import Record

TABLE = "ablation.csv"
HERE = Path(__file__).parent
TRAFFIC = ("round", "uplink_bytes", "downlink_bytes")
HEADER = (
    "task", "setting", "variant", "seed", "clients", "rounds", "final_accuracy", "best_accuracy",
    "uplink_bytes", "downlink_bytes", "target", *(f"{name}_to_target" for name in TRAFFIC),
    "harder_target", *(f"{name}_to_harder" for name in TRAFFIC), "diverged", "seconds", "device",
    "precision", "commit",
)  # fmt: skip
Row = dict[str, str]
Key = tuple[str, ...]


def main(words: Sequence[str] | None = None) -> None:
    """Parse the arguments and execute all runs that are not in the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", default="cnn-fashion-mnist", help="separated by commas")
    parser.add_argument("--settings", default="iid,noniid", help="separated by commas")
    parser.add_argument("--variants", default="", help="separated by semicolons; default: all")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--rounds", type=int, help="rounds per run; default: those of the task")
    parser.add_argument("--quick", action="store_true", help="run small versions of the tasks")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--out", type=Path, default=Path("runs/sift"))
    parser.add_argument("--jobs", type=int, default=1, help="parallel runs on one device")
    arguments = parser.parse_args(words)
    try:
        options = BatchOptions(arguments.out, jobs=arguments.jobs)
        runs = list(planned_runs(arguments))
    except ValueError as problem:
        parser.error(str(problem))
    ablate(runs, options)


def planned_runs(arguments: argparse.Namespace) -> Iterator[PlannedRun]:
    """Yield the selected runs, FedAdam first, as its best accuracy is the harder target."""
    names = arguments.variants.split(";") if arguments.variants else list(VARIANTS)
    tasks = checked("task", arguments.tasks.split(","), read_pinned("tasks")["tasks"])
    settings = checked("setting", arguments.settings.split(","), read_pinned("tasks")["settings"])
    selection = Selection(
        seeds=arguments.seeds, rounds=arguments.rounds, quick=arguments.quick,
        device=arguments.device, precision=arguments.precision,
    )  # fmt: skip
    for task, setting in product(tasks, settings):
        for name in sorted(checked("variant", names, VARIANTS), key=list(VARIANTS).index):
            line = {"algorithm": "sift-variant", **VARIANTS[name]}
            experiment = Experiment("sift", "sift", "curves", "mibit", (task,), (setting,), (line,))
            for run in plan(experiment, selection):
                yield replace(run, label=name)


def checked(what: str, names: Sequence[str], known: Iterable[str]) -> Sequence[str]:
    """Return the names; raise ValueError if one is unknown."""
    for name in names:
        if name not in known:
            raise ValueError(f"unknown {what} {name!r}; choose from: {'; '.join(known)}")
    return names


def ablate(runs: Sequence[PlannedRun], options: BatchOptions) -> None:
    """Execute the runs that are not in the table, and write the table after each run."""
    out = options.out
    out.mkdir(parents=True, exist_ok=True)
    rows = {key_of(row): row for path in (HERE / TABLE, out / TABLE) for row in rows_in(path)}
    missing = [run for run in runs if not is_in(rows.get(key(run)), run)]
    failed = 0
    for n, (run, status) in enumerate(execute_runs(missing, options), 1):
        failed += status.has_failed
        print(f"{n}/{len(missing)} {run.path}: {status.text}", file=sys.stderr, flush=True)
        for done in missing:  # all rows again, as FedAdam's best sets the harder target
            if is_finished(done, out):
                rows[key(done)] = row_of(read_outcome(done, out), rows)
        write(rows.values(), out / TABLE)
    print(out / TABLE)
    if failed:
        sys.exit(f"{failed} of {len(missing)} runs failed; the same command retries them")


def key(run: PlannedRun) -> Key:
    """The key that identifies a run."""
    config = run.config
    numbers = str(config.seed), str(config.clients), config.precision
    return run.task, run.setting, run.label, *numbers


def key_of(row: Row) -> Key:
    """The key of the run in a row."""
    names = ("task", "setting", "variant", "seed", "clients", "precision")
    return tuple(row[name] for name in names)


def is_in(row: Row | None, run: PlannedRun) -> bool:
    """Whether a row has the result of the complete run."""
    return row is not None and (
        row["diverged"] == "True" or int(row["rounds"]) >= run.config.rounds
    )


def row_of(outcome: Outcome, rows: dict[Key, Row]) -> Row:
    """The row with the result of a run."""
    run, history = outcome.run, outcome.history
    fedadam = rows.get(key(replace(run, label="fedadam")), {})
    best = max((float(r["accuracy"] or 0) for r in history), default=0.0)
    harder = best if run.label == "fedadam" else float(fedadam.get("best_accuracy") or "nan")
    last: Record = history[-1] if history else {}
    cells: dict[str, Any] = {
        "task": run.task,
        "setting": run.setting,
        "variant": run.label,
        "seed": run.config.seed,
        "clients": run.config.clients,
        "rounds": len(history),
        "final_accuracy": last.get("accuracy"),
        "best_accuracy": best,
        "uplink_bytes": last.get("uplink_bytes"),
        "downlink_bytes": last.get("downlink_bytes"),
        "target": run.target,
        **traffic(history, run.target, "target"),
        "harder_target": harder if harder == harder else None,
        **traffic(history, harder, "harder"),
        "diverged": outcome.diverged,
        "seconds": last.get("seconds"),
        **{name: outcome.environment.get(name) for name in ("device", "precision", "commit")},
    }
    return {name: "" if cells[name] is None else str(cells[name]) for name in HEADER}


def traffic(history: Sequence[Record], target: float, name: str) -> dict[str, Any]:
    """The round that reached the target, and the traffic up to it."""
    record = reached(history, target) or {}
    return {f"{column}_to_{name}": record.get(column) for column in TRAFFIC}


def rows_in(path: Path) -> list[Row]:
    """The rows of a table; none if it does not exist."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write(rows: Any, path: Path) -> None:
    """Replace the whole table atomically."""
    text = StringIO()
    writer = csv.DictWriter(text, HEADER, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    replace_file(path, text.getvalue().encode())


if __name__ == "__main__":
    main()
