"""The lines of metrics.jsonl and uploads.jsonl: one JSON object per round, checked when read.

A crash may cut off the last line, which is then ignored. Any other change is treated as
damage: each line must hold the fields of its round, and a checkpoint holds a digest of
all lines up to its own round.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from fedsift.errors import ConfigError
from fedsift.runs.disk import read_metadata, replace_file
from fedsift.runs.kept_checkpoints import forget_checkpoints
from fedsift.simulation import Record

if TYPE_CHECKING:
    from fedsift.runs.folder import RunFolder

Fields = Mapping[str, type | tuple[type, ...]]
NUMBER, NUMBER_OR_NONE = (int, float), (int, float, type(None))
METRICS: Fields = {
    "round": int,
    "accuracy": NUMBER_OR_NONE,
    "loss": NUMBER_OR_NONE,
    "clients": int,
    "uplink_bits_paper": NUMBER,
    "uplink_bytes": NUMBER,
    "downlink_bytes": NUMBER,
    "seconds": NUMBER,
}
"""The fields that every line of metrics.jsonl has, with their types."""
UPLOADS: Fields = {"round": int, "uploads": int, "bytes": dict, "masks": dict}
"""The same for uploads.jsonl."""


def append_round(folder: RunFolder, record: Record, uploads: Mapping[str, Any]) -> None:
    """Append a round's metrics and upload statistics; delete what described a finished run."""
    for file in (folder.summary_file, folder.model_file):
        file.unlink(missing_ok=True)
    append_line(folder.uploads_file, uploads)
    append_line(folder.metrics_file, record)


def append_line(file: Path, content: Mapping[str, Any]) -> None:
    """Append a line with a JSON object."""
    with file.open("a", encoding="utf-8") as opened:
        opened.write(json.dumps(content, allow_nan=False) + "\n")


def rewind(folder: RunFolder, round: int) -> list[Record]:
    """Drop the lines and checkpoints after a checkpoint's round; return the metrics up to it.

    Round -1 drops all lines: without a checkpoint, the initial model is evaluated again.
    """
    history = folder.history()
    folder.uploads()  # refuses damage
    if last_round(history) < round:
        raise ConfigError(
            f"{folder.metrics_file} has {last_round(history)} of the {round} rounds of the "
            "checkpoint: restore the file, or start a new run with --out"
        )
    for file in (folder.metrics_file, folder.uploads_file):
        if file.exists() or file == folder.metrics_file:
            replace_file(file, b"".join(lines_up_to(file, round)))
    forget_checkpoints(folder, after=round)
    return [record for record in history if record["round"] <= round]


def last_round(history: Sequence[Record]) -> int:
    """Return the number of the last round; 0 if there is none.

    >>> last_round([{"round": 0}, {"round": 1}]), last_round([])
    (1, 0)
    """
    return int(history[-1]["round"]) if history else 0


def trained_rounds(history: Sequence[Record]) -> list[Record]:
    """Return the history without round 0, the initial model.

    >>> trained_rounds([{"round": 0}, {"round": 1}])
    [{'round': 1}]
    """
    return [record for record in history if record["round"] > 0]


def read_rounds(
    file: Path, fields: Fields, checkpoint: Path, is_complete: bool = True
) -> list[dict[str, Any]]:
    """Return the objects of consecutive rounds; refuse a file that was damaged.

    The first is round 0 or 1 if the file has to be complete; earlier versions wrote no round 0.
    """
    rounds: list[dict[str, Any]] = []
    for number, line in enumerate(complete_lines(file), start=1):
        found = parsed(line)
        if not has_fields(found, fields):
            raise_damaged(file, f"line {number}")
        expected = rounds[-1]["round"] + 1 if rounds else min(1, found["round"])
        if found["round"] != max(0, expected) and (rounds or is_complete):
            raise_damaged(file, f"line {number} is of round {found['round']}, not {expected}")
        rounds.append(found)
    check_digest(file, checkpoint)
    return rounds


def complete_lines(file: Path) -> list[bytes]:
    """Return the lines of a file with their newlines, without a last line that was cut off."""
    try:
        lines = file.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return lines if not lines or lines[-1].endswith(b"\n") else lines[:-1]


def lines_up_to(file: Path, round: int) -> list[bytes]:
    """Return the lines of a file up to a round; the first line may be of any round."""
    lines = complete_lines(file)
    first = parsed(lines[0]) if lines else {}
    start = first["round"] if has_fields(first, {"round": int}) else 1
    return lines[: max(0, round + 1 - start)]


def parsed(line: bytes) -> Any:
    """Parse a line; None if it is not JSON.

    >>> parsed(b'{"round": 1}'), parsed(b'{"round": 1')
    ({'round': 1}, None)
    """
    try:
        return json.loads(line)
    except ValueError:
        return None


def has_fields(found: Any, fields: Fields) -> bool:
    """Whether a parsed line is an object with all fields, of their types and finite.

    >>> has_fields({"round": 1}, {"round": int}), has_fields({"round": "1"}, {"round": int})
    (True, False)
    """
    if not isinstance(found, dict):
        return False
    is_typed = all(key in found and isinstance(found[key], fields[key]) for key in fields)
    return is_typed and all(math.isfinite(x) for x in found.values() if isinstance(x, float))


def check_digest(file: Path, checkpoint: Path) -> None:
    """Refuse a file whose lines up to the checkpoint's round are not those of the checkpoint."""
    about = read_metadata(checkpoint)
    known = about.get("lines", {}).get(file.name)
    if not known or not file.exists():
        return
    if digest_of(lines_up_to(file, about["round"])) != known:
        raise_damaged(file, f"it does not match {checkpoint.name}")


def line_digests(folder: RunFolder, round: int) -> dict[str, str]:
    """Return a digest of the lines up to a round, by file name."""
    files = [file for file in (folder.metrics_file, folder.uploads_file) if file.exists()]
    return {file.name: digest_of(lines_up_to(file, round)) for file in files}


def digest_of(lines: list[bytes]) -> str:
    """Return a digest of some lines."""
    return hashlib.blake2b(b"".join(lines), digest_size=16).hexdigest()


def raise_damaged(file: Path, reason: str) -> NoReturn:
    """Raise the error for a damaged file."""
    raise ConfigError(f"{file} is damaged ({reason}): restore it, or start a new run with --out")
