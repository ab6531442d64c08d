"""Compile, load and call C kernels.

They are compiled on first use and cached. Without a C compiler, PyTorch or NumPy do the work.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import stat
import subprocess
import tempfile
from collections.abc import Callable
from ctypes import c_double, c_ssize_t, c_void_p
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from torch import Tensor

FLAGS = ("-O3", "-fno-math-errno", "-shared", "-fPIC")
FOR_THIS_PROCESSOR = (("-march=native",), ("-mcpu=native",), ())
"""Compiler flags that enable all of the processor's features. The first that work are used."""

Argument = Tensor | NDArray[Any] | int | float
Kernel = Callable[..., None]


@dataclass(frozen=True)
class Library:
    """The kernels in one C source file.

    >>> Library(Path("no-such-file.c")).load() is None
    True
    """

    source: Path

    def kernel(self, name: str) -> Kernel:
        """Return a C kernel as a function of tensors and arrays, passed by address, and numbers."""
        function = self._function(name)
        return lambda *arguments: function(*map(_to_c, arguments))

    def prepared(self, name: str, *arguments: Argument) -> Callable[[], None]:
        """Return a repeatable call of a C kernel on given memory and numbers."""
        call = partial(self._function(name), *map(_to_c, arguments))
        setattr(call, "memory", arguments)  # noqa: B010, keeps the tensors alive
        return call

    def _function(self, name: str) -> Kernel:
        function: Kernel = getattr(self.load(), name)
        function.restype = None  # type: ignore[attr-defined]
        return function

    def load(self) -> ctypes.CDLL | None:
        """Return the compiled kernels, or None if they cannot be compiled."""
        return load(self.source)


def _to_c(x: Argument) -> c_void_p | c_ssize_t | c_double:
    if isinstance(x, int):  # single types, because checks of a union take longer
        return c_ssize_t(x)
    if isinstance(x, float):
        return c_double(x)
    return c_void_p(x.data_ptr() if isinstance(x, Tensor) else x.ctypes.data)


@cache
def load(source: Path) -> ctypes.CDLL | None:
    """Return the compiled kernels of a source file, or None if they cannot be compiled."""
    try:
        return loaded_from(Path.home() / ".cache" / "fedsift" / "kernels", source)
    except (OSError, RuntimeError, subprocess.SubprocessError):
        return None


def loaded_from(folder: Path, source: Path) -> ctypes.CDLL:
    """Return the compiled kernels, cached in the folder unless another user owns it."""
    if make_private(folder):
        return ctypes.CDLL(str(built(folder, source)))
    with tempfile.TemporaryDirectory() as private:  # once loaded, the file is no longer needed
        return ctypes.CDLL(str(built(Path(private), source)))


def make_private(folder: Path) -> bool:
    """Create a folder, or restrict an existing one, so that only this user has access to it.

    Returns False for a folder of another user, which is not changed.
    """
    for path in (*reversed(folder.parents), folder):
        path.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        return False
    folder.chmod(0o700)
    return True


def built(folder: Path, source: Path) -> Path:
    """Return the path of the compiled file. Compile it if it is missing or not private."""
    path = folder / f"{source.stem}-{fingerprint(source)}.so"
    if not is_private(path):
        with tempfile.TemporaryDirectory(dir=folder) as partial:
            new = compiled(Path(partial) / path.name, source)
            new.chmod(0o700)
            os.replace(new, path)
    return path


def is_private(path: Path) -> bool:
    """Whether a path is a file that belongs to this user and that no other user can write to."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    is_own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
    return is_own and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def compiled(path: Path, source: Path) -> Path:
    """Compile the kernels to the given path."""
    for flags in FOR_THIS_PROCESSOR:
        words = [*compiler().split(), *FLAGS, *flags, "-o", str(path), str(source), "-lm"]
        if subprocess.run(words, capture_output=True, timeout=60).returncode == 0:
            return path
    raise OSError(f"{compiler()} cannot compile {source}")


def compiler() -> str:
    """Return the command of the C compiler."""
    return os.environ.get("CC", "cc")


def fingerprint(source: Path) -> str:
    """Return a hash of source, compiler, flags and processor: machines may share a home folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next(line for line in lines if line.lower().startswith(("flags", "features")))
    except (OSError, StopIteration):
        processor = platform.processor()
    build = f"{compiler()} {FLAGS} {FOR_THIS_PROCESSOR} {platform.machine()} {processor}"
    content = source.read_bytes() + build.encode()
    return hashlib.sha256(content).hexdigest()[:16]
