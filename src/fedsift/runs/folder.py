"""The files of a run: its configuration, metrics, uploads, clients, checkpoint, model, summary."""

from __future__ import annotations

import copy
import fcntl
import json
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from fedsift.data import digest_of
from fedsift.errors import ConfigError
from fedsift.federation.memories import Memories, OnDisk, SlotFile
from fedsift.federation.round import (
    Federation,
)
from fedsift.federation.snapshot import (
    Snapshot,
)
from fedsift.runs.checkpoint import Checkpoint, fingerprint_of, held, snapshot_of, tensors_of
from fedsift.runs.config import (
    RunConfig,
    read_values,
)
from fedsift.runs.disk import CorruptFile, load_tensors, replace_file, save_tensors, to_disk
from fedsift.simulation import Record


@dataclass(frozen=True)
class RunFolder:
    """A run on disk.

    Every file is replaced whole or not at all, but for those of lines and the clients' memories.
    """

    path: Path

    @property
    def config_file(self) -> Path:
        """The configuration, as TOML."""
        return self.path / "config.toml"

    @property
    def lock_file(self) -> Path:
        """Empty, and never replaced: whoever is at work in the folder has it locked."""
        return self.path / ".lock"

    @property
    def metrics_file(self) -> Path:
        """One JSON object a round."""
        return self.path / "metrics.jsonl"

    @property
    def uploads_file(self) -> Path:
        """One JSON object a round on what was uploaded; not every run has it."""
        return self.path / "uploads.jsonl"

    @property
    def clients_file(self) -> Path:
        """The clients' data in numbers; not every run has it."""
        return self.path / "clients.json"

    @property
    def checkpoint_file(self) -> Path:
        """Everything needed to go on."""
        return self.path / "checkpoint.safetensors"

    @property
    def model_file(self) -> Path:
        """The trained model, as ``load_state_dict`` takes it; there once the run has ended."""
        return self.path / "model.safetensors"

    @property
    def memory_file(self) -> Path:
        """What clients keep between rounds, where that is much."""
        return self.path / "memory.bin"

    @property
    def summary_file(self) -> Path:
        """The whole run in one JSON object; there once the run has ended."""
        return self.path / "summary.json"

    @classmethod
    def create(cls, path: Path, config: RunConfig) -> RunFolder:
        """A new run's folder; refuses one that holds a run."""
        folder = cls(path)
        folder.require_free()  # here, lest a lock is left in a folder that is refused
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
    def create_or_continue(cls, path: Path, config: RunConfig) -> RunFolder:
        """A new run's folder, or the one of the same run where it stopped."""
        folder = cls(path)
        return folder if folder.holds(config) else cls.create(path, config)

    @classmethod
    def create_or_extend(cls, path: Path, config: RunConfig) -> RunFolder:
        """The same, and the run may be given more rounds than it had."""
        folder = cls(path)
        if not exists(folder.config_file):
            return cls.create(path, config)
        with folder.locked():
            rounds = folder.config().rounds
            if folder.holds(replace(config, rounds=rounds)) and config.rounds > rounds:
                replace_file(folder.config_file, config.toml().encode())
        return folder

    def require_free(self) -> None:
        """Refuse a folder that holds a run."""
        files = (self.config_file, self.metrics_file, self.checkpoint_file, self.summary_file)
        if any(exists(file) for file in files):
            raise ConfigError(
                f"{self.path} holds a run already: continue it with '{self.command}', or give "
                "another --out"
            )
        if exists(self.model_file):
            raise ConfigError(
                f"{self.model_file} is there already, and a run would end with its own: give "
                "another --out"
            )

    @property
    def command(self) -> str:
        """What continues the run."""
        return f"fedsift resume {shlex.quote(str(self.path))}"

    def holds(self, config: RunConfig) -> bool:
        """Whether this very run was begun here; refuses a folder that holds another."""
        if not exists(self.config_file):
            self.require_free()
            return False
        found, wanted = self.config().flat(), config.flat()
        other = [k for k in sorted({*found, *wanted}) if found.get(k) != wanted.get(k)]
        if other:
            told = (f"{key} = {found.get(key)}, not {wanted.get(key)}" for key in other[:3])
            raise ConfigError(
                f"{self.path} holds another run ({', '.join(told)}): give another --out"
            )
        return True

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """An existing run's folder."""
        folder = cls(path)
        if not exists(folder.config_file):
            raise ConfigError(f"{path} holds no run: there is no {folder.config_file.name} in it")
        return folder

    def config(self) -> RunConfig:
        """The run's configuration."""
        return RunConfig.read(self.config_file)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep every other process out of the run while this one is at it."""
        with self.lock_file.open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"another process is at work in {self.path}") from None
            try:
                yield
            finally:
                fcntl.flock(file, fcntl.LOCK_UN)  # forked processes hold the open file, too

    def append(self, record: Record, uploads: Mapping[str, Any]) -> None:
        """Add a round's metrics, and what its uploads were like; the end is no longer there."""
        for file in (self.summary_file, self.model_file):
            file.unlink(missing_ok=True)
        for file, line in ((self.uploads_file, uploads), (self.metrics_file, record)):
            with file.open("a", encoding="utf-8") as opened:
                opened.write(json.dumps(line, allow_nan=False) + "\n")

    def history(self) -> list[Record]:
        """The metrics of each round from 1 on, up to the first line that is not the next one."""
        records: list[Record] = []
        for record in objects_in(self.metrics_file):
            if record.get("round") != len(records) + 1 or not is_record(record):
                break
            records.append(record)
        return records

    def uploads(self) -> list[dict[str, Any]]:
        """What the uploads of each round were like, as far as that was recorded."""
        kinds = {"round": int, "uploads": int, "bytes": dict, "masks": dict}
        return [
            line
            for line in objects_in(self.uploads_file)
            if all(isinstance(line.get(key), kind) for key, kind in kinds.items())
        ]

    def labels(self) -> list[list[int]]:
        """How many samples of each class each client has, if that was recorded."""
        labels = object_in(self.clients_file).get("labels")
        is_table = isinstance(labels, list) and all(isinstance(row, list) for row in labels)
        if not labels or not is_table or len(set(map(len, labels))) > 1:
            return []
        return labels if all(isinstance(n, int) for row in labels for n in row) else []

    def summary(self) -> dict[str, Any]:
        """What summary.json says; nothing if the run has not ended."""
        summary = object_in(self.summary_file)
        if summary and not isinstance(summary.get("environment"), dict):
            raise ConfigError(f"{self.summary_file} is damaged: {self.command!r} makes it anew")
        return summary

    def write_clients(self, labels: list[list[int]] | None) -> None:
        """Write down how many samples of each class each client has, where that is known."""
        if labels is not None:
            replace_file(self.clients_file, (json.dumps({"labels": labels}) + "\n").encode())

    def rewind(self, round: int) -> list[Record]:
        """Drop the metrics of rounds after the given one, and give the others."""
        history = self.history()[:round]
        if len(history) != round:
            raise ConfigError(
                f"{self.metrics_file} has {len(history)} of the {round} rounds before the "
                "checkpoint: the run cannot go on from here"
            )
        replace_file(self.metrics_file, lines_of(history))
        if self.uploads_file.exists():
            kept = [line for line in self.uploads() if line["round"] <= round]
            replace_file(self.uploads_file, lines_of(kept))
        return history

    def save(self, checkpoint: Checkpoint, federation: Federation, config: RunConfig) -> None:
        """Write a checkpoint of a run with this configuration, whatever its file says by now.

        Until it is whole on the disk, the last one stays.
        """
        memories = checkpoint.snapshot.client_memory
        if isinstance(memories, OnDisk):
            memories.file.to_disk()
        about = {
            "round": checkpoint.snapshot.round,
            "traffic": asdict(checkpoint.snapshot.traffic),
            "norms": checkpoint.snapshot.norms.medians,
            "seconds": checkpoint.seconds,
            "layout": federation.task.layout.fingerprint(),
            "config": fingerprint_of(config),
            "data": digest_of(config.dataset),
        }
        for file in (self.uploads_file, self.metrics_file):
            if file.exists():
                to_disk(file)  # a checkpoint must never outlive its metrics
        save_tensors(self.checkpoint_file, tensors_of(checkpoint.snapshot), about)

    def load(self, federation: Federation, device: str) -> Checkpoint | None:
        """The last checkpoint, checked; None if the run stopped before its first."""
        if not self.checkpoint_file.exists():
            return None
        config = self.config()
        if missing := config.flat().keys() - read_values(self.config_file).keys():
            raise ConfigError(
                f"{self.path} was begun with an earlier fedsift, which had no "
                f"{', '.join(sorted(missing))}: begin anew with another --out"
            )
        try:
            about, tensors = load_tensors(self.checkpoint_file, device)
        except CorruptFile as problem:
            raise ConfigError(str(problem)) from None
        if about.get("layout") != federation.task.layout.fingerprint():
            raise ConfigError(f"{self.checkpoint_file} is of another model than config.toml's")
        if about.get("config") != fingerprint_of(config):
            raise ConfigError(
                f"{self.config_file} was changed since {self.checkpoint_file} was written: "
                "only the number of rounds may change"
            )
        if about["round"] > config.rounds:
            raise ConfigError(
                f"{self.config_file} asks for {config.rounds} rounds, and {about['round']} are "
                "done: their number may only grow"
            )
        if about.get("data", "") != digest_of(config.dataset):
            raise ConfigError(
                f"{self.path} was begun on another text of {config.dataset}: go on with the "
                "Python that it was begun with, or begin anew with another --out"
            )
        try:
            memories = self.load_memories(federation, tensors)
        except (OSError, ValueError) as problem:
            raise ConfigError(f"{self.memory_file} is corrupt: {problem}") from None
        snapshot = snapshot_of(about, tensors, memories)
        if missing := set(federation.algorithm.server_memory) - set(snapshot.server_memory):
            raise ConfigError(
                f"{self.checkpoint_file} lacks the server's {', '.join(sorted(missing))}: an "
                "earlier fedsift wrote it; begin anew with another --out"
            )
        return Checkpoint(snapshot, about["seconds"])

    def load_memories(self, federation: Federation, tensors: Mapping[str, Tensor]) -> Memories:
        """What the clients kept: in the checkpoint, or in a file that it refers to."""
        if "client_slots" not in tensors:
            return held(tensors)
        file = SlotFile(federation.algorithm.client_memory, tensors["w"], self.memory_file)
        numbers, clients = tensors["client_slots"].T.tolist()
        digests = [bytes(row) for row in tensors["client_digests"].tolist()]
        return OnDisk(file, dict(zip(clients, file.claim(numbers, digests), strict=True)))

    def save_model(self, federation: Federation, snapshot: Snapshot) -> None:
        """Write the model of a run's last snapshot: all that ``load_state_dict`` wants.

        Where the clients alone have the model, that is what was trained of it.
        """
        task, w = federation.task, federation.model_weights(snapshot)
        about = {"round": snapshot.round, "layout": task.layout.fingerprint()}
        model = copy.deepcopy(task.model)
        if not any(True for _ in model.parameters()):
            save_tensors(self.model_file, task.layout.unflatten(w), about)
            return
        task.layout.write(w, model)
        # Cloned, as tied parameters share their memory, and a file of tensors has them apart.
        save_tensors(self.model_file, {k: x.clone() for k, x in model.state_dict().items()}, about)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json."""
        replace_file(self.summary_file, (json.dumps(summary, indent=2) + "\n").encode())


def object_in(path: Path) -> dict[str, Any]:
    """The JSON object in a file; an empty one if there is no file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as problem:
        raise ConfigError(f"{path} is damaged: {problem}") from None
    return found if isinstance(found, dict) else {}


