"""The tables that ``fedsift reproduce`` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

from fedsift.cli.terminal import plain_table
from fedsift.reproduce.experiments import split_names

if TYPE_CHECKING:
    from fedsift.reproduce.plan import Selection


def is_selected(line: dict[str, Any], selection: Selection, has_all_settings: bool = False) -> bool:
    """Return whether a line belongs to the selected tasks and settings.

    >>> from fedsift.reproduce.plan import Selection
    >>> is_selected({"task": "char-lm", "setting": "iid"}, Selection(task="char-lm,other"))
    True
    """
    settings = None if has_all_settings else selection.setting
    is_task = selection.task is None or line["task"] in split_names(selection.task)
    return is_task and (settings is None or line["setting"] in split_names(settings))


def paper_table(lines: Sequence[dict[str, Any]], title: str) -> Table:
    """Return Table 1 for one task and setting, next to the paper's own numbers."""
    table = plain_table(f"{title}: Mibit per client to {100 * lines[0]['target']:.1f} %")
    add_columns(table, ("method", "Mibit", "ratio", "seeds", "rounds", "paper", "ratio", "best %"))
    for line in lines:
        reached = f"{line['reached']}/{len(line['seeds'])}"
        ours = number_text(line["mibit"], "∞")
        paper = number_text(line["paper_mibit"], "∞" if line["in_paper"] else "–")
        ratios = [number_text(line[key], "", "×") for key in ("ratio", "paper_ratio")]
        runs = (reached, str(line["rounds"]))
        best = line["best_accuracy"]
        percent = number_text(None if best is None else 100 * best, "–")
        table.add_row(line["method"], ours, ratios[0], *runs, paper, ratios[1], percent)
    return table


def add_columns(table: Table, headings: Sequence[str]) -> None:
    """Add columns; only the first one may wrap."""
    for heading in headings:
        first = heading == headings[0]
        table.add_column(
            heading, justify="left" if first else "right", no_wrap=not first, overflow="fold"
        )


TRAFFIC = ("method", "MB up", "ratio", "down", "both", "ratio", "best", "final")


def traffic_table(lines: Sequence[dict[str, Any]], title: str) -> Table:
    """Return the measured traffic to the task's target and, in a second row, to FedAdam's best."""
    table = plain_table(
        f"{title}: MB per client to {100 * lines[0]['target']['accuracy']:.1f} %\n"
        "and, below, to FedAdam's best; ratio: reduction vs FedAdam-SSM in the paper's format"
    )
    add_columns(table, TRAFFIC)
    for line in lines:
        accuracies = [line[key] for key in ("best_accuracy", "final_accuracy")]
        means = (f"{100 * x['mean']:.2f}" for x in accuracies)
        table.add_row(line["method"], *traffic_cells(line["target"]), *means)
        if len(line["seeds"]) > 1:
            deviations = (f"{100 * x['sd']:.2f}" for x in accuracies)
            table.add_row("  ±", *deviation_cells(line["target"]), *deviations)
        harder = line["harder"]
        if harder["accuracy"] is not None:
            table.add_row(f"  to {100 * harder['accuracy']:.2f} %", *traffic_cells(harder))
    return table


def traffic_cells(cost: dict[str, Any]) -> list[str]:
    """Return the MB up, down and both to a target, with the ratios of up and both."""
    if cost["up"] is None:
        return [f"∞ ({cost['reached']}/{cost['of']})", "", "", "", ""]
    up, down, both = (three_digits(cost[key]["mean"]) for key in ("up", "down", "both"))
    ratios = [
        "" if x is None else f"{three_digits(x)}×" for x in (cost["ratio_up"], cost["ratio_both"])
    ]
    return [up, ratios[0], down, both, ratios[1]]


def deviation_cells(cost: dict[str, Any]) -> list[str]:
    """Return the standard deviations over the seeds, in the columns of :func:`traffic_cells`."""
    if cost["up"] is None:
        return ["", "", "", "", ""]
    up, down, both = (f"{cost[key]['sd']:.2g}" for key in ("up", "down", "both"))
    return [up, "", down, both, ""]


def three_digits(x: float) -> str:
    """Format a number with three significant digits and at most four decimals.

    >>> three_digits(12345.6), three_digits(37.12), three_digits(0.01234), three_digits(0.0044676)
    ('12346', '37.1', '0.0123', '0.0045')
    """
    return f"{x:.0f}" if x >= 100 else f"{round(x, 4):.3g}"


def number_text(x: float | None, missing: str, unit: str = "") -> str:
    """Format a number with two decimals, or without decimals if it is at least 1000.

    >>> number_text(2.944, "∞", "×"), number_text(18559.3, ""), number_text(None, "∞")
    ('2.94×', '18559', '∞')
    """
    return missing if x is None else f"{x:.{2 if x < 1000 else 0}f}{unit}"


RIVALS = ("settings", "MB up", "ratio", "both", "1 Mbit/s", "reached")


def rivals_table(lines: Sequence[dict[str, Any]], title: str) -> Table:
    """Return the traffic of each method to the task's target, with the settings chosen for it."""
    table = plain_table(
        f"{title}: MB per client to the task's target, with settings chosen on validation data\n"
        "ratio: tuned FedAdam-SSM's uplink to the row's; 1 Mbit/s: hours to the target"
    )
    add_columns(table, RIVALS)
    for line in (line for line in lines if line["target"] == "task"):
        up, both = ("∞" if x is None else three_digits(x) for x in (line["up"], line["both"]))
        ratio = number_text(line["ratio"], "", "×")
        seconds = line["seconds_1_mbit"]
        hours = number_text(seconds and seconds / 3600, "")
        reached = f"{line['reached']}/{len(line['seeds'])}" if line["seeds"] else "open"
        table.add_row(settings_text(line), up, ratio, both, hours, reached)
    return table


def settings_text(line: dict[str, Any]) -> str:
    """Return the method of a line with its settings.

    >>> settings_text({"method": "sift", "tuned": True, "line": "sift@lr=0.003"})
    'sift@lr=0.003'
    >>> settings_text({"method": "sift", "tuned": False, "line": "sift"})
    'sift, not tuned'
    """
    if line["tuned"]:
        return str(line["line"] or line["method"])
    return f"{line['method']}, not tuned"
