"""Show the rounds of a run while it trains."""

from __future__ import annotations

import html
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from fedsift.progress.notices import notices
from fedsift.progress.text import rejected_text, round_line, short_status

Show = Callable[[Mapping[str, Any]], None]
"""Shows the record of a round: a line of metrics.jsonl."""
Note = Callable[[Mapping[str, Any]], str]
"""Returns something else to say about a record, where there is room for it."""
WIDE = 110
"""Columns of a terminal that has room for a note next to the bar."""


def no_note(record: Mapping[str, Any]) -> str:
    """Return nothing."""
    return ""


def round_progress(
    name: str,
    rounds: int,
    finished: int = 0,
    lines_to: TextIO | None = None,
    note: Note = no_note,
) -> AbstractContextManager[Show]:
    """Return a context that yields a function to show each round's record.

    In a notebook, it updates a bar below the cell, and in a terminal, a bar on stderr. Elsewhere it
    writes one line per round to ``lines_to``, by default stderr, and flushes it.
    ``finished`` rounds are already done.
    """
    console = Console(stderr=True)
    if console.is_jupyter:
        return notebook_bar(name, rounds, finished)
    if console.is_terminal:
        return terminal_bar(name, rounds, finished, note)
    return lines(name, rounds, lines_to)


@contextmanager
def lines(name: str, rounds: int, file: TextIO | None = None) -> Iterator[Show]:
    """Write one line per round, without control characters, and flush it."""

    def show(record: Mapping[str, Any]) -> None:
        print(round_line(name, record, rounds), file=file or sys.stderr, flush=True)

    with notices():
        yield show


@contextmanager
def terminal_bar(name: str, rounds: int, finished: int, note: Note) -> Iterator[Show]:
    """Show a bar on stderr with the status of the last round."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description:<14}"),  # aligns the bars of a comparison
        BarColumn(bar_width=10),
        TextColumn("{task.completed}/{task.total}{task.fields[status]} ·"),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    with Progress(*columns, console=console) as progress, notices():
        task = progress.add_task(name, total=rounds, completed=finished, status="")

        def show(record: Mapping[str, Any]) -> None:
            said = note(record) if console.width >= WIDE else ""
            status = ", ".join(word for word in (short_status(record), said) if word)
            words = ["", status, *rejected_text(record)]
            progress.update(task, completed=record["round"], status=" · ".join(words))

        yield show


@contextmanager
def notebook_bar(name: str, rounds: int, finished: int = 0) -> Iterator[Show]:
    """Show a bar below the notebook's cell with the line of the last round."""
    from IPython.display import display

    handle = display(bar_formats(name, finished, rounds), raw=True, display_id=True)

    def show(record: Mapping[str, Any]) -> None:
        text = round_line(name, record, rounds)
        handle.update(bar_formats(text, record["round"], rounds), raw=True)

    with notices():
        yield show


def bar_formats(text: str, completed: int, rounds: int) -> dict[str, str]:
    """Return a bar and its text as HTML, and the text alone for viewers that show no HTML.

    >>> bar_formats("sift <1>", 1, 3)["text/html"]
    '<progress value="1" max="3"></progress> sift &lt;1&gt;'
    """
    bar = f'<progress value="{completed}" max="{rounds}"></progress>'
    return {"text/html": f"{bar} {html.escape(text)}", "text/plain": text}
