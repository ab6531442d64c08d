"""The tables next to these scripts: a run replaces the rows of its tasks."""

import csv
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a table; none if it does not exist."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def replace_rows(path: Path, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Replace the rows of the same tasks; the first column is the task.

    A new table starts with the rows of the table next to these scripts.
    """
    new = [dict(zip(header, map(str, row), strict=True)) for row in rows]
    done = {row["task"] for row in new}
    path.parent.mkdir(parents=True, exist_ok=True)
    known = read(path if path.exists() else HERE / path.name)
    old = [row for row in known if row["task"] not in done]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, header, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows([*old, *new])
