"""The commands ``fedsift data list``, ``get`` and ``check``: parse, call, print."""

from __future__ import annotations

import sys
from http.client import HTTPException
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from fedsift.cli.options import DataDir
from fedsift.cli.terminal import err, out, plain_table, user_input
from fedsift.data.datasets import DATASETS, digest_of, shape_of
from fedsift.data.download import fetch, file_state
from fedsift.data.folder import data_folder, find, use_data_folder
from fedsift.data.official_sources import SOURCES, Download, Source

app = typer.Typer(no_args_is_help=True, help="Get and check the data sets.")

Name = Annotated[str, typer.Argument(help=f"One of: {', '.join(DATASETS)}.")]


@app.command("list")
def list_sets(data_dir: DataDir = None) -> None:
    """List the data sets, and which of them are here.

    Example: `fedsift data list --data-dir data`
    """
    use_data_folder(data_dir)
    table = plain_table(f"data sets, in {data_folder()}")
    for heading in ("name", "samples of", "download", "is here"):
        table.add_column(heading)
    for name, entry in DATASETS.items():
        shape = "×".join(map(str, entry.shape))
        source = SOURCES.get(name)
        size = f"{sum(d.size for d in source.downloads) / 1e6:.0f} MB" if source else "none"
        table.add_row(name, shape, size, where(source) if source else f"with {entry.comes_with}")
    out.print(table)


def where(source: Source) -> str:
    """In which folder a data set's files are, or how many of them are missing."""
    found = [find(file.path) for file in source.files]
    if None in found:
        return f"no: {found.count(None)} of {len(found)} files are missing"
    return ", ".join(sorted({str(path.parent) for path in found if path}))


@app.command()
def get(name: Name, data_dir: DataDir = None) -> None:
    """Download a data set from its official source, checked by SHA-256.

    What is there already stays. A download that was cut off goes on where it stopped.

    Example: `fedsift data get fashion-mnist`
    """
    source = source_of(name, data_dir)
    if source is None:
        out.print(f"{name} comes with {DATASETS[name].comes_with}: there is nothing to get")
        return
    for download in source.downloads:
        if any(file_state(file) != "ok" for file in download.files):
            fetch_with_bar(download, source)
    out.print(f"{name} is ok: {where(source)}", soft_wrap=True)


def fetch_with_bar(download: Download, source: Source) -> None:
    """One download; when it fails, say which files to put where by hand."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    try:
        with Progress(*columns, TransferSpeedColumn(), console=err) as progress:
            bar = progress.add_task(download.url.rpartition("/")[2], total=download.size)
            for done in fetch(download, data_folder()):
                progress.update(bar, completed=done)
    except ValueError as problem:
        give_up(str(problem), source)
    except (OSError, HTTPException) as problem:
        reason = getattr(problem, "reason", problem)
        kept = "what has come is kept, and the same command goes on with it"
        give_up(f"cannot get {download.url}: {reason}; {kept}", source)


def give_up(problem: str, source: Source) -> NoReturn:
    """Say in one line what went wrong, and which files to put where by hand."""
    missing = ", ".join(file.path for file in source.files if file_state(file) != "ok")
    by_hand = f"to do it by hand, put these files, from {source.page}, into {data_folder()}"
    print(f"fedsift: {problem}; {by_hand}: {missing}", file=sys.stderr)
    raise typer.Exit(1)


@app.command()
def check(name: Name, data_dir: DataDir = None) -> None:
    """Check a data set's files against the SHA-256 of the official content.

    Ends with exit code 1 if one is missing or damaged. Of the text that comes with Python, which
    differs from version to version, it tells the SHA-256 that runs on it record.

    Example: `fedsift data check cifar-10`
    """
    source = source_of(name, data_dir)
    if source is None:
        found = digest_of(name)
        told = f"its SHA-256 here is {found}" if found else "there is nothing to check"
        out.print(f"{name} comes with {DATASETS[name].comes_with}: {told}", soft_wrap=True)
        return
    states = {file.path: file_state(file) for file in source.files}
    for path, state in states.items():
        out.print(f"{state:9} {find(path) or data_folder() / path}", soft_wrap=True)
    if set(states.values()) != {"ok"}:
        raise typer.Exit(1)


def source_of(name: str, data_dir: Path | None) -> Source | None:
    """The source of a data set, to be had in that folder; None for one that needs no download."""
    use_data_folder(data_dir)
    with user_input():
        shape_of(name)  # refuses an unknown name
    return SOURCES.get(name)
