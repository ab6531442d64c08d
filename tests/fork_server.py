"""Start Python processes that have torch and fedsift imported already.

A fresh interpreter spends more than a second on its imports. These processes are forks of a server
that has only done the imports, so each starts in milliseconds and knows nothing of the tests.
"""

import os
import runpy
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver, get_context
from multiprocessing.connection import wait
from pathlib import Path
from subprocess import TimeoutExpired
from tempfile import mkdtemp
from threading import Lock
from unittest.mock import patch
from weakref import finalize

SERVER = get_context("forkserver")
SERVER.set_forkserver_preload(
    [
        "torch.distributed.run",
        "matplotlib.pyplot",
        "sklearn.datasets",
        "jinja2",
        "plotly.offline",
        "fedsift.cli.entry",
        "fedsift.cli.training",
        "fedsift.report.html",
        "fedsift.cli.deploy",
        "fedsift.flower.warm",
        "fedsift.flower.client",
        "fedsift.flower.strategy",
        "flwr.cli.app",
        "flwr.supercore.cli.flower_superexec",
        "flwr.supernode.cli",
        "flwr.superlink.cli",
    ]
)
LOCK = Lock()


class ForkedContext(type(SERVER)):
    """A context of multiprocessing whose processes have this process's environment, as if spawned.

    Forks of the server have the environment of the test that started it.
    """

    def Process(self, *, target, args):
        return SERVER.Process(target=_in_environment, args=(dict(os.environ), target, args))


def _in_environment(environment, target, args):
    os.environ.clear()
    os.environ.update(environment)
    target(*args)


class ForkedPython:
    """``python WORDS``, where WORDS are ``-m MODULE …`` or ``SCRIPT …``; like subprocess.Popen.

    What it prints is appended to the files ``outputs``, for stdout and stderr.
    """

    def __init__(
        self,
        *words: str,
        cwd: Path | str = ".",
        env: Mapping[str, str] | None = None,
        start_new_session: bool = False,
        outputs: Sequence[Path] = (),
    ) -> None:
        self._folder = mkdtemp()
        finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        environment = dict(os.environ if env is None else env)
        files = outputs or [Path(self._folder, name) for name in ("stdout", "stderr")]
        given = (words, files, os.path.abspath(cwd), environment, start_new_session)
        self._process = SERVER.Process(target=_run_python, args=given)
        with LOCK, patch.dict(os.environ, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1"):
            self._process.start()
        self.pid = self._process.pid
        self.kill = self._process.kill

    def poll(self) -> int | None:
        # Starting another process asks for exit codes, too. Two threads that read one at the same
        # time would each get a part of it.
        with LOCK:
            return self._process.exitcode

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def wait(self, timeout: float | None = None) -> int | None:
        wait([self._process.sentinel], timeout)
        if self.returncode is None:
            self.kill()
            raise TimeoutExpired("python", timeout or 0.0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        return self.printed(), self.printed("stderr")

    def printed(self, stream: str = "stdout") -> str:
        """What it has printed so far."""
        file = Path(self._folder) / stream
        return file.read_text(encoding="utf-8") if file.exists() else ""


def _run_python(
    words: list[str],
    outputs: Sequence[Path],
    cwd: str,
    environment: dict[str, str],
    is_leader: bool,
) -> None:
    if is_leader:
        os.setsid()
    # A ForkedPython that this process starts comes from the same server, not from one of its own.
    forkserver._forkserver.ensure_running = lambda: None
    for descriptor, file in enumerate(outputs, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    # Without this it would ignore Ctrl-C where the tests themselves run in the background.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    if words[0] == "-m":
        sys.argv = list(words[1:])
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(words)
        runpy.run_path(words[0], run_name="__main__")
