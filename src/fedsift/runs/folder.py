"""The folder of a run: its files, its configuration and its lock."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from fedsift.errors import ConfigError
from fedsift.runs.config import MAY_CHANGE, Config, read_config
from fedsift.runs.disk import replace_file
from fedsift.runs.records import METRICS, UPLOADS, read_rounds
from fedsift.simulation import Record

OTHER_FOLDER = "use another folder (on the command line: --out)"
"""The advice for a folder that is taken. A Flower app passes its folder to the strategy."""
LOCK_ATTEMPTS = 3
"""Attempts to lock a folder before it counts as used by another process."""
HELD_LOCKS: set[TextIO] = set()
"""The lock files that this process has locked."""


@dataclass(frozen=True)
class RunFolder:
    """A run on disk.

    :mod:`fedsift.runs.records` appends to its metrics, :mod:`fedsift.runs.checkpoint` writes its
    checkpoints. All other files are replaced as a whole.
    """

    path: Path

    @property
    def config_file(self) -> Path:
        """The configuration, as TOML."""
        return self.path / "config.toml"

    @property
    def lock_file(self) -> Path:
        """An empty file that the process working in the folder keeps locked."""
        return self.path / ".lock"

    @property
    def metrics_file(self) -> Path:
        """The metrics, one JSON object per round."""
        return self.path / "metrics.jsonl"

    @property
    def uploads_file(self) -> Path:
        """Statistics of the uploads, one JSON object per round; optional."""
        return self.path / "uploads.jsonl"

    @property
    def clients_file(self) -> Path:
        """How the data is split across clients; optional."""
        return self.path / "clients.json"

    @property
    def checkpoint_file(self) -> Path:
        """Everything needed to continue the run."""
        return self.path / "checkpoint.safetensors"

    @property
    def checkpoints_folder(self) -> Path:
        """The checkpoints of recent rounds, to which ``fedsift rollback`` can return."""
        return self.path / "checkpoints"

    @property
    def model_file(self) -> Path:
        """The trained model, for ``load_state_dict``; exists once the run is finished."""
        return self.path / "model.safetensors"

    @property
    def adapter_folder(self) -> Path:
        """The trained adapters of a language model, for ``peft``."""
        return self.path / "adapter"

    @property
    def memory_file(self) -> Path:
        """What clients keep between rounds, if it is too large for the checkpoint."""
        return self.path / "memory.bin"

    @property
    def summary_file(self) -> Path:
        """The whole run in one JSON object; exists once the run is finished."""
        return self.path / "summary.json"

    @property
    def status_file(self) -> Path:
        """What a run on Flower is doing right now."""
        return self.path / "status.json"

    @property
    def report_file(self) -> Path:
        """Figures and tables of the run."""
        return self.path / "report.html"

    @property
    def resume_command(self) -> str:
        """The command that continues the run."""
        return f"fedsift resume {shlex.quote(str(self.path))}"

    @classmethod
    def create(cls, path: Path, config: Config) -> RunFolder:
        """Create the folder of a new run; refuse a folder that holds a run."""
        folder = cls(path)
        folder.require_free()  # before locking, so that a refused folder gets no lock file
        if path.is_file():
            raise ConfigError(f"{path} is a file; name a folder")
        try:
            path.mkdir(parents=True, exist_ok=True)
            with folder.locked():
                folder.require_free()
                replace_file(folder.config_file, config.toml().encode())
        except OSError as problem:
            raise ConfigError(f"cannot write to the folder {path}: {problem.strerror}") from None
        return folder

    @classmethod
    def create_or_continue(cls, path: Path, config: Config) -> RunFolder:
        """Open the folder of this run, or create it."""
        folder = cls(path)
        return folder if folder.has_run(config) else cls.create(path, config)

    @classmethod
    def create_or_extend(cls, path: Path, config: Config) -> RunFolder:
        """Open the folder of this run, or create it.

        The run may have had fewer rounds, other workers, and kept another number of checkpoints.
        """
        folder = cls(path)
        if not exists(folder.config_file):
            return cls.create(path, config)
        with folder.locked():
            old = folder.config()
            config = config.with_rounds(max(old.rounds, config.rounds))
            if folder.has_run(config.with_rounds(old.rounds)) and config.flat() != old.flat():
                replace_file(folder.config_file, config.toml().encode())
        return folder

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Open an existing run's folder."""
        folder = cls(path)
        if not exists(folder.config_file):
            raise ConfigError(f"{path} holds no run: it has no {folder.config_file.name}")
        return folder

    def require_free(self) -> None:
        """Refuse a folder that holds a run."""
        files = (self.config_file, self.metrics_file, self.checkpoint_file, self.summary_file)
        if any(exists(file) for file in files):
            raise ConfigError(
                f"{self.path} already holds a run: continue it with '{self.resume_command}', or "
                f"{OTHER_FOLDER}"
            )
        if exists(self.model_file):
            raise ConfigError(
                f"{self.model_file} already exists and would be replaced: {OTHER_FOLDER}"
            )

    def has_run(self, config: Config) -> bool:
        """Whether the folder holds the run of this configuration; refuse any other run."""
        if not exists(self.config_file):
            self.require_free()
            return False
        found, wanted = self.config().flat(), config.flat()
        names = sorted(({*found, *wanted} - MAY_CHANGE) | {"rounds"})
        keys = [k for k in names if found.get(k) != wanted.get(k)]
        if keys:
            differences = (f"{key} = {found.get(key)}, not {wanted.get(key)}" for key in keys[:3])
            raise ConfigError(
                f"{self.path} holds another run ({', '.join(differences)}): {OTHER_FOLDER}"
            )
        return True

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from working in the folder."""
        with self.lock_file.open("a") as file:
            self._lock(file)
            HELD_LOCKS.add(file)
            try:
                yield
            finally:
                HELD_LOCKS.discard(file)

    def _lock(self, file: TextIO) -> None:
        for _ in range(LOCK_ATTEMPTS):
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            time.sleep(0.02)  # it may be is_in_use that holds the lock
        raise ConfigError(f"another process is using {self.path}")

    def is_in_use(self) -> bool:
        """Whether a process is working in the folder."""
        try:
            with self.lock_file.open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except FileNotFoundError:
            pass
        return False

    def config(self) -> Config:
        """Read the configuration."""
        return read_config(self.config_file)

    def history(self) -> list[Record]:
        """Read and check the metrics of every round."""
        return read_rounds(self.metrics_file, METRICS, self.checkpoint_file)

    def records(self) -> list[Record]:
        """Read and check the metrics; those of a saved result may begin with any round."""
        return read_rounds(self.metrics_file, METRICS, self.checkpoint_file, is_complete=False)

    def uploads(self) -> list[dict[str, Any]]:
        """Read and check the upload statistics of every round; empty if not recorded."""
        return read_rounds(self.uploads_file, UPLOADS, self.checkpoint_file, is_complete=False)

    def labels(self) -> list[list[int]]:
        """Read the number of samples of each class on each client; empty if not recorded."""
        labels = read_object(self.clients_file).get("labels")
        is_table = isinstance(labels, list) and all(isinstance(row, list) for row in labels)
        if not labels or not is_table or len(set(map(len, labels))) > 1:
            return []
        return labels if all(isinstance(n, int) for row in labels for n in row) else []

    def summary(self) -> dict[str, Any]:
        """Read the summary; empty if the run is not finished."""
        summary = read_object(self.summary_file)
        if summary and not isinstance(summary.get("environment"), dict):
            raise ConfigError(
                f"{self.summary_file} is damaged: '{self.resume_command}' writes it again"
            )
        return summary

    def write_clients(self, labels: list[list[int]] | None) -> None:
        """Write the number of samples of each class on each client, if known."""
        if labels is not None:
            replace_file(self.clients_file, (json.dumps({"labels": labels}) + "\n").encode())

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write the summary of a finished run."""
        replace_file(self.summary_file, (json.dumps(summary, indent=2) + "\n").encode())


def read_object(path: Path) -> dict[str, Any]:
    """Read a file's JSON object; empty if there is no file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as problem:
        raise ConfigError(f"{path} is damaged: {problem}") from None
    return found if isinstance(found, dict) else {}


def exists(path: Path) -> bool:
    """Whether a file exists; refuse a path that the system does not accept."""
    try:
        return path.exists()
    except OSError as problem:
        raise ConfigError(f"{path.parent} cannot be used: {problem.strerror}") from None


def column(history: Iterable[Record], name: str) -> list[float]:
    """Return one column of the metrics, without the rounds that lack it."""
    return [float(value) for r in history if (value := r.get(name)) is not None]


def close_inherited_locks() -> None:
    """In a forked process, close the lock files of its parent: a lock must end with its owner."""
    for file in HELD_LOCKS:
        file.close()
    HELD_LOCKS.clear()


os.register_at_fork(after_in_child=close_inherited_locks)
