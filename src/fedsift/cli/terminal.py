"""Terminal output shared by all commands: consoles and tables."""

from __future__ import annotations

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


def print_path(what: str, path: Path) -> None:
    """Print the path of a written file on its own line, so that it can be copied."""
    print(f"{what}: {path}")
