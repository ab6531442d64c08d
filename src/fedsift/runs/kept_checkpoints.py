"""The checkpoints of recent rounds, next to the run's own.

Each is a hard link to what was the run's checkpoint after its round, so that the latest one takes
no space of its own.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from fedsift.runs.disk import replacing

if TYPE_CHECKING:
    from fedsift.runs.folder import RunFolder


def kept_checkpoints(folder: RunFolder) -> dict[int, Path]:
    """Return the files of the kept checkpoints by round, in ascending order."""
    files = folder.checkpoints_folder.glob("round-*.safetensors")
    named = ((re.fullmatch(r"round-(\d+)\.safetensors", file.name), file) for file in files)
    return dict(sorted((int(name[1]), file) for name, file in named if name))


def keep_checkpoint(folder: RunFolder, round: int, number: int) -> None:
    """Keep the run's checkpoint, which is of this round, and delete all but the last few."""
    if number > 1:
        folder.checkpoints_folder.mkdir(exist_ok=True)
        path = folder.checkpoints_folder / f"round-{round}.safetensors"
        replace_by_link(folder.checkpoint_file, path)
    earlier = {n: file for n, file in kept_checkpoints(folder).items() if n != round}
    for file in list(earlier.values())[: max(0, len(earlier) - (number - 1))]:
        file.unlink(missing_ok=True)


def rollback_command(folder: RunFolder) -> str | None:
    """Return the command that goes back to the last kept checkpoint which is not the run's own."""
    for n, file in reversed(kept_checkpoints(folder).items()):
        if not file.samefile(folder.checkpoint_file):
            return f"fedsift rollback {shlex.quote(str(folder.path))} {n}"
    return None


def forget_checkpoints(folder: RunFolder, after: int) -> None:
    """Delete the kept checkpoints of the rounds after a round."""
    for n, file in kept_checkpoints(folder).items():
        if n > after:
            file.unlink(missing_ok=True)


def replace_by_link(source: Path, path: Path) -> None:
    """Replace a file by a hard link to another, or by a copy if the file system has no links."""
    if path.exists() and path.samefile(source):
        return  # renaming one link of a file to another does nothing
    with replacing(path) as partial:
        try:
            os.link(source, partial)
        except OSError:
            shutil.copyfile(source, partial)
