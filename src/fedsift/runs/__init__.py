"""Runs on disk: configuration, metrics, checkpoints, and how an interrupted run continues.

``config.py`` is a run's configuration, ``folder.py`` its folder, ``run.py`` trains it. The files of
the folder: ``records.py`` (metrics.jsonl and uploads.jsonl), ``uploads.py`` (what is recorded of
uploads), ``checkpoint.py``, ``kept.py`` (the last few checkpoints), ``model.py``,
``tensorboard.py``; ``disk.py`` writes them safely. ``rollback.py`` returns to an earlier round.
``sigterm.py`` ends a run cleanly on SIGTERM. ``compare.py`` makes the table of a comparison.
"""

from fedsift.errors import explain_renamed
from fedsift.runs.config import RunConfig
from fedsift.runs.folder import RunFolder
from fedsift.runs.rollback import rollback
from fedsift.runs.run import federation_of, restore_run, run_summary, train_rounds

__all__ = [
    "RunConfig",
    "RunFolder",
    "federation_of",
    "restore_run",
    "rollback",
    "run_summary",
    "train_rounds",
]

__getattr__ = explain_renamed(__name__)