def is_record(record: Mapping[str, Any]) -> bool:
    """Whether a line of metrics.jsonl has its numbers.

    >>> is_record({"round": 1})
    False
    """
    numbers = [record.get(key) for key in ("accuracy", "loss")]
    needed = ("round", "clients", "uplink_bits_paper", "uplink_bytes", "downlink_bytes", "seconds")
    is_whole = all(isinstance(record.get(key), int | float) for key in needed)
    return is_whole and all(x is None or isinstance(x, int | float) for x in numbers)


def objects_in(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file, one a line, up to the first line that is none."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            break  # a crash cut it off
        if not isinstance(record, dict):
            break
        found.append(record)
    return found


def lines_of(records: Iterable[Mapping[str, Any]]) -> bytes:
    r"""JSON objects, one a line.

    >>> lines_of([{"round": 1}])
    b'{"round": 1}\n'
    """
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def exists(path: Path) -> bool:
    """Whether there is such a file; a path that the system refuses is refused in one line."""
    try:
        return path.exists()
    except OSError as problem:
        raise ConfigError(f"{path.parent} cannot be used: {problem.strerror}") from None


def column(history: Iterable[Record], name: str) -> list[float]:
    """One column of the metrics, without the rounds that lack it."""
    return [float(value) for r in history if (value := r.get(name)) is not None]
