"""Train sift_common with secure aggregation, and write its table in docs/explanation/sift.md.

    python reproduce/sift/common.py --device cuda --out runs/common    # train what is missing
    python reproduce/sift/common.py --no-run --out runs/common         # write from what there is

With ``--stop-at-target``, runs end at their target, and final accuracies are unknown.

Seeds 0, 1 and 2 are those of the committed runs of the other methods. Seeds 10, 11 and 12 were
never looked at before; FedAdam-SSM trains with them, too. Every run with ``--secure`` is complete:
its messages are built and counted in all rounds. Runs in the clear with the same seeds have the
same accuracy and loss in every round, to the last digit; this script checks it.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

from page import PAGE, amount, between, percent, table

from fedsift.reproduce.experiments import Experiment
from fedsift.reproduce.parallel import BatchOptions, execute_runs
from fedsift.reproduce.plan import PlannedRun, Selection, plan
from fedsift.reproduce.runner import is_finished
from fedsift.runs.compare import reached
from fedsift.runs.folder import RunFolder

HERE = Path(__file__).parent
TABLE, OTHERS = HERE / "common.csv", HERE.parent / "results" / "sift.csv"
CNN, VGG = "cnn-fashion-mnist", "vgg11-cifar10"
TASKS = {CNN: "CNN", VGG: "VGG-11"}
SETTINGS = {"iid": "IID", "noniid": "Dirichlet 0.1"}
FRESH_SEEDS = (10, 11, 12)
SECURE = "sift-common-secure"
Row = dict[str, Any]


@dataclass(frozen=True)
class FreshRun(PlannedRun):
    """A run that is not one of the committed comparison: another seed, or secure aggregation."""

    @property
    def path(self) -> Path:
        """The run's folder: its label says what it is."""
        return Path(self.task, self.setting, self.label, f"seed-{self.config.seed}")


def main() -> None:
    """Train unless told not to, check the runs, and write the table and the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--no-run", action="store_true")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=Path("runs/reproduce"))
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--stop-at-target", action="store_true")
    parser.add_argument("--tasks", default=f"{CNN},{VGG}")
    arguments = parser.parse_args()
    runs = list(planned(arguments.device, arguments.tasks.split(",")))
    stops, out = arguments.stop_at_target, arguments.out
    if not arguments.no_run:
        left = [run for run in runs if not is_finished(run, out, stops)]
        for run, status in execute_runs(left, BatchOptions(out, stops, jobs=arguments.jobs)):
            print(run.path, status.text, flush=True)
    rows = [row_of(run, out) for run in runs if is_finished(run, out, stop_at_target=True)]
    check_same_bits(runs, out)
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    write_page(rows)


def planned(device: str, tasks: Sequence[str]) -> Iterator[PlannedRun]:
    """Yield all runs: VGG-11 first, as it takes longest."""
    names = ("sift-common", "fedadam-ssm")
    lines = tuple({"algorithm": name} for name in names)
    experiment = replace(Experiment.load("sift"), lines=lines)
    if VGG in tasks:
        precision = "fp32" if device == "cpu" else "bf16"
        chosen = Selection(VGG, "iid", ("sift-common",), 1, None, False, device, precision)
        for run in plan(experiment, chosen):
            yield secure(run)
            yield run
    if CNN not in tasks:
        return
    chosen = Selection(CNN, None, ("sift-common",), device=device)
    for run in plan(experiment, chosen):
        yield secure(run)
        yield run
    for method in ("sift-common", "fedadam-ssm"):
        for run in plan(experiment, replace(chosen, methods=(method,), seeds=1)):
            for seed in FRESH_SEEDS:
                fresh = replace(run, config=replace(run.config, seed=seed))
                yield secure(fresh) if method == "sift-common" else fresh


def secure(run: PlannedRun) -> PlannedRun:
    """Return the same run with secure aggregation."""
    return FreshRun(run.task, run.setting, SECURE, replace(run.config, secure=True), run.target)


def row_of(run: PlannedRun, out: Path) -> Row:
    """Return the result of a run; traffic is in bytes per client, without the initial model."""
    folder = RunFolder(out / run.path)
    history, summary = folder.history(), folder.summary()
    hit = reached(history, run.target)
    is_whole = history[-1]["round"] == run.config.rounds
    return {
        "task": run.task,
        "setting": run.setting,
        "method": run.label,
        "seed": run.config.seed,
        "target": run.target,
        "round": hit and hit["round"],
        "up": hit and round(hit["uplink_bytes"]),
        "down": hit and round(hit["downlink_bytes"] - history[0]["downlink_bytes"]),
        "up_in_all": round(history[-1]["uplink_bytes"]),
        "rounds": history[-1]["round"],
        "final_accuracy": round(history[-1]["accuracy"], 4) if is_whole else "",
        "device": summary["environment"]["device"],
        "precision": summary["precision"],
        "commit": summary["environment"]["commit"],
    }


def check_same_bits(runs: Sequence[PlannedRun], out: Path) -> None:
    """Compare every secure run with its run in the clear, as far as both go."""
    for run in runs:
        clear = out / run.task / run.setting / "sift-common" / f"seed-{run.config.seed}"
        if run.label != SECURE or not RunFolder(clear).summary_file.exists():
            continue
        ours, theirs = (
            [(record["accuracy"], record["loss"]) for record in folder.history()]
            for folder in (RunFolder(out / run.path), RunFolder(clear))
        )
        both = min(len(ours), len(theirs))
        assert ours[:both] == theirs[:both], f"{run.path} differs from the run in the clear"


def write_page(rows: Sequence[Row]) -> None:
    """Write the table into the documentation."""
    page = between(PAGE.read_text("utf-8"), "common", pieces(rows))
    PAGE.write_text(page, encoding="utf-8")


def pieces(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the table, and where it comes from."""
    yield (
        "Traffic to the target per client, without the initial model, as means over the seeds. "
        "The ratio is FedAdam-SSM's uplink in the clear, in the same codec, to the uplink of the "
        "row, with the same seeds; in parentheses, for each seed."
    )
    yield table(lines(rows))
    about = sorted({f"{row['device']}, {row['precision']}, {row['commit']}" for row in rows})
    yield (
        "The final accuracy is that after 150 rounds (CNN) or 60 (VGG-11); – if a run ended at its "
        f"target. `sift-common`: {'; '.join(about)}; "
        "the commits differ in nothing that these runs use. The other rows are those of "
        "[the comparison](#comparison-with-other-methods)."
    )


