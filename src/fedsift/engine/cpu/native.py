"""The CPU's own kernels: C that is compiled on this machine when it is first needed, and kept.

Where there is no C compiler there are none, and PyTorch's own layers do the work.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
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
        return ctypes.CDLL(str(built(Path.home() / ".cache" / "fedsift" / "kernels")))
    except (OSError, RuntimeError, subprocess.SubprocessError):
        return None


def built(folder: Path) -> Path:
    """Where the compiled file is; it is made if it is not there."""
    path = folder / f"{SOURCE.stem}-{fingerprint()}.so"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as partial:
            os.replace(compiled(Path(partial) / path.name), path)
    return path


def compiled(path: Path) -> Path:
    """Compile the C file to the given path."""
    compiler = os.environ.get("CC", "cc")
    for flags in FOR_THIS_PROCESSOR:
        words = [*compiler.split(), *FLAGS, *flags, "-o", str(path), str(SOURCE), "-lm"]
        if subprocess.run(words, capture_output=True, timeout=60).returncode == 0:
            return path
    raise OSError(f"{compiler} cannot compile {SOURCE}")


def fingerprint() -> str:
    """A hash of source, flags and what the processor can do: a home may be many machines'."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next(line for line in lines if line.lower().startswith(("flags", "features")))
    except (OSError, StopIteration):
        processor = platform.processor()
    known = SOURCE.read_bytes() + f"{FLAGS} {platform.machine()} {processor}".encode()
    return hashlib.sha256(known).hexdigest()[:16]
