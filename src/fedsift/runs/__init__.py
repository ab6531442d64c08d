"""Runs on disk: configuration, metrics, checkpoints, and how an interrupted run continues.

- ``config.py``: a run's configuration; ``language.py``: the part about language models
- ``parts.py``: the model, data and loss that it describes
- ``run.py``: training, checkpoints on the way, and the summary
- ``folder.py``: the run's folder, and its files:

  - ``records.py``: metrics.jsonl and uploads.jsonl; ``uploads.py``: what the latter records
  - ``checkpoint.py``, ``kept_checkpoints.py``: the checkpoint, and those of recent rounds
  - ``model.py``, ``saved_result.py``: the trained model; the result of a finished run
  - ``status.py``: what a run on Flower is doing
  - ``tensorboard.py``: TensorBoard events

- ``disk.py``: how files are written safely
- ``rollback.py``: the return to an earlier round
- ``sigterm.py``: a clean end on SIGTERM
- ``compare.py``: the table of a comparison
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