def lines(rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each task, setting, group of seeds and method."""
    yield (
        "task, target", "seeds", "method", "reached", "rounds", "up", "down",
        "FedAdam-SSM's up / up", "final accuracy",
    )  # fmt: skip
    known = [*rows, *others()]
    for task, setting in ((CNN, "iid"), (CNN, "noniid"), (VGG, "iid")):
        for seeds in ((0, 1, 2), FRESH_SEEDS):
            for method in ("fedadam-ssm", "sift", "sift-common", SECURE):
                group = [
                    row
                    for row in known
                    if (row["task"], row["setting"], row["method"]) == (task, setting, method)
                    and int(row["seed"]) in seeds
                ]
                if group and (task != VGG or int(group[0]["seed"]) in seeds):
                    yield line_of(group, known)


def line_of(group: Sequence[Row], known: Sequence[Row]) -> tuple[str, ...]:
    """Return the line of some seeds of a method."""
    first = group[0]
    unit = "MB" if first["task"] == VGG else "kB"
    hits = [row for row in group if row["up"]]
    whole = [float(row["final_accuracy"]) for row in group if row["final_accuracy"]]
    name = "`sift-common --secure`" if first["method"] == SECURE else f"`{first['method']}`"
    setting = SETTINGS[first["setting"]]
    return (
        f"{TASKS[first['task']]}, {setting}, {percent(float(first['target']))}",
        ", ".join(str(row["seed"]) for row in group), name, f"{len(hits)} of {len(group)}",
        f"{fmean(float(row['round']) for row in hits):.1f}" if hits else "–",
        *(f"{mean_of(hits, key, unit)} {unit}" if hits else "–" for key in ("up", "down")),
        "–" if first["method"] == "fedadam-ssm" or not hits else ratios_of(hits, known),
        percent(fmean(whole)) if len(whole) == len(group) else "–",
    )  # fmt: skip


def mean_of(rows: Sequence[Row], key: str, unit: str) -> str:
    """Return the mean traffic of some runs."""
    return amount(fmean(float(row[key]) for row in rows), unit)


def ratios_of(rows: Sequence[Row], known: Sequence[Row]) -> str:
    """Return how many times more FedAdam-SSM sends up: for all seeds together, and for each."""
    theirs = [bytes_of_ssm(row, known) for row in rows]
    ours = [float(row["up"]) for row in rows]
    each = ", ".join(f"{a / b:.1f}" for a, b in zip(theirs, ours, strict=True))
    whole = f"{sum(theirs) / sum(ours):.1f}"
    return f"{whole} ({each})" if len(rows) > 1 else whole


def bytes_of_ssm(row: Row, known: Sequence[Row]) -> float:
    """Return what FedAdam-SSM sends up in the clear with the same task and seed."""
    same = ("task", "setting", "seed")
    return next(
        float(other["up"])
        for other in known
        if other["method"] == "fedadam-ssm" and all(str(other[k]) == str(row[k]) for k in same)
    )


def others() -> list[Row]:
    """Return the committed runs of the other methods; traffic in bytes."""
    with OTHERS.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["method"] in ("fedadam-ssm", "sift")]
    return [
        row | {k: float(row[k]) * 1e6 if row[k] else "" for k in ("up", "down")} for row in rows
    ]


if __name__ == "__main__":
    main()
