"""Download official files.

An interrupted download resumes where it stopped, and a file is put in place only after its SHA-256
has been verified.
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

from fedsift.data.folder import find_file
from fedsift.data.official_sources import Download, File

BLOCK = 1 << 16
TIMEOUT = 30
"""Timeout for a server that does not respond."""


def file_state(file: File) -> str:
    """Return ``ok``, ``missing`` or ``damaged``: whether a file has the official content."""
    path = find_file(file.path)
    if path is None:
        return "missing"
    try:
        with _unpacked(path) as content:
            return "ok" if digest(content) == file.sha256 else "damaged"
    except (OSError, EOFError, zlib.error):
        return "damaged"


def digest(content: BinaryIO) -> str:
    """Return the SHA-256 of a stream, read in blocks.

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
    """Download files into the data folder; yield the number of bytes received so far."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / (download.url.rpartition("/")[2] + ".partial")
    yield from _stream(download, partial)
    with partial.open("rb") as content:
        found = digest(content)
    if found != download.sha256:
        partial.unlink()
        raise ValueError(
            f"{download.url} sent a file that is not the official one (its SHA-256 is {found}); "
            "it was deleted"
        )
    if download.url.endswith(".tar.gz"):
        _unpack(partial, download.files, folder)
    else:
        _place(partial, folder / download.files[0].path)


def _stream(download: Download, partial: Path) -> Iterator[int]:
    done = partial.stat().st_size if partial.exists() else 0
    if done < download.size:
        request = Request(download.url, headers={"Range": f"bytes={done}-"} if done else {})
        with urlopen(request, timeout=TIMEOUT) as response:
            is_resumed = response.status == 206  # otherwise the server sends the whole file again
            done = done if is_resumed else 0
            with partial.open("ab" if is_resumed else "wb") as file:
                while done <= download.size and (block := response.read(BLOCK)):
                    done += file.write(block)
                    yield done
    if done < download.size:
        raise ConnectionError(f"the connection was lost after {done} of {download.size} bytes")


def _unpack(archive: Path, files: tuple[File, ...], folder: Path) -> None:
    """Extract only the listed files from an archive."""
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
