"""Files that a crash leaves whole: the old one or the new one, never half of either."""

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
"""What comes before the last value of the JSON object in a file of tensors: a hash of all else."""


class CorruptFile(ValueError):
    """A file that is not what was once written."""


def save_tensors(
    path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any], mode: int = 0o666
) -> None:
    """Write named tensors and a JSON object about them, sealed with a digest of both.

    The same tensors make the same bytes: the metadata has one key, as safetensors would write
    several in any order. The umask applies to the file's ``mode``.
    """
    whole = {name: x.detach().contiguous() for name, x in tensors.items()}
    text = json.dumps(about)
    sealed = text.removesuffix("}") + SEAL + digest(text, whole) + '"}'
    with replacing(path) as partial:
        partial.touch(mode)
        allowed = partial.stat().st_mode  # safetensors would always write 0600
        save_file(whole, partial, metadata={"fedsift": sealed})
        partial.chmod(allowed)


def load_tensors(path: Path, device: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What :func:`save_tensors` wrote: the object and the tensors, checked."""
    try:
        with safe_open(path, "pt", device=device) as file:
            text, _, seal = file.metadata()["fedsift"].rpartition(SEAL)
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        if seal != digest(text + "}", tensors) + '"}':
            raise ValueError("it was altered")
        return json.loads(text + "}"), tensors
    except (SafetensorError, OSError, LookupError, TypeError, ValueError, AttributeError) as why:
        raise CorruptFile(f"{path} is corrupt: {why}") from None


def digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    """A hash of the metadata as written, and of every tensor's name, kind, shape and bytes."""
    hasher = hashlib.blake2b(text.encode(), digest_size=16)
    for name, x in sorted(tensors.items()):
        hasher.update(f"{name} {x.dtype} {tuple(x.shape)}".encode())
        hasher.update(raw_bytes(x))
    return hasher.hexdigest()


def replace_file(path: Path, content: bytes) -> None:
    """Write a file so that a crash leaves either the old one or the new one."""
    with replacing(path) as partial:
        partial.write_bytes(content)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Where to write what is to replace a file; it does so at the end, if all went well."""
    if path.exists() and not path.is_file():
        raise OSError(f"{path} is not a file that could be replaced")
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)
    try:
        yield partial
        to_disk(partial)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)  # what is there of it would only fill the disk
        raise
    to_disk(path.parent)


def to_disk(path: Path) -> None:
    """See that a file, or a folder's list of files, is on the disk and not only on its way."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
