"""What the processes of a federation use: memory, open files and disk."""

import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from processes import Federation

RECORDS = {".log", ".jsonl"}
"""Suffixes of files that are meant to grow."""


@dataclass
class Usage:
    """Resident bytes and open files of the lasting processes, and bytes on disk, by round.

    The ServerApp is one of these processes. ``records`` are the bytes on disk that are meant to
    grow: logs, and the metrics and uploads of each round.
    """

    memory: list[int] = field(default_factory=list)
    files: list[int] = field(default_factory=list)
    records: list[int] = field(default_factory=list)
    disk: list[int] = field(default_factory=list)
    most: int = 0

    def add(self, federation: Federation) -> None:
        lasting = [p.pid for p in federation.processes.values() if p.poll() is None]
        with suppress(OSError, ValueError):
            lasting.append(int((federation.folder / "notes" / "server").read_text()))
        self.most = max(self.most, len(lasting))
        if len(lasting) < self.most:
            return  # something is being restarted
        self.memory.append(sum(map(resident, lasting)))
        self.files.append(sum(map(open_files, lasting)))
        sizes = {path: size(path) for path in federation.folder.rglob("*")}
        self.records.append(sum(n for path, n in sizes.items() if path.suffix in RECORDS))
        self.disk.append(sum(sizes.values()) - self.records[-1])

    def growth(self, numbers: list[int]) -> float:
        """How much larger the median of the last quarter is than that of the second."""
        quarter = max(1, len(numbers) // 4)
        return median(numbers[-quarter:]) - median(numbers[quarter : 2 * quarter] or numbers[:1])

    def quarters(self, numbers: list[int], unit: int) -> list[int]:
        """The median of each quarter."""
        quarter = max(1, len(numbers) // 4)
        return [round(median(numbers[n * quarter :][:quarter]) / unit) for n in range(4)]

    def summary(self) -> dict[str, object]:
        return {
            "memory MiB": self.quarters(self.memory, 2**20),
            "memory growth MiB": round(self.growth(self.memory) / 2**20, 1),
            "files": self.quarters(self.files, 1), "files growth": self.growth(self.files),
            "disk KiB": self.quarters(self.disk, 1024),
            "disk growth KiB": round(self.growth(self.disk) / 1024, 1),
            "logs and metrics KiB": self.quarters(self.records, 1024),
        }  # fmt: skip


def resident(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    return 0


def open_files(pid: int) -> int:
    with suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/fd"))
    return 0


def size(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_blocks * 512 if path.is_file() else 0
    return 0
