"""Terminal output shared by all commands: consoles, tables and number formats."""

from __future__ import annotations

import math
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

out = Console()
err = Console(stderr=True)


def plain_table(title: str, show_header: bool = True) -> Table:
    """Return an empty table with few rules."""
    return Table(
        title=title,
        title_style="bold",
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        show_header=show_header,
    )


def number_table(title: str, headings: tuple[str, ...]) -> Table:
    """Return an empty table with row names on the left and numbers on the right."""
    table = plain_table(title)
    table.add_column("")
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def file_size(size: float) -> str:
    """Return a number of bytes in MB, or in kB if it is small.

    >>> file_size(1_234_567), file_size(4_321)
    ('1.23 MB', '4.3 kB')
    """
    return f"{size / 1e6:.2f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"


def times_fewer(size: float, dense: float) -> str:
    """Return the dense size divided by the size, with at most one decimal.

    >>> times_fewer(1000, 40_000), times_fewer(3000, 10_000), times_fewer(100, 100)
    ('40×', '3.3×', '1.0×')
    """
    if not size:
        return "∞"
    ratio = dense / size
    return f"{ratio:.0f}×" if ratio >= 10 else f"{math.floor(ratio * 10 + 0.5) / 10:.1f}×"


def percent(x: float | None) -> str:
    """Return a share in percent to two decimals.

    >>> percent(0.5), percent(None)
    ('50.00 %', '–')
    """
    return "–" if x is None else f"{100 * x:.2f} %"


def print_path(what: str, path: Path) -> None:
    """Print the path of a written file on its own line, so that it can be copied."""
    print(f"{what}: {path}")
