"""The progress of a run: a bar in a terminal, one line per round otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from fedsift.cli.terminal import err, file_size, percent, times_fewer
from fedsift.runs.compare import dense_fedadam_bytes
from fedsift.runs.config import RunConfig
from fedsift.simulation import Record

Show = Callable[[Record], None]


@contextmanager
def round_progress(config: RunConfig, parameters: int, finished: int = 0) -> Iterator[Show]:
    """Yield a function that shows a round's record; ``finished`` rounds are already done."""
    display = progress_bar if err.is_terminal else progress_lines
    with display(config, parameters, finished) as show:
        has_warned = False

        def show_and_warn(record: Record) -> None:
            nonlocal has_warned
            if not record["clients"] and not has_warned:
                err.print(empty_round(record), style="yellow", markup=False, highlight=False)
                has_warned = True
            show(record)

        yield show_and_warn


@contextmanager
def progress_bar(config: RunConfig, parameters: int, finished: int) -> Iterator[Show]:
    """Show a progress bar with the status of the last round."""
    columns = (
        TextColumn("{task.description:<14}"),  # aligns the bars of a comparison
        BarColumn(bar_width=10),
        TextColumn("{task.completed}/{task.total}{task.fields[status]} ·"),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    with Progress(*columns, console=err) as progress:
        task = progress.add_task(
            config.algorithm, total=config.rounds, completed=finished, status=""
        )
        is_wide = err.width >= 110

        def show(record: Record) -> None:
            ratio = f", {fewer_than_dense(config, parameters, record)}" if is_wide else ""
            status = " · ".join(["", short_status(record) + ratio, *rejected_text(record)])
            progress.update(task, completed=record["round"], status=status)

        yield show


@contextmanager
def progress_lines(config: RunConfig, parameters: int, finished: int) -> Iterator[Show]:
    """Print a line per round, for logs."""

    def show(record: Record) -> None:
        loss = [] if record["loss"] is None else [f"loss {record['loss']:.2f}"]
        words = [
            f"{config.algorithm} round {record['round']}/{config.rounds}",
            f"{short_status(record)}, {fewer_than_dense(config, parameters, record)}",
            *loss,
            *rejected_text(record),
            f"{record['seconds'] / record['round']:.2f} s/round",
        ]
        err.print(" · ".join(words), markup=False, highlight=False, soft_wrap=True)

    yield show


def short_status(record: Record) -> str:
    """Return a round's accuracy and the uplink so far.

    >>> short_status({"accuracy": 0.9, "uplink_bytes": 1.2e6})
    '90.00 % · 1.20 MB per client'
    """
    accuracy = [] if record["accuracy"] is None else [percent(record["accuracy"])]
    return " · ".join([*accuracy, f"{file_size(record['uplink_bytes'])} per client"])


def rejected_text(record: Record) -> list[str]:
    """Return the number of rejected updates, if there are any."""
    return [f"{record['rejected']} rejected"] if record.get("rejected") else []


def fewer_than_dense(config: RunConfig, parameters: int, record: Record) -> str:
    """Return how many times fewer bytes were sent than dense FedAdam would send."""
    dense = dense_fedadam_bytes(parameters, record["round"], config.clients, config.participation)
    return f"{times_fewer(record['uplink_bytes'], dense)} fewer than dense FedAdam"


def empty_round(record: Record) -> str:
    """Return a warning for a round that changed nothing.

    >>> empty_round({"round": 2, "problems": {"0": "a value is too large"}})
    'warning: round 2 merged no update: client 0: a value is too large'
    >>> empty_round({"round": 2, "problems": {}})
    'warning: round 2 merged no update: all were lost'
    """
    reasons = [f"client {client}: {why}" for client, why in record["problems"].items()]
    reason = reasons[0] if reasons else "all were lost"
    return f"warning: round {record['round']} merged no update: {reason}"
