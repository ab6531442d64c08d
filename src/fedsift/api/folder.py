"""Runs in a folder, from Python: ``fedsift.simulate(..., out="runs/mine")``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from fedsift.api.result import Result
from fedsift.api.start import begin_run, on_device
from fedsift.errors import ConfigError
from fedsift.federation.round import Federation
from fedsift.federation.snapshot import Snapshot
from fedsift.report.collect import read_run
from fedsift.report.html import write_report
from fedsift.runs.checkpoint import Checkpoint
from fedsift.runs.config import PythonConfig
from fedsift.runs.folder import RunFolder, exists
from fedsift.runs.model import save_model
from fedsift.runs.records import last_round
from fedsift.runs.run import Begin, RestoredRun, restore_run, run_summary, train_snapshots
from fedsift.runs.sigterm import exit_on_sigterm
from fedsift.simulation import Record


class FolderRun:
    """A run in a folder, which stays locked until the run is closed."""

    def __init__(
        self,
        path: Path,
        config: PythonConfig,
        federation: Federation,
        start: Result | Snapshot | None,
    ) -> None:
        self.config, self.federation, self.resources = config, federation, ExitStack()
        begin = start_function(path, federation, start)  # before anything is written
        self.folder = RunFolder.create_or_extend(path, config)
        try:
            self.resources.enter_context(self.folder.locked())
            require_rounds(self.folder, config.rounds)
            restored = restore_run(self.folder, federation, begin)
            self.snapshot, self.history = restored.checkpoint.snapshot, restored.history
            self.is_finished = is_finished(self.folder, config.rounds)
        except BaseException:
            self.resources.close()
            raise
        self._steps = train_snapshots(self.folder, federation, restored, config.rounds)
        self.resources.callback(self._steps.close)  # writes a checkpoint

    def __iter__(self) -> Iterator[tuple[Snapshot, Record]]:
        return iter(()) if self.is_finished else self._steps

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Inside the block, say how to continue a run that Ctrl-C or SIGTERM ends."""
        try:
            with exit_on_sigterm():
                yield
        except (KeyboardInterrupt, SystemExit):
            message = f"to continue the run in {self.folder.path}, run the same code again"
            print(message, file=sys.stderr)
            raise

    def close(self) -> None:
        """Write a checkpoint of the last round, and unlock the folder."""
        self.resources.close()

    def finish(self, snapshot: Snapshot, history: list[Record]) -> None:
        """Write the model, the summary and the report."""
        if self.is_finished:
            return
        self._steps.close()
        save_model(self.folder, self.federation, snapshot)
        summary = run_summary(self.config, self.federation, history)
        if snapshot.round < self.config.rounds:
            summary["stopped_after"] = snapshot.round
        self.folder.write_summary(summary)
        title = f"{summary['algorithm']} on {summary['dataset']}"
        write_report([read_run(self.folder.path)], self.folder.path / "report.html", title)
        self.is_finished = True


def start_function(path: Path, federation: Federation, start: Result | Snapshot | None) -> Begin:
    """Return the function that begins the run; evaluate the initial model if there is no folder."""
    begin: Begin = partial(begin_run, federation, start)
    if exists(RunFolder(path).config_file):
        return begin
    first = begin(None)

    def placed(memory_file: Path | None) -> RestoredRun:
        snapshot = on_device(first.checkpoint.snapshot, federation, memory_file)
        return replace(first, checkpoint=Checkpoint(snapshot, first.checkpoint.seconds))

    return placed


def require_rounds(folder: RunFolder, rounds: int) -> None:
    """Refuse a folder whose run has more rounds."""
    found = max(folder.config().rounds, last_round(folder.history()))
    if found > rounds:
        raise ConfigError(
            f"{folder.path} holds a run of {found} rounds, more than rounds={rounds}: pass at "
            f"least {found}, or another folder"
        )


def is_finished(folder: RunFolder, rounds: int) -> bool:
    """Whether a run has ended: after all rounds, or because on_round stopped it."""
    summary = folder.summary()
    return bool(summary) and summary["rounds"] == rounds and folder.model_file.exists()
