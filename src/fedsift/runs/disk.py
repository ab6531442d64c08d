"""Write files so that a crash leaves either the complete old content or the complete new one."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedsift.vector import raw_bytes

SEAL = ', "digest": "'
"""Separates the metadata of a file of tensors from the digest at its end."""


class CorruptFile(ValueError):
    """A file whose content is not what was written."""


def save_tensors(
    path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any], mode: int = 0o666
) -> None:
    """Write named tensors and a JSON object about them, with a digest of both.

    Equal tensors give equal bytes. The metadata has a single key because safetensors does not keep
    the order of several. The umask applies to the file's ``mode``.
    """
    whole = {name: x.detach().contiguous() for name, x in tensors.items()}
    text = json.dumps(about)
    sealed = text.removesuffix("}") + SEAL + digest(text, whole) + '"}'
    with replacing(path) as partial:
        partial.touch(mode)
        allowed = partial.stat().st_mode  # safetensors would always write 0600
        try:
            save_file(whole, partial, metadata={"fedsift": sealed})
        except SafetensorError as problem:
            raise OSError(str(problem)) from None
        partial.chmod(allowed)


def load_tensors(path: Path, device: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read and check what :func:`save_tensors` wrote: the JSON object and the tensors."""
    try:
        with safe_open(path, "pt", device=device) as file:
            text, _, seal = file.metadata()["fedsift"].rpartition(SEAL)
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        if seal != digest(text + "}", tensors) + '"}':
            raise ValueError("its digest does not match its content")
        return json.loads(text + "}"), tensors
    except (SafetensorError, OSError, LookupError, TypeError, ValueError, AttributeError) as why:
        raise CorruptFile(f"{path} is corrupt: {why}") from None


def read_metadata(path: Path) -> dict[str, Any]:
    """Read the JSON object of a file of tensors, without checking it; empty if there is none."""
    try:
        with safe_open(path, "pt") as file:
            found = json.loads(file.metadata()["fedsift"])
    except (SafetensorError, OSError, LookupError, TypeError, ValueError, AttributeError):
        return {}
    return found if isinstance(found, dict) else {}


def digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    """Hash the metadata as written, and every tensor's name, dtype, shape and bytes."""
    hasher = hashlib.blake2b(text.encode(), digest_size=16)
    for name, x in sorted(tensors.items()):
        hasher.update(f"{name} {x.dtype} {tuple(x.shape)}".encode())
        hasher.update(raw_bytes(x))
    return hasher.hexdigest()


def replace_file(path: Path, content: bytes) -> None:
    """Write a file so that a crash leaves either the old content or the new."""
    with replacing(path) as partial:
        partial.write_bytes(content)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path to write to; it replaces the file when the block ends without an exception."""
    if path.exists() and not path.is_file():
        raise OSError(f"{path} is not a regular file")
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)
    try:
        yield partial
        flush_to_disk(partial)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)  # a partial file would only take space
        raise
    flush_to_disk(path.parent)


def flush_to_disk(path: Path) -> None:
    """Wait until a file, or the list of files in a folder, has reached the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
