"""Start or resume a run, and train it with progress output."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from fedsift.cli.exit_codes import user_input
from fedsift.cli.progress import run_progress
from fedsift.cli.reports import written_or_explained
from fedsift.cli.settings import merge_config_file, new_folder
from fedsift.cli.tables import summary_table
from fedsift.cli.terminal import err, out
from fedsift.data.folder import use_existing_data_folder
from fedsift.engine.processes.torchrun import process_group, rank
from fedsift.errors import ConfigError, Diverged, TooFewClients, WorkerDied
from fedsift.federation.round import Federation
from fedsift.progress import training_warning
from fedsift.report.collect import ReportedRun, read_run
from fedsift.report.html import write_report
from fedsift.runs.config import PythonConfig, RunConfig
from fedsift.runs.folder import RunFolder
from fedsift.runs.records import last_round
from fedsift.runs.run import (
    RestoredRun,
    federation_of,
    restore_run,
    run_summary,
    train_for_rank_zero,
    train_rounds,
    with_clients,
)
from fedsift.runs.sigterm import exit_on_sigterm
from fedsift.runs.tensorboard import log_to_tensorboard
from fedsift.simulation import Record


def start_run(config_file: Path | None, given: Mapping[str, Any]) -> None:
    """Train a new run with the given options."""
    with process_group():
        with user_input():
            values = merge_config_file(config_file, given)
            path, data_dir = (values.pop(key, None) for key in ("out", "data_dir"))
            config = RunConfig.from_values(values)
            if rank():
                train_for_rank_zero([config])
                return
            federation = federation_of(config)
            config = with_clients(config, federation)
            path = path or new_folder(f"{config.dataset}-{config.algorithm}")
            folder = RunFolder.create(path, config)
        train_and_report(folder, config, federation, data_dir)


def resume_run(path: Path, data_dir: Path | None) -> None:
    """Continue an interrupted run."""
    with process_group():
        with user_input():
            use_existing_data_folder(data_dir)
            folder = RunFolder.open(path)
            config = folder.config()
            if isinstance(config, PythonConfig):
                raise ConfigError(f"{path} was made from Python: {how_to_continue(folder)}")
            if config.wire == "flower":
                raise ConfigError(f"{path} was run on Flower: {how_to_continue(folder)}")
            if rank():
                train_for_rank_zero([config])
                return
            federation = federation_of(config)
        train_and_report(folder, config, federation, data_dir)


def how_to_continue(folder: RunFolder) -> str:
    """Say how the run in a folder is continued."""
    config = folder.config()
    if isinstance(config, PythonConfig):
        return "to continue it, rerun the script that made it"
    if config.wire == "flower":
        return (
            "to continue it, start its app again, or run 'fedsift deploy demo' with the same "
            f"options and --out {shlex.quote(str(folder.path))}"
        )
    return f"continue with: {folder.resume_command}"


def train_and_report(
    folder: RunFolder, config: RunConfig, federation: Federation, data_dir: Path | None
) -> None:
    """Train a run's remaining rounds, print its closing table and write its report."""
    command = folder.resume_command
    if data_dir:
        command += f" --data-dir {shlex.quote(str(data_dir))}"
    shown = run_with_progress(folder, config, federation, command)
    out.print(summary_table(shown.summary, shown.history[-1]["loss"]))
    with written_or_explained("report", folder.path / "report.html", folder.path) as report:
        write_report([shown], report, f"{config.algorithm} on {config.dataset}")


def run_with_progress(
    folder: RunFolder, config: RunConfig, federation: Federation, resume_command: str
) -> ReportedRun:
    """Train a run's remaining rounds with progress output, and write its summary.

    ``resume_command`` is shown after an interruption.
    """
    with folder.locked(), explained_interruption(folder, resume_command), exit_on_sigterm():
        restored = restore_run(folder, federation)
        history = train_with_progress(folder, config, federation, restored)
        folder.write_summary(run_summary(config, federation, history))
    if warning := training_warning(history, folder.labels(), config.flat().get("lr")):
        err.print(warning, style="yellow", markup=False, highlight=False, soft_wrap=True)
    return read_run(folder.path)


def train_with_progress(
    folder: RunFolder, config: RunConfig, federation: Federation, restored: RestoredRun
) -> list[Record]:
    """Train the remaining rounds, show each, and return the records of all rounds."""
    history: list[Record] = []
    finished = last_round(restored.history)
    rounds = train_rounds(folder, federation, restored, config.rounds)
    parameters = federation.task.layout.d
    with run_progress(config, parameters, finished) as show, closing(rounds):
        records: Iterator[Record] = chain(restored.history, rounds)
        if config.tensorboard:
            records = log_to_tensorboard(records, folder.path)
        for record in records:
            history.append(record)
            if record["round"] > finished:
                show(record)
    return history


@contextmanager
def explained_interruption(folder: RunFolder, command: str) -> Iterator[None]:
    """Inside the block, say how to continue a run that ends early."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        print(f"continue with: {command}", file=sys.stderr)
        raise
    except (OSError, WorkerDied) as problem:
        raise type(problem)(f"{problem}; continue with: {command}") from None
    except Diverged as problem:
        rounds = last_round(folder.history())
        saved = f"; the checkpoint of round {rounds} is in {folder.path}" if rounds else ""
        raise Diverged(f"{problem}{saved}; try a smaller --lr") from None
    except TooFewClients as problem:
        advice = "resuming loses the same updates: start a run with a smaller --dropout or "
        raise TooFewClients(f"{problem}; {advice}--min-clients") from None
