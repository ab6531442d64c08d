"""Return a run to an earlier round, as if the later ones had never been trained."""

from __future__ import annotations

from pathlib import Path

from fedsift.errors import ConfigError
from fedsift.runs.checkpoint import load_memories
from fedsift.runs.disk import CorruptFile, load_tensors
from fedsift.runs.folder import RunFolder
from fedsift.runs.kept_checkpoints import kept_checkpoints, replace_by_link
from fedsift.runs.records import check_digest, rewind


def rollback(path: str | Path, round: int) -> None:
    """Return the run in a folder to the end of a round whose checkpoint was kept.

    The metrics of later rounds, the model, the summary, the status and the report are removed.
    Continuing the run then gives the same bits as the first time, unless its clients send something
    else.

    The checkpoint is replaced in one step, before anything that later rounds have written is
    dropped. If this is interrupted, the run continues either from its last round or from the given
    one.
    """
    folder = RunFolder.open(Path(path))
    with folder.locked():
        kept = kept_checkpoints(folder)
        if round not in kept:
            known = ", ".join(map(str, kept)) or "none"
            raise ConfigError(f"{path} has no checkpoint of round {round}; it has: {known}")
        check_kept(folder, kept[round])
        described = (folder.summary_file, folder.model_file, folder.report_file, folder.status_file)
        for file in described:
            file.unlink(missing_ok=True)
        replace_by_link(kept[round], folder.checkpoint_file)
        rewind(folder, round)


def check_kept(folder: RunFolder, file: Path) -> None:
    """Refuse a checkpoint that is damaged, or to which the folder's other files do not belong."""
    try:
        about, tensors = load_tensors(file, "cpu")
    except CorruptFile as problem:
        raise ConfigError(str(problem)) from None
    for lines in (folder.metrics_file, folder.uploads_file):
        check_digest(lines, file)
    try:
        load_memories(folder, about["memory"], tensors)
    except (OSError, ValueError) as problem:
        raise ConfigError(f"{folder.memory_file} is corrupt: {problem}") from None
