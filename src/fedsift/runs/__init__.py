"""Runs on disk: configuration, metrics, checkpoints, and how an interrupted run continues."""

from fedsift.errors import explain_renamed
from fedsift.runs.config import RunConfig
from fedsift.runs.folder import RunFolder
from fedsift.runs.run import federation_of, restore_run, run_summary, train_rounds

__all__ = [
    "RunConfig",
    "RunFolder",
    "federation_of",
    "restore_run",
    "run_summary",
    "train_rounds",
]

__getattr__ = explain_renamed(__name__)
