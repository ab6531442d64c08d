"""Fetch official files.

What a broken line cut off goes on where it stopped, and nothing is put in place before its SHA-256
is right.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO, cast
from urllib.request import Request, urlopen

from fedsift.data.files import find
from fedsift.data.sources import Download, File

BLOCK = 1 << 16
SECONDS = 30
"""How long a silent server is waited for."""


def state_of(file: File) -> str:
    """``in order``, ``missing``, or ``damaged``: not the official content."""
    path = find(file.path)
    if path is None:
        return "missing"
    try:
        with _unpacked(path) as content:
            return "in order" if digest(content) == file.sha256 else "damaged"
    except (OSError, EOFError, zlib.error):
        return "damaged"


def digest(content: BinaryIO) -> str:
    """The SHA-256 of a stream, read piece by piece.

    >>> import io
    >>> digest(io.BytesIO(b"abc"))[:16]
    'ba7816bf8f01cfea'
    """
    sha256 = hashlib.sha256()
    while block := content.read(BLOCK):
        sha256.update(block)
    return sha256.hexdigest()


def _unpacked(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


def fetch(download: Download, folder: Path) -> Iterator[int]:
    """Put a download's files into the data folder; yields the bytes that have come so far."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / (download.url.rpartition("/")[2] + ".partial")
    yield from _stream(download, partial)
    with partial.open("rb") as content:
        found = digest(content)
    if found != download.sha256:
        partial.unlink()
        raise ValueError(
            f"{download.url} gave a file that is not the official one (its SHA-256 is {found}); "
            "it was deleted"
        )
    if download.url.endswith(".tar.gz"):
        _unpack(partial, download.files, folder)
    else:
        _place(partial, folder / download.files[0].path)


def _stream(download: Download, partial: Path) -> Iterator[int]:
    done = partial.stat().st_size if partial.exists() else 0
    if done < download.size:
        asked = Request(download.url, headers={"Range": f"bytes={done}-"} if done else {})
        with urlopen(asked, timeout=SECONDS) as answer:
            goes_on = answer.status == 206  # otherwise the server sends the whole file again
            done = done if goes_on else 0
            with partial.open("ab" if goes_on else "wb") as file:
                while done <= download.size and (block := answer.read(BLOCK)):
                    done += file.write(block)
                    yield done
    if done < download.size:
        raise ConnectionError(f"the line broke after {done} of {download.size} bytes")


def _unpack(archive: Path, files: tuple[File, ...], folder: Path) -> None:
    """Take the wanted files, and no others, out of an archive."""
    with TemporaryDirectory(dir=folder) as scratch:
        with tarfile.open(archive) as packed:
            members = [packed.getmember(file.path) for file in files]
            packed.extractall(scratch, members, filter="data")
        for file in files:
            _place(Path(scratch) / file.path, folder / file.path)
    archive.unlink()


def _place(file: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    os.replace(file, target)
