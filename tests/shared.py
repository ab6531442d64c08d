"""Folders that several tests read, each made once by the worker that needs it first."""

import os
import shutil
from pathlib import Path

from filelock import FileLock


def shared_folder(tmp_path_factory, name, make):
    """Return a folder that ``make(folder)`` has filled, in this worker or in another one."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    done = Path(f"{folder}.done")
    with FileLock(f"{folder}.lock"):
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)  # if it failed before
            folder.mkdir()
            make(folder)
            done.touch()
    return folder
