"""Write the results of the runs: learning rates, bytes to a loss, loss for a number of bytes.

    python reproduce/llm/results.py runs/llm reproduce/llm/results

For each task and method, the learning rate (and ε of Adam) is the one with the lowest loss on the
validation data in the last round of seed 0. All else is measured on the test data. The files are
llm-tuning.csv, llm-curves.csv, llm-comparison.csv, and a figure per task.

The bytes of both ways include the initial adapters, which every client downloads once. A client
could draw them itself, because LoRA's A is random and its B is 0: columns that end with "from_seed"
leave their download out.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

FEDAVG = ("fedavg-adam", "fedavg-sgd")
"""The target of a task is the lowest loss that the better of these reaches."""
BUDGETS = (1.0, 10.0, 100.0)
"""Uplink per client, in MB."""
SETTINGS = re.compile(r"lr-([^-]+(?:e-\d+)?)(?:-eps-(.+))?$")
Record = dict[str, Any]
Row = dict[str, Any]


@dataclass(frozen=True)
class Found:
    """One run: its records that have a loss, and its settings."""

    task: str
    method: str
    lr: float
    eps: str
    seed: int
    records: Sequence[Record]
    is_finished: bool
    commit: str

    @property
    def key(self) -> tuple[str, str]:
        """The task and the method."""
        return self.task, self.method

    @property
    def settings(self) -> tuple[float, str]:
        """What is chosen on the validation data."""
        return self.lr, self.eps

    @property
    def initial(self) -> float:
        """The download of the initial model in MB, which no method compresses."""
        return both(self.records[0])

    @property
    def validation(self) -> float:
        """The loss on the validation data in the last round."""
        return float(self.records[-1]["validation_loss"])


def main(folder: str, results: str) -> None:
    """Read the runs below a folder, and write all files to another."""
    target, runs = Path(results), list(read_runs(Path(folder)))
    best = chosen(runs)
    write(target / "llm-tuning.csv", tuning_rows(runs, best))
    final = [run for run in runs if best.get(run.key) == run.settings]
    write(target / "llm-curves.csv", curve_rows(final))
    write(target / "llm-comparison.csv", result_rows(final))
    for task in sorted({run.task for run in final}):
        shown = [run for run in final if run.task == task and run.seed == 0]
        draw(target / f"llm-{task}", task, shown)


def read_runs(folder: Path) -> Iterator[Found]:
    """Yield every run that was evaluated after its first round."""
    for file in sorted(folder.glob("*/*/lr-*/seed-*/metrics.jsonl")):
        task, method, settings, seed = file.parent.relative_to(folder).parts
        match = SETTINGS.match(settings)
        records = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
        records = [record for record in records if record.get("validation_loss") is not None]
        if match is None or len(records) < 2:
            continue
        summary = file.with_name("summary.json")
        about = json.loads(summary.read_text("utf-8")) if summary.exists() else {}
        commit = about.get("environment", {}).get("commit", "")
        lr, eps = float(match[1]), match[2] or ""
        number = int(seed.removeprefix("seed-"))
        yield Found(task, method, lr, eps, number, records, bool(about), commit)


def chosen(runs: Iterable[Found]) -> dict[tuple[str, str], tuple[float, str]]:
    """Return the settings of each task and method with the lowest validation loss."""
    best: dict[tuple[str, str], Found] = {}
    for run in runs:
        if run.seed == 0 and run.is_finished:
            known = best.setdefault(run.key, run)
            best[run.key] = min(known, run, key=lambda run: run.validation)
    return {key: run.settings for key, run in best.items()}


def tuning_rows(
    runs: Iterable[Found], best: Mapping[tuple[str, str], tuple[float, str]]
) -> Iterator[Row]:
    """Yield a row for each run of seed 0."""
    for run in runs:
        if run.seed == 0:
            yield {
                "task": run.task,
                "method": run.method,
                "lr": run.lr,
                "eps": run.eps,
                "rounds": run.records[-1]["round"],
                "validation_loss": round(run.validation, 4),
                "test_loss": round(run.records[-1]["loss"], 4),
                "is_chosen": best.get(run.key) == run.settings,
                "commit": run.commit,
            }


def curve_rows(runs: Iterable[Found]) -> Iterator[Row]:
    """Yield a row for each evaluated round of the chosen settings."""
    for run in runs:
        for record in run.records:
            yield {
                "task": run.task,
                "method": run.method,
                "seed": run.seed,
                "round": record["round"],
                "bytes_up": round(record["uplink_bytes"]),
                "bytes_down": round(record["downlink_bytes"]),
                "loss": round(record["loss"], 5),
                "perplexity": round(record["perplexity"], 4),
                **{
                    name: round(record[f"client_perplexity_{name}"], 4)
                    for name in ("mean", "worst", "p90", "std")
                },
            }


def result_rows(runs: Sequence[Found]) -> Iterator[Row]:
    """Yield a row for each task and method: the means over the seeds."""
    for key in dict.fromkeys(run.key for run in runs):
        seeds = [run for run in runs if run.key == key]
        target = target_of(key[0], runs)
        hits = [first_below(run, target) for run in seeds]
        pairs = list(zip(hits, seeds, strict=True))
        yield {
            "task": key[0],
            "method": key[1],
            "lr": seeds[0].lr,
            "eps": seeds[0].eps,
            "seeds": len(seeds),
            "rounds": min(run.records[-1]["round"] for run in seeds),
            "last_loss": mean([run.records[-1]["loss"] for run in seeds]),
            "last_perplexity": mean([run.records[-1]["perplexity"] for run in seeds]),
            "worst_client": mean([run.records[-1]["client_perplexity_worst"] for run in seeds]),
            "target": round(target, 4) if target else None,
            "mb_up_to_target": mean([hit and up(hit) for hit in hits]),
            "mb_both_to_target": mean([hit and both(hit) for hit in hits]),
            "mb_both_to_target_from_seed": mean(
                [hit and both(hit) - r.initial for hit, r in pairs]
            ),
            **{
                f"loss_at_{budget:g}_mb_{name}": mean([loss_within(r, budget, size) for r in seeds])
                for name, size in (("up", up), ("both", both))
                for budget in BUDGETS
            },
        }


def target_of(task: str, runs: Iterable[Found]) -> float | None:
    """Return the lowest loss that federated averaging reaches, as a mean over the seeds."""
    by_method = [
        [min(r["loss"] for r in run.records) for run in runs if run.key == (task, method)]
        for method in FEDAVG
    ]
    return min((fmean(losses) for losses in by_method if losses), default=None)


def first_below(run: Found, target: float | None) -> Record | None:
    """Return the first evaluated round whose loss is at most the target."""
    return next((r for r in run.records[1:] if target and r["loss"] <= target), None)


def loss_within(run: Found, budget: float, size: Any) -> float | None:
    """Return the loss in the last evaluated round within a budget; None if there is none."""
    within = [r["loss"] for r in run.records[1:] if size(r) <= budget]
    return within[-1] if within else None


def up(record: Record) -> float:
    """Return the uplink per client in MB."""
    return float(record["uplink_bytes"]) / 1e6


def both(record: Record) -> float:
    """Return the uplink and the downlink per client in MB."""
    return up(record) + float(record["downlink_bytes"]) / 1e6


def mean(values: Sequence[float | None]) -> float | None:
    """Return the mean to five digits; None if a seed has no value."""
    known = [value for value in values if value is not None]
    return float(f"{fmean(known):.5g}") if known and len(known) == len(values) else None


def write(path: Path, rows: Iterable[Row]) -> None:
    """Write rows as CSV."""
    found = list(rows)
    if not found:
        return
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(found[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)
    print(path)


def draw(path: Path, task: str, runs: Sequence[Found]) -> None:
    """Draw the test loss against the bytes up, and against those of both ways."""
    import matplotlib
    from matplotlib import pyplot as plt

    if not runs:
        return
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
    sizes = ((up, "uplink per client, MB"), (both, "uplink and downlink per client, MB"))
    for axis, (size, title) in zip(axes, sizes, strict=True):
        for n, run in enumerate(sorted(runs, key=lambda run: run.method)):
            shown = run.records[1:]
            axis.plot(
                [size(r) for r in shown], [r["loss"] for r in shown],
                label=run.method, color=plt.get_cmap("tab20")(n), marker=".", markersize=4,
            )  # fmt: skip
        axis.set(xscale="log", xlabel=title)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("test loss")
    axes[1].legend(fontsize="small", ncols=2)
    figure.suptitle(f"SmolLM2-135M with LoRA on {task}, 20 clients")
    matplotlib.rcParams["svg.hashsalt"] = "fedsift"  # the same file from the same runs
    for suffix in ("png", "svg"):
        file = path.with_suffix(f".{suffix}")
        figure.savefig(file, dpi=130, metadata={"Date": None} if suffix == "svg" else None)
        print(file)
    plt.close(figure)


if __name__ == "__main__":
    main(*sys.argv[1:])
