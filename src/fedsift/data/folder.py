"""The folder that holds the downloaded data sets."""

from __future__ import annotations

import os
from pathlib import Path

DEBIAN = Path("/usr/share/datasets")
"""The folder of Debian's packages; its dataset-fashion-mnist has the official files."""


def data_folder() -> Path:
    """Return the data folder: FEDSIFT_DATA, or a folder in the user's cache."""
    return Path(os.environ.get("FEDSIFT_DATA") or Path.home() / ".cache" / "fedsift" / "data")


def use_data_folder(path: Path | None) -> None:
    """Set FEDSIFT_DATA for this process and its child processes; None leaves it unchanged."""
    if path is not None:
        os.environ["FEDSIFT_DATA"] = str(path)


def use_existing_data_folder(path: Path | None) -> None:
    """Set FEDSIFT_DATA to a folder that must exist, for commands that only read it."""
    if path is not None and not path.is_dir():
        raise ValueError(f"there is no data folder {path}; 'fedsift data get' creates it")
    use_data_folder(path)


def find_file(path: str) -> Path | None:
    """Find a file in the data folder or in Debian's; None if it is in neither.

    >>> find_file("no-such-set/no-such-file") is None
    True
    """
    places = (data_folder() / path, DEBIAN / path)
    return next((place for place in places if place.exists()), None)
