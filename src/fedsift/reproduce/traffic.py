"""The measured traffic, up and down, to reach a target: the comparison of sift.

There are two targets: the task's own, and a harder one, the best accuracy of FedAdam with the same
seed. Ratios are to FedAdam-SSM in the paper's format: its uplink by the paper's formula, and its
measured downlink. The initial model, four bytes per parameter, is sent to every client by every
method, and is listed separately.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from itertools import groupby
from statistics import fmean, stdev
from typing import Any

from fedsift.reproduce.results import Outcome, environments
from fedsift.runs.compare import megabytes, reached
from fedsift.simulation import Record

Line = Sequence[Outcome]


@dataclass(frozen=True)
class Cost:
    """Megabytes per client, sent and received up to the round that reached a target."""

    round: int
    up: float
    down: float
    up_in_paper_format: float

    @property
    def both(self) -> float:
        """Sum of uplink and downlink."""
        return self.up + self.down

    @classmethod
    def at(cls, record: Record, initial_model: float) -> Cost:
        """Return the traffic up to this round, without the initial model's megabytes."""
        down = record["downlink_bytes"] / 1e6 - initial_model
        return cls(record["round"], megabytes(record), down, record["uplink_bits_paper"] / 8e6)


def cost_to_target(outcome: Outcome, target: float | None) -> Cost | None:
    """Return the traffic of a run to a target; None if it was not reached or there is none."""
    record = None if target is None else reached(outcome.history, target)
    return None if record is None else Cost.at(record, outcome.initial_model)


def accuracies(outcome: Outcome) -> list[float]:
    """Return a run's test accuracy after each round."""
    return [float(record["accuracy"] or 0) for record in outcome.history]


def mean_and_sd(values: Sequence[float]) -> dict[str, float | None]:
    """Return the mean and, of two or more values, the standard deviation.

    >>> mean_and_sd([1.0, 2.0, 3.0]), mean_and_sd([2.0])
    ({'mean': 2.0, 'sd': 1.0}, {'mean': 2.0, 'sd': None})
    """
    return {"mean": fmean(values), "sd": stdev(values) if len(values) > 1 else None}


def summarize_traffic(lines: Iterable[Line]) -> list[dict[str, Any]]:
    """Return one object per line: accuracies, and the traffic to both targets."""
    return [
        summary
        for _, group in groupby(lines, task_and_setting)
        for summary in summarize_task(list(group))
    ]


def task_and_setting(line: Line) -> tuple[str, str]:
    """Return the task and setting that a line is compared within."""
    return line[0].run.task, line[0].run.setting


def summarize_task(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """Summarize the lines of one task and setting."""
    harder = harder_targets(lines)
    found = [summarize_line_traffic(line, harder) for line in lines]
    reference = next((line for line in lines if line[0].run.label == "fedadam-ssm"), ())
    for name, targets in (("target", None), ("harder", harder)):
        with_target = [(o, at) for o in reference if (at := target_of(o, targets)) is not None]
        costs = [cost_to_target(outcome, at) for outcome, at in with_target]
        for summary in found:
            summary[name] |= ratios(summary[name], costs)
    return found


def harder_targets(lines: Iterable[Line]) -> dict[int, float]:
    """Return the best accuracy of FedAdam for each seed."""
    return {
        outcome.run.config.seed: max(accuracies(outcome))
        for line in lines
        for outcome in line
        if outcome.run.label == "fedadam"
    }


def target_of(outcome: Outcome, harder: Mapping[int, float] | None) -> float | None:
    """Return the harder target of a run's seed, or its task's target if ``harder`` is None."""
    return outcome.run.target if harder is None else harder.get(outcome.run.config.seed)


def summarize_line_traffic(line: Line, harder: Mapping[int, float]) -> dict[str, Any]:
    """Return the statistics over a line's seeds."""
    run = line[0].run
    return {
        "task": run.task,
        "setting": run.setting,
        "method": run.label,
        "seeds": [outcome.run.config.seed for outcome in line],
        "rounds": min(len(outcome.history) for outcome in line),
        "diverged": sum(outcome.diverged for outcome in line),
        "first_model": line[0].initial_model,
        "final_accuracy": mean_and_sd([accuracies(outcome)[-1] for outcome in line]),
        "best_accuracy": mean_and_sd([max(accuracies(outcome)) for outcome in line]),
        "target": line_cost(line, None),
        "harder": line_cost(line, harder),
        "environment": environments(line),
    }


def line_cost(line: Line, harder: Mapping[int, float] | None) -> dict[str, Any]:
    """Return the megabytes to a target; None unless every seed that has the target reached it."""
    by_seed = {o.run.config.seed: target_of(o, harder) for o in line}
    targets = [target for target in by_seed.values() if target is not None]
    costs = [cost for o in line if (cost := cost_to_target(o, by_seed[o.run.config.seed]))]
    summary: dict[str, Any] = {
        "accuracy": fmean(targets) if targets else None,
        "reached": len(costs),
        "of": len(targets),
    }
    all_reached = bool(costs) and len(costs) == len(targets)
    for key in ("round", "up", "down", "both"):
        summary[key] = mean_and_sd([getattr(cost, key) for cost in costs]) if all_reached else None
    return summary


def ratios(summary: Mapping[str, Any], reference: Sequence[Cost | None]) -> dict[str, float | None]:
    """Return how many times less traffic than FedAdam-SSM in the paper's format: up, and both."""
    known = [cost for cost in reference if cost]
    if not known or len(known) < len(reference) or summary["up"] is None:
        return {"ratio_up": None, "ratio_both": None}
    up = fmean(cost.up_in_paper_format for cost in known)
    both = fmean(cost.up_in_paper_format + cost.down for cost in known)
    return {
        "ratio_up": up / summary["up"]["mean"] if summary["up"]["mean"] else None,
        "ratio_both": both / summary["both"]["mean"] if summary["both"]["mean"] else None,
    }


COLUMNS = ("round", "up", "down", "up_in_paper_format")


def traffic_csv(lines: Iterable[Line]) -> str:
    """Return a CSV of all runs: traffic to both targets, accuracy, and environment."""
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    places = ("device", "precision", "commit", "corpus")
    by_target = [f"{name}{key}" for name in ("", "harder_") for key in ("target", *COLUMNS)]
    head = ["task", "setting", "method", "seed", *by_target, "best_accuracy", "final_accuracy"]
    writer.writerow([*head, "rounds", "diverged", *places])
    for _, group in groupby(lines, task_and_setting):
        task_lines = list(group)
        harder = harder_targets(task_lines)
        for outcome in (outcome for line in task_lines for outcome in line):
            run, accuracy = outcome.run, accuracies(outcome)
            cells = [run.task, run.setting, run.label, run.config.seed]
            cells += [*target_cells(outcome, None), *target_cells(outcome, harder)]
            cells += [max(accuracy), accuracy[-1], len(accuracy), outcome.diverged]
            cells += [outcome.environment.get(key) for key in places]
            writer.writerow("" if cell is None else cell for cell in cells)
    return text.getvalue()


def target_cells(outcome: Outcome, harder: Mapping[int, float] | None) -> list[Any]:
    """Return a target, and the traffic of the run to it."""
    target = target_of(outcome, harder)
    cost = cost_to_target(outcome, target)
    return [target, *(None if cost is None else getattr(cost, key) for key in COLUMNS)]
