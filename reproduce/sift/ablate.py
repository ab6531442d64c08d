"""Train sift's variants and competitors on the paper's tasks, and tabulate their traffic.

    python reproduce/sift/ablate.py --tasks cnn-fashion-mnist --settings iid,noniid --device cuda

It needs only the dependencies of training: torch, numpy, safetensors, constriction, tomli-w.
The table OUT/ablation.csv is rewritten after each run, so a killed job loses at most one run, and
the same command continues. Runs that are in that table, or in the committed one, are skipped.
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
    """Parse, and execute every run that is not in the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", default="cnn-fashion-mnist", help="separated by commas")
    parser.add_argument("--settings", default="iid,noniid", help="separated by commas")
    parser.add_argument("--variants", default="", help="separated by semicolons; all by default")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--rounds", type=int, help="rounds of every run; as pinned by default")
    parser.add_argument("--quick", action="store_true", help="the tasks' small versions")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--out", type=Path, default=Path("runs/sift"))
    parser.add_argument(
        "--jobs", type=int, default=1, help="runs to execute in parallel on one device"
    )
    given = parser.parse_args(words)
    try:
        options = BatchOptions(given.out, jobs=given.jobs)
        runs = list(planned(given))
    except ValueError as problem:
        parser.error(str(problem))
    ablate(runs, options)


def planned(given: argparse.Namespace) -> Iterator[PlannedRun]:
    """Yield the selected runs, FedAdam's first: its best accuracy is the harder target."""
    names = given.variants.split(";") if given.variants else list(VARIANTS)
    tasks = checked("task", given.tasks.split(","), read_pinned("tasks")["tasks"])
    settings = checked("setting", given.settings.split(","), read_pinned("tasks")["settings"])
    selection = Selection(
        seeds=given.seeds, rounds=given.rounds, quick=given.quick, device=given.device,
        precision=given.precision,
    )  # fmt: skip
    for task, setting in product(tasks, settings):
        for name in sorted(checked("variant", names, VARIANTS), key=list(VARIANTS).index):
            line = {"algorithm": "sift-variant", **VARIANTS[name]}
            experiment = Experiment("sift", "sift", "curves", "mibit", (task,), (setting,), (line,))
            for run in plan(experiment, selection):
                yield replace(run, label=name)


def checked(what: str, names: Sequence[str], known: Iterable[str]) -> Sequence[str]:
    """Return the names, or raise ValueError if one is unknown."""
    for name in names:
        if name not in known:
            raise ValueError(f"unknown {what} {name!r}; choose from: {'; '.join(known)}")
    return names


def ablate(runs: Sequence[PlannedRun], options: BatchOptions) -> None:
    """Execute the runs that are not in the table, and rewrite the table after each."""
    out = options.out
    out.mkdir(parents=True, exist_ok=True)
    rows = {key_of(row): row for path in (HERE / TABLE, out / TABLE) for row in rows_in(path)}
    missing = [run for run in runs if not is_in(rows.get(key(run)), run)]
    failed = 0
    for n, (run, status) in enumerate(execute_runs(missing, options), 1):
        failed += status.has_failed
        print(f"{n}/{len(missing)} {run.path}: {status.text}", file=sys.stderr, flush=True)
        for finished in missing:  # all of them: FedAdam's best is the harder target of the others
            if is_finished(finished, out):
                rows[key(finished)] = row_of(read_outcome(finished, out), rows)
        write(rows.values(), out / TABLE)
    print(out / TABLE)
    if failed:
        sys.exit(f"{failed} of {len(missing)} runs failed; the same command retries them")


def key(run: PlannedRun) -> Key:
    """Return the values that identify a run."""
    config = run.config
    numbers = str(config.seed), str(config.clients), config.precision
    return run.task, run.setting, run.label, *numbers


def key_of(row: Row) -> Key:
    """Return the values that identify a row's run."""
    names = ("task", "setting", "variant", "seed", "clients", "precision")
    return tuple(row[name] for name in names)


def is_in(row: Row | None, run: PlannedRun) -> bool:
    """Return whether a row covers all rounds of a run."""
    return row is not None and (
        row["diverged"] == "True" or int(row["rounds"]) >= run.config.rounds
    )


def row_of(outcome: Outcome, rows: dict[Key, Row]) -> Row:
    """Return a run's row."""
    run, history = outcome.run, outcome.history
    fedadam = rows.get(key(replace(run, label="fedadam")), {})
    own = max((float(r["accuracy"] or 0) for r in history), default=0.0)
    harder = own if run.label == "fedadam" else float(fedadam.get("best_accuracy") or "nan")
    last: Record = history[-1] if history else {}
    cells: dict[str, Any] = {
        "task": run.task,
        "setting": run.setting,
        "variant": run.label,
        "seed": run.config.seed,
        "clients": run.config.clients,
        "rounds": len(history),
        "final_accuracy": last.get("accuracy"),
        "best_accuracy": own,
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
    """Return the round that reached the target, and the traffic up to it."""
    record = reached(history, target) or {}
    return {f"{key}_to_{name}": record.get(key) for key in TRAFFIC}


def rows_in(path: Path) -> list[Row]:
    """Return a table's rows; none if there is no table yet."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write(rows: Any, path: Path) -> None:
    """Write the table atomically."""
    text = StringIO()
    writer = csv.DictWriter(text, HEADER, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    replace_file(path, text.getvalue().encode())


if __name__ == "__main__":
    main()
