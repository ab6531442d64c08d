"""A pool of forked worker processes."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from fedsift.algorithms.method import Algorithm
from fedsift.engine.processes.messages import Message, checked
from fedsift.engine.processes.worker import close_all, run_worker
from fedsift.errors import WorkerDied
from fedsift.task import Task

LOGGER = logging.getLogger("fedsift")
CHECK_SECONDS = 5.0
"""Without a reply for this long, the pool checks whether a worker is stopped."""
STOPPED_SECONDS = 15.0
"""A worker that stays stopped (SIGSTOP) for this long is reported as lost."""
SILENT_SECONDS = 300.0
"""Workers that are silent for this long, and much longer than before, are named in a warning."""
SILENT_RATIO = 10
"""How many times longer a silent worker must take than before to be named in a warning."""


class WorkerPool:
    """Worker processes, the pipes to them, and the requests they are working on."""

    def __init__(self, size: int, task: Task, algorithm: Algorithm) -> None:
        self.processes: dict[Connection, BaseProcess] = {}
        self.busy: dict[Connection, int] = {}
        self.longest_wait = 0.0
        weakref.finalize(self, end_all, self.processes)
        context = get_context("fork")
        # Linux signals the end of the thread that forked. If that is not the main thread, it may
        # end before the process does, and must not end the workers.
        parent = os.getpid() if threading.current_thread() is threading.main_thread() else None
        for _ in range(size):
            parent_end, worker_end = context.Pipe()
            arguments = (worker_end, [*self.processes, parent_end], parent, task, algorithm)
            self.processes[parent_end] = context.Process(
                target=run_worker, args=arguments, daemon=True
            )
            self.processes[parent_end].start()
            worker_end.close()
        self.can_train = all(self._receive(pipe).fields["can_train"] for pipe in self.processes)

    @property
    def is_idle(self) -> bool:
        """Whether there are processes and none of them is working on a request."""
        return bool(self.processes) and not self.busy

    def ask(self, first: Message, requests: Iterator[Message]) -> Iterator[Message]:
        """Send ``first`` to all workers and each request to a free one.

        Yields the replies in the order of the requests. If the caller stops early, by Ctrl-C for
        example, all processes are killed, because some may still be working.
        """
        queue, replies = enumerate(requests), dict[int, Message]()
        busy = self.busy = dict.fromkeys(self.processes, -1)

        def send_next(pipe: Connection) -> None:
            for number, request in queue:
                busy[pipe] = number
                self._send(pipe, request)
                return
            del busy[pipe]

        try:
            for pipe in self.processes:
                self._send(pipe, first)
                send_next(pipe)
            for number in count():
                while number not in replies and busy:
                    for pipe in self._wait(busy):
                        replies[busy[pipe]] = self._receive(pipe)
                        send_next(pipe)
                if number not in replies:
                    return
                yield checked(replies.pop(number))
        finally:
            if busy:
                self.kill()

    def kill(self) -> None:
        """Kill all processes immediately."""
        for process in self.processes.values():
            process.kill()
            process.join()
        close_all(self.processes)
        self.processes.clear()

    def _wait(self, pipes: Iterable[Connection]) -> list[Connection]:
        """Wait until there is a reply, and return the pipes that have one."""
        began, patience = time.monotonic(), max(SILENT_SECONDS, SILENT_RATIO * self.longest_wait)
        while not (readable := connection.wait(list(pipes), timeout=CHECK_SECONDS)):
            for pipe in pipes:
                wait_while_stopped(self.processes[pipe])
            if time.monotonic() - began > patience:
                warn_of_silence([self.processes[pipe] for pipe in pipes], patience)
                patience *= SILENT_RATIO
        self.longest_wait = max(self.longest_wait, time.monotonic() - began)
        return [pipe for pipe in readable if isinstance(pipe, Connection)]

    def _send(self, pipe: Connection, message: Message) -> None:
        wait_while_stopped(self.processes[pipe])  # its pipe would fill up
        with self._report_death(pipe):
            message.send(pipe)

    def _receive(self, pipe: Connection) -> Message:
        with self._report_death(pipe):
            return Message.receive(pipe)

    @contextmanager
    def _report_death(self, pipe: Connection) -> Iterator[None]:
        """Raise WorkerDied if the process at the other end of a pipe has ended."""
        try:
            yield
        except (EOFError, ConnectionError):
            raise WorkerDied(death_message(self.processes[pipe])) from None


def end_all(processes: dict[Connection, BaseProcess]) -> None:
    """Let processes end because their pipes are closed; kill those that are stopped."""
    close_all(processes)
    for process in processes.values():
        if is_stopped(process.pid):
            process.kill()


def death_message(process: BaseProcess) -> str:
    """Describe in one line how a worker process ended."""
    process.join(timeout=CHECK_SECONDS)
    name, code = f"worker process {process.pid}", process.exitcode
    if code == -signal.SIGKILL:
        return (
            f"{name} was killed, probably because the machine ran out of memory; "
            "fewer processes need less memory: restrict the cores with taskset"
        )
    if code is not None and code < 0:
        return f"{name} was ended by {signal.Signals(-code).name}"
    return f"{name} ended unexpectedly with exit code {code}"


def warn_of_silence(processes: Sequence[BaseProcess], seconds: float) -> None:
    """Warn that processes have not replied, although none of them has ended or is stopped."""
    names = " and ".join(f"process {process.pid}" for process in processes)
    LOGGER.warning(
        "no reply from worker %s for %.0f s: training may be stuck there (py-spy dump --pid %s "
        "shows where); Ctrl-C ends the run", names, seconds, processes[0].pid,
    )  # fmt: skip


def wait_while_stopped(process: BaseProcess) -> None:
    """Wait until a stopped process is continued. Raise WorkerDied after STOPPED_SECONDS."""
    deadline = time.monotonic() + STOPPED_SECONDS
    while is_stopped(process.pid):
        if time.monotonic() > deadline:
            raise WorkerDied(
                f"worker process {process.pid} is stopped; continue it with "
                f"kill -CONT {process.pid} or end the run"
            )
        time.sleep(0.05)


def is_stopped(pid: int | None) -> bool:
    """Whether a process was stopped by a signal (Linux)."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[:1] == ["T"]
