"""What a method really sends, up and down, until it reaches a target; for the comparison of sift.

There are two targets: the task's own, and a harder one, the best accuracy that FedAdam came to with
the same seed. FedAdam-SSM in the paper's format is what the others are measured by: its uplink by
the paper's formula, and its downlink as it is sent. The first model, four bytes a parameter, comes
down whatever the method, and is told by itself.
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
    """Megabytes that a client had sent and received in the round that reached a target."""

    round: int
    up: float
    down: float
    up_in_paper_format: float

    @property
    def both(self) -> float:
        """Up and down together."""
        return self.up + self.down

    @classmethod
    def at(cls, record: Record, first_model: float) -> Cost:
        """After that round; what came down without the first model."""
        down = record["downlink_bytes"] / 1e6 - first_model
        return cls(record["round"], megabytes(record), down, record["uplink_bits_paper"] / 8e6)


def cost_to(outcome: Outcome, target: float | None) -> Cost | None:
    """What a run took to its target; None if it did not get there, or if there is no target."""
    then = None if target is None else reached(outcome.history, target)
    return None if then is None else Cost.at(then, first_model(outcome))


def first_model(outcome: Outcome) -> float:
    """Megabytes of the first model's values."""
    return 4 * outcome.parameters / 1e6


def accuracies(outcome: Outcome) -> list[float]:
    """A run's test accuracy, round by round."""
    return [float(record["accuracy"] or 0) for record in outcome.history]


def mean_and_sd(values: Sequence[float]) -> dict[str, float | None]:
    """The mean and, of two or more, the standard deviation.

    >>> mean_and_sd([1.0, 2.0, 3.0]), mean_and_sd([2.0])
    ({'mean': 2.0, 'sd': 1.0}, {'mean': 2.0, 'sd': None})
    """
    return {"mean": fmean(values), "sd": stdev(values) if len(values) > 1 else None}


def costs(lines: Iterable[Line]) -> list[dict[str, Any]]:
    """Each line in one object: accuracies, and the traffic to both targets."""
    return [
        told for _, own in groupby(lines, task_and_setting) for told in costs_of_one_task(list(own))
    ]


def task_and_setting(line: Line) -> tuple[str, str]:
    """What lines are compared within."""
    return line[0].run.task, line[0].run.setting


def costs_of_one_task(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """The lines of one task and setting."""
    harder = harder_targets(lines)
    found = [summary_of(line, harder) for line in lines]
    measure = next((line for line in lines if line[0].run.label == "fedadam-ssm"), ())
    for name, targets in (("target", None), ("harder", harder)):
        with_target = [(o, at) for o in measure if (at := target_of(o, targets)) is not None]
        paper = [cost_to(outcome, at) for outcome, at in with_target]
        for told in found:
            told[name] |= ratios(told[name], paper)
    return found


def harder_targets(lines: Iterable[Line]) -> dict[int, float]:
    """By seed, the best accuracy of FedAdam."""
    return {
        outcome.run.config.seed: max(accuracies(outcome))
        for line in lines
        for outcome in line
        if outcome.run.label == "fedadam"
    }


def target_of(outcome: Outcome, harder: Mapping[int, float] | None) -> float | None:
    """A run's target: its task's, or that of its seed among the harder ones."""
    return outcome.run.target if harder is None else harder.get(outcome.run.config.seed)


def summary_of(line: Line, harder: Mapping[int, float]) -> dict[str, Any]:
    """A line's seeds as one."""
    run = line[0].run
    return {
        "task": run.task,
        "setting": run.setting,
        "method": run.label,
        "seeds": [outcome.run.config.seed for outcome in line],
        "rounds": min(len(outcome.history) for outcome in line),
        "diverged": sum(outcome.diverged for outcome in line),
        "first_model": first_model(line[0]),
        "final_accuracy": mean_and_sd([accuracies(outcome)[-1] for outcome in line]),
        "best_accuracy": mean_and_sd([max(accuracies(outcome)) for outcome in line]),
        "target": cost_of_line(line, None),
        "harder": cost_of_line(line, harder),
        "environment": environments(line),
    }


def cost_of_line(line: Line, harder: Mapping[int, float] | None) -> dict[str, Any]:
    """Megabytes to a target, given only if every seed that has the target reached it."""
    asked = {o.run.config.seed: target_of(o, harder) for o in line}
    wanted = [target for target in asked.values() if target is not None]
    found = [cost for o in line if (cost := cost_to(o, asked[o.run.config.seed]))]
    told: dict[str, Any] = {
        "accuracy": fmean(wanted) if wanted else None,
        "reached": len(found),
        "of": len(wanted),
    }
    whole = bool(found) and len(found) == len(wanted)
    for key in ("round", "up", "down", "both"):
        told[key] = mean_and_sd([getattr(cost, key) for cost in found]) if whole else None
    return told


def ratios(told: Mapping[str, Any], measure: Sequence[Cost | None]) -> dict[str, float | None]:
    """How many times the traffic FedAdam-SSM takes in the paper's format, up and in all."""
    known = [cost for cost in measure if cost]
    if not known or len(known) < len(measure) or told["up"] is None:
        return {"ratio_up": None, "ratio_both": None}
    up = fmean(cost.up_in_paper_format for cost in known)
    both = fmean(cost.up_in_paper_format + cost.down for cost in known)
    return {
        "ratio_up": up / told["up"]["mean"] if told["up"]["mean"] else None,
        "ratio_both": both / told["both"]["mean"] if told["both"]["mean"] else None,
    }


COLUMNS = ("round", "up", "down", "up_in_paper_format")


def costs_csv(lines: Iterable[Line]) -> str:
    """Every run: its traffic to both targets, its accuracy, and where it was made."""
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    made = ("device", "precision", "commit", "corpus")
    by_target = [f"{name}{key}" for name in ("", "harder_") for key in ("target", *COLUMNS)]
    head = ["task", "setting", "method", "seed", *by_target, "best_accuracy", "final_accuracy"]
    writer.writerow([*head, "rounds", "diverged", *made])
    for _, own in groupby(lines, task_and_setting):
        here = list(own)
        harder = harder_targets(here)
        for outcome in (each for line in here for each in line):
            run, accuracy = outcome.run, accuracies(outcome)
            cells = [run.task, run.setting, run.label, run.config.seed]
            cells += [*target_cells(outcome, None), *target_cells(outcome, harder)]
            cells += [max(accuracy), accuracy[-1], len(accuracy), outcome.diverged]
            cells += [outcome.environment.get(key) for key in made]
            writer.writerow("" if cell is None else cell for cell in cells)
    return text.getvalue()


def target_cells(outcome: Outcome, harder: Mapping[int, float] | None) -> list[Any]:
    """A target, and what the run took to it."""
    target = target_of(outcome, harder)
    cost = cost_to(outcome, target)
    return [target, *(None if cost is None else getattr(cost, key) for key in COLUMNS)]
