"""What a run looks like in the terminal: a progress bar while it goes, a table when it ends."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from fedsift.codec.frame import CHECKSUM_BYTES
from fedsift.codec.header import PartHeader
from fedsift.codec.inspect import FrameSummary, ratio_to_limit
from fedsift.report.collect import decimals
from fedsift.report.tables import number_of
from fedsift.runs.compare import Row, mibit
from fedsift.runs.config import RunConfig
from fedsift.simulation import Record

if TYPE_CHECKING:
    from fedsift.cli.timings import Timing

out = Console()
err = Console(stderr=True)


@contextmanager
def user_input() -> Iterator[None]:
    """Inside, a ValueError is the user's to mend, not a bug of ours.

    The option that it begins with is named as it is spelt on the command line.
    """
    try:
        yield
    except ValueError as problem:
        text = re.sub(r"^\w+(?= must )", lambda name: name[0].replace("_", "-"), str(problem))
        raise click.ClickException(text) from None


@contextmanager
def bar(config: RunConfig) -> Iterator[Any]:
    """A progress bar; what it gives is called with each round's record."""
    columns = (
        TextColumn("{task.description:<14}"),  # the bars of a comparison stand in line
        BarColumn(bar_width=10),
        TextColumn("{task.completed}/{task.total}{task.fields[status]} ·"),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    with Progress(*columns, console=err) as progress:
        task = progress.add_task(config.algorithm, total=config.rounds, status="")
        has_warned = False

        def step(record: Record) -> None:
            nonlocal has_warned
            if not record["clients"] and not has_warned:
                err.print(lost_round(record), style="yellow", markup=False, highlight=False)
                has_warned = True
            progress.update(task, completed=record["round"], status=status_of(record))

        yield step


def lost_round(record: Record) -> str:
    """A warning of a round that changed nothing.

    >>> lost_round({"round": 2, "problems": {"0": "a value is too large"}})
    'warning: round 2 merged no update: client 0: a value is too large'
    >>> lost_round({"round": 2, "problems": {}})
    'warning: round 2 merged no update: all were lost'
    """
    reasons = [f"client {client}: {why}" for client, why in record["problems"].items()]
    why = reasons[0] if reasons else "all were lost"
    return f"warning: round {record['round']} merged no update: {why}"


def status_of(record: Record) -> str:
    """A record in a few words.

    >>> status_of({"accuracy": 0.9, "loss": 0.5, "uplink_bits_paper": 2**20})
    ' · 90.00 % · loss 0.50 · 1.00 Mibit'
    """
    words = []
    if record["accuracy"] is not None:
        words.append(f"{100 * record['accuracy']:.2f} %")
    if record["loss"] is not None:
        words.append(f"loss {record['loss']:.2f}")
    words.append(f"{mibit(record):.2f} Mibit")
    if record.get("rejected"):
        words.append(f"{record['rejected']} rejected")
    return "".join(f" · {word}" for word in words)


def summary_table(summary: Mapping[str, Any]) -> Table:
    """The closing table of a run."""
    table = plain_table(f"{summary['algorithm']} on {summary['dataset']}", show_header=False)
    table.add_column(style="dim")
    table.add_column()
    rows = {
        "model": f"{summary['model']}, {summary['parameters']:,} parameters",
        "federation": f"{number_of(summary['clients'], 'client')}, "
        f"{number_of(summary['rounds'], 'round')}, data {dealt(summary)}",
        "final accuracy": percent(summary["final_accuracy"]),
        "best accuracy": percent(summary["best_accuracy"]),
        "uplink a client": f"{size(summary['uplink_bytes'])} sent; "
        f"{mibit(summary):.2f} Mibit by the paper's formula",
        "downlink a client": size(summary["downlink_bytes"]),
        "time": f"{summary['seconds']:.2f} s, {summary['seconds_per_round']:.2f} s a round",
    }
    if summary.get("rejected"):
        rows["rejected"] = f"{summary['rejected']:,} updates; metrics.jsonl says why"
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def fixed(x: float) -> str:
    """A number with as many decimals as it needs.

    >>> fixed(12.345), fixed(0.00494)
    ('12.35', '0.0049')
    """
    return f"{x:.{decimals(x)}f}"


def dealt(summary: Mapping[str, Any]) -> str:
    """How the data is dealt out.

    >>> dealt({"partition": "dirichlet", "theta": 0.1}), dealt({"partition": "iid", "theta": 0.1})
    ('dirichlet (θ = 0.1)', 'iid')
    """
    partition = str(summary["partition"])
    return f"{partition} (θ = {summary['theta']:g})" if partition == "dirichlet" else partition


def comparison_table(rows: Iterable[Row], title: str) -> Table:
    """The paper's Table 1 for one task."""
    rows = list(rows)
    table = plain_table(title)
    for heading in ("algorithm", "Mibit", "ratio", "MB sent", "round", "best", "final"):
        table.add_column(heading, justify="left" if heading == "algorithm" else "right")
    for row in rows:
        table.add_row(
            row.algorithm,
            "∞" if row.mibit is None else fixed(row.mibit),
            "" if row.ratio is None else f"{row.ratio:.2f}×",
            "–" if row.megabytes is None else fixed(row.megabytes),
            "–" if row.round is None else str(row.round),
            percent(row.best_accuracy),
            percent(row.final_accuracy),
            style="bold green" if row.ratio == 1 else None,
        )
    return table


def plain_table(title: str, show_header: bool = True) -> Table:
    """A table with few lines."""
    return Table(
        title=title,
        title_style="bold",
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        show_header=show_header,
    )


def show_frame(anatomy: FrameSummary) -> None:
    """A frame's header and the sizes of its parts."""
    header = anatomy.header
    about = plain_table("frame", show_header=False)
    about.add_row("algorithm", escape(header.algorithm) or "–")
    about.add_row("round, client", f"{header.round}, {header.client}")
    about.add_row("run, base state", f"{header.run.hex()}, {header.base.hex()}")
    about.add_row("model", f"d = {header.d:,}")
    about.add_row("weight", f"{header.weight:g}")
    about.add_row(
        "size",
        f"{anatomy.total_bytes:,} bytes, {anatomy.bits_per_coordinate:.2f} bits a coordinate",
    )
    parts = plain_table("bytes by part")
    for heading in ("part", "coder", "values", "bytes", "bits each", "of random's"):
        parts.add_column(heading, justify="left" if heading in ("part", "coder") else "right")
    parts.add_row(
        "header and checksum", "", "", f"{anatomy.header_bytes + CHECKSUM_BYTES:,}", "", ""
    )
    for part in header.parts:
        for row in part_rows(part, header.d):
            parts.add_row(*row)
    out.print(about)
    out.print(parts)
    if any(part.index is not None for part in header.parts):
        print(
            "of random's: of the bits that a mask drawn at random takes; a clustered one needs less"
        )


def part_rows(part: PartHeader, d: int) -> Iterator[tuple[str, ...]]:
    """A part's mask and values as rows of the table."""

    def each(size: int) -> str:
        return f"{8 * size / max(part.k, 1):.2f}"

    if part.index is not None:
        ratio = ratio_to_limit(part, d)
        shown = "–" if ratio is None else f"{100 * ratio:.2f} %"
        size = part.index_bytes
        yield "mask", part.index.name, f"{part.k:,}", f"{size:,}", each(size), shown
    for role, coder, size in zip(part.roles, part.coders, part.value_bytes, strict=True):
        form = ", entropy" if size < coder.size(part.k) else ""
        yield role.upper(), coder.name + form, f"{part.k:,}", f"{size:,}", each(size), ""


def size(x: float) -> str:
    """Bytes in a unit that suits them.

    >>> size(1_234_567), size(4_321)
    ('1.23 MB', '4.3 kB')
    """
    return f"{x / 1e6:.2f} MB" if x >= 1e5 else f"{x / 1e3:.1f} kB"


def percent(x: float | None) -> str:
    """A share in percent, to two decimals."""
    return "–" if x is None else f"{100 * x:.2f} %"


def say_where(what: str, path: Path) -> None:
    """Name a file that was written, on a line of its own that can be copied."""
    print(f"{what}: {path}")


def show_timings(timings: Iterable[Timing]) -> None:
    """Print how long a round takes, a table a model as soon as it is known."""
    for t in timings:
        table = plain_table(f"{t.model}, {t.parameters:,} parameters, {t.device} in {t.precision}")
        table.add_column("a round of 20 clients x 30 steps x 64 samples")
        table.add_column("seconds", justify="right")
        table.add_column("of a round", justify="right")
        parts = {"training": t.train, "selection and accounting": t.select, "merging": t.merge}
        for name, seconds in {**parts, "round": t.round}.items():
            table.add_row(name, f"{seconds:.4g}", f"{100 * seconds / t.round:.1f} %")
        table.add_row("test of the model", f"{t.evaluate:.4g}", "")
        limit = f"limit: {t.flops / 1e9:,.0f} GFLOP, {t.bytes / 1e9:,.1f} GB"
        table.add_row(limit, f"{t.limit:.4g}", f"{100 / t.ratio:.1f} %")
        out.print(table)
