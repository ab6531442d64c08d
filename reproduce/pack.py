"""Pack runs into an archive, with what results are made from, and add them to those already in it.

    python reproduce/pack.py runs/reproduce rivals reproduce/rivals/runs.tar.xz

The arguments are the folder of all runs, the part of it to pack, and the archive. Of each run, the
configuration, the summary, and the columns of the metrics that tables and figures use are packed.
The same runs give the same archive, byte for byte. Unpack it into the folder of all runs.
"""

from __future__ import annotations

import io
import json
import sys
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from fedsift.reproduce.runner import DIVERGED
from fedsift.runs.records import METRICS as COLUMNS

METRICS = "metrics.jsonl"
NAMES = ("config.toml", METRICS, "summary.json", DIVERGED)
DIGITS = {"loss": 5, "seconds": 3, "uplink_bits_paper": 2, "uplink_bytes": 4}


def main(out: str, part: str, archive: str) -> None:
    """Pack the runs of a part, and keep those of the archive that are not among them."""
    path = Path(archive)
    files = {**(unpacked(path) if path.exists() else {}), **dict(small_files(Path(out), part))}
    with tarfile.open(path, "w:xz", preset=9) as packed:
        for name, content in sorted(files.items()):
            about = tarfile.TarInfo(name)
            about.size = len(content)
            packed.addfile(about, io.BytesIO(content))
    runs = sum(name.endswith(METRICS) for name in files)
    print(f"{path}: {runs} runs, {path.stat().st_size:,} bytes")


def unpacked(path: Path) -> Mapping[str, bytes]:
    """Return the files of an archive by name."""
    with tarfile.open(path) as archive:
        found = {about.name: archive.extractfile(about) for about in archive if about.isfile()}
        return {name: file.read() for name, file in found.items() if file}


def small_files(out: Path, part: str) -> Iterator[tuple[str, bytes]]:
    """Yield the files of each run that has ended, by their paths below the folder of all runs."""
    for summary in (out / part).rglob("summary.json"):
        for path in (summary.with_name(name) for name in NAMES):
            if path.exists():
                content = path.read_bytes()
                slim = slim_metrics(content) if path.name == METRICS else content
                yield str(path.relative_to(out)), slim


def slim_metrics(content: bytes) -> bytes:
    r"""Return metrics with fewer columns and digits.

    >>> slim_metrics(b'{"round": 1, "loss": 0.1234567, "problems": {}}').decode()
    '{"round": 1, "loss": 0.12346}\n'
    """
    lines = []
    for record in map(json.loads, content.splitlines()):
        slim = {key: record[key] for key in COLUMNS if key in record}
        lines.append({key: rounded(x, DIGITS.get(key)) for key, x in slim.items()})
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def rounded(x: float | None, digits: int | None) -> float | None:
    """Round a number if it has too many digits."""
    return x if x is None or digits is None else round(x, digits)


if __name__ == "__main__":
    main(*sys.argv[1:])
