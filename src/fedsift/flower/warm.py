"""A Flower SuperExec that forks app processes, so that none has to import PyTorch again.

Flower's SuperExec starts a new Python interpreter per message, which spends seconds on imports.
This one imports PyTorch, fedsift and Flower once, in a *fork server*: a process without threads,
connections or secrets. Per message the fork server forks a child, which then runs Flower's own
``flwr-clientapp`` or ``flwr-serverapp``. Each message still has a process of its own.

The SuperExec itself is Flower's: it asks the SuperNode or SuperLink for work, and passes each task
to the fork server through a pipe. If the fork server is gone, tasks start as Flower starts them.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
import sys
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from logging import WARNING
from typing import BinaryIO, NoReturn

from flwr.proto.runtime_pb2 import AcquireTaskRequest, AcquireTaskResponse
from flwr.supercore import log
from flwr.supercore.constant import TASK_TYPE_TO_COMMAND, TaskType
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.superexec.executor.subprocess_executor import SubprocessExecutor
from flwr.supercore.superexec.executor.types import ExecutionSpec, LaunchResult

from fedsift.errors import ConfigError
from fedsift.flower.superlink import with_retries

ENTRY_POINTS = {
    TaskType.CLIENT_APP: ("flwr.supernode.cli.flwr_clientapp", "flwr_clientapp"),
    TaskType.SERVER_APP: ("flwr.superlink.cli.flwr_serverapp", "flwr_serverapp"),
}
"""The tasks that are forked: the module and the function behind their command."""
PRELOADED = (
    "torch",
    "fedsift.flower.client",
    "fedsift.flower.strategy",
    "httpcore",  # Flower imports it when it connects
    *(module for module, _ in ENTRY_POINTS.values()),
)


def run_superexec(arguments: Sequence[str], preload: Iterable[str] = ()) -> None:
    """Run ``flower-superexec`` with these arguments, and fork its tasks.

    ``preload`` names further modules that the app imports.
    """
    import_all([*PRELOADED, *preload])
    read, write = os.pipe()
    if os.fork() == 0:
        os.close(write)
        with open(read, "rb") as orders:
            order = fork_per_order(orders)
        if order is not None:
            end_process(run_task(order))
        return
    os.close(read)
    executor = ForkExecutor(write)
    superexec = import_module("flwr.supercore.superexec.run_superexec")
    superexec.get_executor = lambda *_, **__: executor  # type: ignore[attr-defined]
    superexec.RuntimeHttpClient = PatientClient  # type: ignore[attr-defined]
    command = import_module("flwr.supercore.cli.flower_superexec")
    sys.argv = ["flower-superexec", *arguments]
    command.flower_superexec()


class PatientClient(RuntimeHttpClient):
    """Flower's client, which asks for work again if the SuperLink or SuperNode fails.

    Otherwise a SuperLink whose database is locked for five seconds would end its SuperExec, and
    with it all further runs.
    """

    def AcquireTask(self, request: AcquireTaskRequest) -> AcquireTaskResponse:  # noqa: N802
        """Ask for a task."""
        return with_retries(lambda: super(PatientClient, self).AcquireTask(request))


def import_all(modules: Iterable[str]) -> None:
    """Import modules without starting threads, which do not survive a fork."""
    before = os.environ.get("OPENBLAS_NUM_THREADS")
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    for module in modules:
        try:
            import_module(module)
        except ImportError as problem:
            raise ConfigError(f"cannot preload {module}: {problem}") from None
    del os.environ["OPENBLAS_NUM_THREADS"]
    if before is not None:
        os.environ["OPENBLAS_NUM_THREADS"] = before
    gc.collect()
    gc.freeze()  # children share these objects' memory pages


@dataclass
class ForkExecutor(SubprocessExecutor):
    """Flower's executor of local processes, with the pipe to the fork server."""

    pipe: int

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        """Let the fork server start the task."""
        if spec.task_type not in ENTRY_POINTS or spec.runtime_dependency_install:
            return super().launch(spec)
        order = {"arguments": arguments_of(spec), "is_quiet": spec.suppress_output}
        line = json.dumps({"task_type": spec.task_type.value, **order}) + "\n"
        try:
            os.write(self.pipe, line.encode())
        except BrokenPipeError:
            log(WARNING, "the fork server has ended: starting the task in a new interpreter")
            return super().launch(spec)
        return LaunchResult.accepted()


def arguments_of(spec: ExecutionSpec) -> list[str]:
    """Return a task's command-line arguments."""
    arguments = ["--runtime-api-address", spec.runtime_api_address, "--token", spec.token]
    if spec.insecure:
        arguments.append("--insecure")
    elif spec.root_certificates_path is not None:
        arguments += ["--root-certificates", spec.root_certificates_path]
    if spec.parent_pid is not None:
        arguments += ["--parent-pid", str(spec.parent_pid)]
    return arguments


def fork_per_order(orders: BinaryIO) -> bytes | None:
    """Fork a child per order; return the order in the child, and None at the end of the server."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server ends with the SuperExec
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    for order in orders:
        if os.fork() == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return order
    return None


def run_task(order: bytes) -> int:
    """Run a task in this process, as its command would, and return its exit code."""
    import numpy as np

    task = json.loads(order)
    task_type = TaskType(task["task_type"])
    if task["is_quiet"]:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
    np.random.seed()  # noqa: NPY002 (otherwise, all children would draw the same numbers)
    sys.argv = [TASK_TYPE_TO_COMMAND[task_type], *task["arguments"]]
    module, function = ENTRY_POINTS[task_type]
    try:
        getattr(import_module(module), function)()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def end_process(code: int) -> NoReturn:
    """End a forked process without destroying the modules that it inherited.

    Destroying them takes 0.2 s of CPU time, most of what a small task needs. As at every exit,
    threads are waited for and the functions registered with :mod:`atexit` are called.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
