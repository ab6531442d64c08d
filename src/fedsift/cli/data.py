"""The commands ``fedsift data list``, ``get`` and ``check``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from fedsift.cli.catalog import catalog
from fedsift.cli.options import DataDir
from fedsift.cli.terminal import err, out, plain_table
from fedsift.errors import ConfigError, require_choice

if TYPE_CHECKING:
    from fedsift.data.official_sources import Download, Source

NAMES = catalog()["datasets"]
Name = Annotated[str, typer.Argument(help=f"One of: {', '.join(NAMES)}.")]

app = typer.Typer(no_args_is_help=True, help="Download and check data sets.")


@app.command("list")
def list_sets(data_dir: DataDir = None) -> None:
    """List the data sets, and where their files are.

    Example: `fedsift data list --data-dir data`
    """
    from fedsift.data.datasets import DATASETS
    from fedsift.data.folder import data_folder, use_data_folder
    from fedsift.data.official_sources import SOURCES

    use_data_folder(data_dir)
    table = plain_table(f"data sets, in {data_folder()}")
    for heading in ("name", "sample shape", "download", "location"):
        table.add_column(heading)
    for name, entry in DATASETS.items():
        shape = "×".join(map(str, entry.shape))
        source = SOURCES.get(name)
        size = f"{sum(d.size for d in source.downloads) / 1e6:.0f} MB" if source else "none"
        table.add_row(name, shape, size, location(source) if source else f"with {entry.comes_with}")
    out.print(table)


def location(source: Source) -> str:
    """Return the folder of a data set's files, or how many of them are missing."""
    from fedsift.data.folder import find_file

    found = [find_file(file.path) for file in source.files]
    if None in found:
        return f"{found.count(None)} of {len(found)} files are missing"
    return ", ".join(sorted({str(path.parent) for path in found if path}))


@app.command()
def get(name: Name, data_dir: DataDir = None) -> None:
    """Download a data set from its official source and verify its SHA-256.

    Files that are already present are kept. An interrupted download continues where it stopped.

    Example: `fedsift data get fashion-mnist`
    """
    from fedsift.data.datasets import DATASETS
    from fedsift.data.download import file_state

    source = source_of(name, data_dir)
    if source is None:
        out.print(f"{name} comes with {DATASETS[name].comes_with}: nothing to download")
        return
    for download in source.downloads:
        if any(file_state(file) != "ok" for file in download.files):
            download_with_progress(download, source)
    out.print(f"{name} is complete: {location(source)}", soft_wrap=True)


def download_with_progress(download: Download, source: Source) -> None:
    """Download a file; if that fails, say how to download it manually."""
    from http.client import HTTPException

    from fedsift.data.download import fetch
    from fedsift.data.folder import data_folder

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    try:
        with Progress(*columns, TransferSpeedColumn(), console=err) as progress:
            bar = progress.add_task(download.url.rpartition("/")[2], total=download.size)
            for done in fetch(download, data_folder()):
                progress.update(bar, completed=done)
    except ValueError as problem:
        fail(str(problem), source)
    except (OSError, HTTPException) as problem:
        reason = getattr(problem, "reason", problem)
        advice = "to continue the download, run the same command"
        fail(f"cannot download {download.url}: {reason}; {advice}", source)


def fail(problem: str, source: Source) -> NoReturn:
    """Print the problem and how to download the files manually, in one line, and exit."""
    from fedsift.data.download import file_state
    from fedsift.data.folder import data_folder

    missing = ", ".join(file.path for file in source.files if file_state(file) != "ok")
    manual_download = f"or download these files from {source.page} into {data_folder()}: {missing}"
    print(f"fedsift: {problem}, {manual_download}", file=sys.stderr)
    raise typer.Exit(1)


@app.command()
def check(name: Name, data_dir: DataDir = None) -> None:
    """Check a data set's files against the SHA-256 of the official files.

    Exits with code 1 if a file is missing or damaged. For python-stdlib, whose text depends on the
    Python version, it prints the SHA-256 that runs record.

    Example: `fedsift data check cifar-10`
    """
    from fedsift.data.datasets import DATASETS, digest_of
    from fedsift.data.download import file_state
    from fedsift.data.folder import data_folder, find_file

    source = source_of(name, data_dir)
    if source is None:
        digest = digest_of(name)
        result = f"its SHA-256 is {digest}" if digest else "nothing to check"
        out.print(f"{name} comes with {DATASETS[name].comes_with}: {result}", soft_wrap=True)
        return
    states = {file.path: file_state(file) for file in source.files}
    for path, state in states.items():
        out.print(f"{state:9} {find_file(path) or data_folder() / path}", soft_wrap=True)
    if set(states.values()) != {"ok"}:
        raise typer.Exit(1)


def source_of(name: str, data_dir: Path | None) -> Source | None:
    """Set the data folder; return a data set's source, or None if it needs no download."""
    from fedsift.data.folder import data_folder, use_data_folder
    from fedsift.data.official_sources import SOURCES

    use_data_folder(data_dir)
    if name in catalog()["texts"]:
        raise ConfigError(
            f"{name} has no official download: put its files into {data_folder() / name}; the "
            "guide to language models says where they are"
        )
    require_choice("dataset", name, NAMES)
    return SOURCES.get(name)
