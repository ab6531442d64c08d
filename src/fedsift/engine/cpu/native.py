"""The CPU's own kernels: C that is compiled on this machine when it is first needed, and kept.

Where there is no C compiler there are none, and PyTorch's own layers do the work.
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
from functools import cache, partial
from pathlib import Path

from torch import Tensor

SOURCE = Path(__file__).with_name("batchlast.c")
FLAGS = ("-O3", "-fno-math-errno", "-shared", "-fPIC")
FOR_THIS_PROCESSOR = (("-march=native",), ("-mcpu=native",), ())
"""How compilers are told to use all that the processor can; the first way that works is taken."""

Argument = Tensor | int | float
Kernel = Callable[..., None]


def kernel(name: str) -> Kernel:
    """A function of the C file, which takes tensors (their memory) and numbers."""
    return lambda *arguments: prepared(name, *arguments)()


def prepared(name: str, *arguments: Argument) -> Callable[[], None]:
    """A call of a function of the C file that can be made again and again, with the same memory."""
    function = getattr(load(), name)
    function.restype = None
    return partial(function, *map(_in_c, arguments))


def _in_c(x: Argument) -> c_void_p | c_ssize_t | c_double:
    if not isinstance(x, Tensor):
        return c_ssize_t(x) if isinstance(x, int) else c_double(x)
    pointer = c_void_p(x.data_ptr())
    setattr(pointer, "memory", x)  # noqa: B010, it lives as long as what points to it
    return pointer


@cache
def load() -> ctypes.CDLL | None:
    """The compiled file, or None where it cannot be had."""
    try:
        return loaded_from(Path.home() / ".cache" / "fedsift" / "kernels")
    except (OSError, RuntimeError, subprocess.SubprocessError):
        return None


def loaded_from(folder: Path) -> ctypes.CDLL:
    """The compiled file, kept in a folder of this user's, or in none if it is another user's."""
    if make_private(folder):
        return ctypes.CDLL(str(built(folder)))
    with tempfile.TemporaryDirectory() as private:  # once loaded, the file is not needed
        return ctypes.CDLL(str(built(Path(private))))


def make_private(folder: Path) -> bool:
    """Create a folder, or restrict an existing one, so that only this user has access to it.

    False for a folder of another user, which is left as it is.
    """
    for each in (*reversed(folder.parents), folder):
        each.mkdir(mode=0o700, exist_ok=True)
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid():
        return False
    folder.chmod(0o700)
    return True


def built(folder: Path) -> Path:
    """The path of the compiled file; it is compiled if it is missing or not to be trusted."""
    path = folder / f"{SOURCE.stem}-{fingerprint()}.so"
    if not is_private(path):
        with tempfile.TemporaryDirectory(dir=folder) as partial:
            new = compiled(Path(partial) / path.name)
            new.chmod(0o700)
            os.replace(new, path)
    return path


def is_private(path: Path) -> bool:
    """Whether a path is a file that belongs to this user and that no other user can write to."""
    try:
        about = path.lstat()
    except FileNotFoundError:
        return False
    is_own = stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid()
    return is_own and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def compiled(path: Path) -> Path:
    """Compile the C file to the given path."""
    for flags in FOR_THIS_PROCESSOR:
        words = [*compiler().split(), *FLAGS, *flags, "-o", str(path), str(SOURCE), "-lm"]
        if subprocess.run(words, capture_output=True, timeout=60).returncode == 0:
            return path
    raise OSError(f"{compiler()} cannot compile {SOURCE}")


def compiler() -> str:
    """The command of the C compiler."""
    return os.environ.get("CC", "cc")


def fingerprint() -> str:
    """A hash of source, compiler, flags and processor features: many machines may share a home."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next(line for line in lines if line.lower().startswith(("flags", "features")))
    except (OSError, StopIteration):
        processor = platform.processor()
    build = f"{compiler()} {FLAGS} {FOR_THIS_PROCESSOR} {platform.machine()} {processor}"
    known = SOURCE.read_bytes() + build.encode()
    return hashlib.sha256(known).hexdigest()[:16]
