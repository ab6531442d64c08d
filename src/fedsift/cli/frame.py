"""The command ``fedsift frame inspect``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from fedsift.cli.exit_codes import user_input
from fedsift.cli.terminal import out, plain_table

if TYPE_CHECKING:
    from fedsift.codec.header import PartHeader
    from fedsift.codec.inspect import FrameSummary

app = typer.Typer(no_args_is_help=True, help="Inspect the frames that clients and server send.")


@app.command()
def inspect(file: Annotated[Path, typer.Argument(help="File that holds one frame.")]) -> None:
    """Print a frame's header, the size of its parts, and how close it is to the entropy limit.

    Example: `fedsift frame inspect update.fsf`
    """
    from fedsift.codec.inspect import summarize_frame

    with user_input():
        try:
            frame = file.read_bytes()
        except OSError as problem:
            raise ValueError(f"cannot read {file}: {problem.strerror}") from None
        summary = summarize_frame(frame)
    out.print(header_table(summary))
    out.print(parts_table(summary))


def header_table(summary: FrameSummary) -> Table:
    """Return the fields of a frame's header."""
    header = summary.header
    table = plain_table("frame", show_header=False)
    table.add_row("algorithm", escape(header.algorithm) or "–")
    table.add_row("round, client", f"{header.round}, {header.client}")
    table.add_row("run, base state", f"{header.run.hex()}, {header.base.hex()}")
    table.add_row("model", f"d = {header.d:,}")
    table.add_row("weight", f"{header.weight:g}")
    size = f"{summary.total_bytes:,} bytes, {summary.bits_per_coordinate:.2f} bits per coordinate"
    table.add_row("size", size)
    return table


def parts_table(summary: FrameSummary) -> Table:
    """Return the sizes of a frame's parts."""
    from fedsift.codec.frame import CHECKSUM_BYTES

    header = summary.header
    table = plain_table("bytes by part")
    for heading in ("part", "coder", "values", "bytes", "bits each", "of random"):
        table.add_column(heading, justify="left" if heading in ("part", "coder") else "right")
    size = summary.header_bytes + CHECKSUM_BYTES
    table.add_row("header and checksum", "", "", f"{size:,}", "", "")
    for part in header.parts:
        for row in part_rows(part, header.d):
            table.add_row(*row)
    if any(part.index is not None for part in header.parts):
        table.caption = (
            "of random: size in percent of the bits that a mask drawn at random needs;\n"
            "a mask with clusters needs fewer"
        )
    return table


def part_rows(part: PartHeader, d: int) -> Iterator[tuple[str, ...]]:
    """Yield a part's mask and values as rows of the table."""
    from fedsift.codec.inspect import ratio_to_limit

    def bits_each(size: int) -> str:
        return f"{8 * size / max(part.k, 1):.2f}"

    if part.index is not None:
        ratio = ratio_to_limit(part, d)
        of_random = "–" if ratio is None else f"{100 * ratio:.2f} %"
        size = part.index_bytes
        yield "mask", part.index.name, f"{part.k:,}", f"{size:,}", bits_each(size), of_random
    for role, coder, size in zip(part.roles, part.coders, part.value_bytes, strict=True):
        form = ", entropy" if size < coder.size(part.k) else ""
        yield role.upper(), coder.name + form, f"{part.k:,}", f"{size:,}", bits_each(size), ""
