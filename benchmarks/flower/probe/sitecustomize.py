"""Record when a SuperNode sleeps: between two polls, and while it waits for its client's reply.

Python imports this module at its start if its folder is on PYTHONPATH; see ../warm_rounds.py.
"""

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

if "SLEEP_NOTES" in os.environ and any(x.endswith("flower-supernode") for x in sys.orig_argv):
    from flwr.supernode import start_client_internal

    notes = Path(os.environ["SLEEP_NOTES"], f"{os.getpid()}.jsonl").open("a", buffering=1)  # noqa: SIM115

    def sleep(seconds: float) -> None:
        """Sleep as Flower does, and note it."""
        began = time.monotonic()
        time.sleep(seconds)
        notes.write(json.dumps([seconds, began, time.monotonic()]) + "\n")

    recording = SimpleNamespace(**{**vars(time), "sleep": sleep})
    start_client_internal.time = recording  # type: ignore[attr-defined]
