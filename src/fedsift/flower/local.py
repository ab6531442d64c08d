"""A whole Flower federation on this machine: a SuperLink with TLS, and SuperNodes with keys."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import tomli_w

from fedsift.errors import WorkerDied
from fedsift.flower.keys import LOOPBACK, make_certificates, make_node_key, make_secret

READY_SECONDS = 60
GRACE_SECONDS = 10
EXECUTOR = "-superexec"
"""A SuperExec has the name of its SuperLink or SuperNode with this suffix."""
OFFLINE = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "OMP_NUM_THREADS": "1",
}
"""No telemetry and no installation; one thread per client, as several share the machine."""


class ProcessFailed(WorkerDied):
    """A process of the federation failed or did not start."""


@dataclass
class LocalFederation:
    """Starts the processes of a federation, and ends all of them at the end of the block.

    The SuperLink and each SuperNode have a SuperExec of fedsift's, which imports the modules
    ``preload`` once for all messages. Those of SuperNodes ask for work every ``poll`` seconds.
    """

    folder: Path
    env: Mapping[str, str] = field(default_factory=dict)
    port: int = 0
    preload: Sequence[str] = ()
    poll: float = 0.1
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    address: str = LOOPBACK

    def __enter__(self) -> LocalFederation:
        self.folder = self.folder.absolute()
        self.home.mkdir(parents=True, exist_ok=True)
        for old in (*self.folder.glob("state.db*"), *self.folder.glob("*.log")):
            old.unlink()  # files of earlier runs, with other keys
        make_certificates(self.folder, self.address)
        make_secret(self.secret)
        self.port = self.port or free_port()
        superlink = {
            "address": f"{self.address}:{self.port}",
            "root-certificates": str(self.folder / "ca.crt"),
        }
        settings = {"superlink": {"default": "demo", "demo": superlink}}
        (self.home / "config.toml").write_text(tomli_w.dumps(settings))
        try:
            self.start_superlink()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def home(self) -> Path:
        """Flower's own folder for this federation."""
        return self.folder / "home"

    @property
    def secret(self) -> Path:
        """The file with which a SuperExec proves that it may run tasks."""
        return self.folder / "superexec.secret"

    def start_superlink(self) -> None:
        """Start the SuperLink, to which all others connect, and wait until it listens."""
        self.start(
            "superlink",
            ["flower-superlink", "--host", self.address, "--port", str(self.port),
             "--database", str(self.folder / "state.db"), "--enable-supernode-auth",
             "--ssl-certfile", str(self.folder / "server.pem"),
             "--ssl-keyfile", str(self.folder / "server.key"),
             "--ssl-ca-certfile", str(self.folder / "ca.crt"),
             "--disable-runtime-dependency-installation", *self.with_own_superexec()],
        )  # fmt: skip
        self.start_superlink_executor()
        self.wait_until(lambda: is_listening(self.address, self.port), "superlink")

    def start_superlink_executor(self) -> None:
        """Start the SuperLink's SuperExec."""
        certificates = ["--root-certificates", str(self.folder / "ca.crt")]
        self.start_superexec("superlink", f"{self.address}:{self.port}", *certificates)

    def with_own_superexec(self) -> list[str]:
        """Return the options with which Flower leaves its SuperExec to us."""
        secret = ["--superexec-auth-secret-file", str(self.secret)]
        return ["--isolation", "process", *secret]

    def start_superexec(self, name: str, address: str, *options: str) -> None:
        """Start the SuperExec of a SuperLink or SuperNode, with which it ends."""
        command = [sys.executable, "-m", "fedsift", "deploy", "superexec"]
        preload = [word for module in self.preload for word in ("--preload", module)]
        secret = ["--superexec-auth-secret-file", str(self.secret)]
        parent = ["--parent-pid", str(self.processes[name].pid)]
        arguments = ["--runtime-api-address", address, *options, *parent, *secret]
        often = ["env", f"FLWR_SUPEREXEC_TASK_POLL_INTERVAL={self.poll}"]
        within = [] if name == "superlink" else often  # a SuperLink starts one task per run
        self.start(f"{name}{EXECUTOR}", [*command, *preload, *arguments], within)

    def register(self, names: Iterable[str]) -> dict[str, Path]:
        """Create and register a key for each SuperNode; return the keys' paths by name."""
        keys = {name: self.folder / f"{name}.key" for name in names}

        def register(name: str) -> None:
            make_node_key(keys[name])
            public = str(keys[name].with_suffix(".pub"))
            self.flwr("supernode", "register", public, "demo", "--name", name)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(register, keys))
        return keys

    def start_node(
        self,
        name: str,
        key: Path,
        partition: int,
        partitions: int,
        port: int | None = None,
        within: Sequence[str] = (),
    ) -> None:
        """Start a SuperNode that connects to ``port``, the SuperLink's own by default.

        ``within`` is a command to run it in, such as ``env NAME=VALUE``.
        """
        own = free_port()
        self.start(
            name,
            ["flower-supernode", "--superlink", f"{self.address}:{port or self.port}",
             "--root-certificates", str(self.folder / "ca.crt"),
             "--auth-supernode-private-key", str(key),
             "--host", LOOPBACK, "--port", str(own), *self.with_own_superexec(),
             "--node-config", f"partition-id={partition} num-partitions={partitions}"],
            within,
        )  # fmt: skip
        self.start_superexec(name, f"{LOOPBACK}:{own}", "--insecure")

    def run(self, app: Path, config: str = "", name: str = "run") -> None:
        """Start a run of the app in that folder. The process ends when the run does."""
        arguments = ["flwr", "run", str(app), "demo", "--stream"]
        self.start(name, [*arguments, *(["-c", config] if config else [])])

    def statuses(self) -> list[str]:
        """Return the status of each run, as Flower reports it."""
        found = json.loads(self.flwr("list", "demo", "--format", "json"))
        if "runs" not in found:  # Flower exits with 0 even if its command failed
            why = found.get("error-message", "no reason given")
            raise ProcessFailed(f"flwr list failed: {' '.join(str(why).split())[-500:]}")
        return [str(run["status"]) for run in found["runs"]]

    def flwr(self, *arguments: str) -> str:
        """Run a ``flwr`` command and return its output."""
        done = subprocess.run(
            [command("flwr"), *arguments], env=self.environment(), capture_output=True, text=True
        )
        if done.returncode:
            output = " ".join((done.stdout + done.stderr).split())
            raise ProcessFailed(f"flwr {arguments[0]} failed: {output[-500:]}")
        return done.stdout

    def start(self, name: str, arguments: list[str], within: Sequence[str] = ()) -> None:
        """Start a process in its own session, so that Ctrl-C here does not interrupt it."""
        with self.log(name).open("ab") as out:
            self.processes[name] = subprocess.Popen(
                [*within, command(arguments[0]), *arguments[1:]],
                env=self.environment(), cwd=self.folder, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def environment(self) -> dict[str, str]:
        """Return the environment variables of every process of the federation."""
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        return {**os.environ, **OFFLINE, "PATH": path, "FLWR_HOME": str(self.home), **self.env}

    def log(self, name: str) -> Path:
        """Return the file with a process's output."""
        return self.folder / f"{name}.log"

    def wait_until(
        self, condition: Callable[[], bool], *names: str, seconds: float = READY_SECONDS
    ) -> None:
        """Wait until the condition holds; fail if one of the named processes ends first."""
        deadline = time.monotonic() + seconds
        while not condition():
            for name in names:
                if (code := self.processes[name].poll()) is not None:
                    raise ProcessFailed(f"{name} ended with {code}: see {self.log(name)}")
            if time.monotonic() > deadline:
                raise ProcessFailed(f"timed out after {seconds:g} s: see the logs in {self.folder}")
            time.sleep(0.1)

    def kill(self, *names: str, how: signal.Signals = signal.SIGKILL) -> None:
        """End processes, their SuperExecs, and all processes that they started."""
        ended = [name for name in self.processes if name.removesuffix(EXECUTOR) in names]
        ending = [self.processes.pop(name) for name in ended]
        # Look them up before their parents end: Flower starts some of them in their own sessions.
        started = descendants({process.pid for process in ending})
        for process in ending:
            process.send_signal(how)
        for process in ending:
            try:
                process.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for pid in started:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self, how: signal.Signals = signal.SIGTERM) -> None:
        """End all processes, the SuperLink last."""
        self.kill(*(name for name in self.processes if name != "superlink"), how=how)
        self.kill(*self.processes, how=how)


def descendants(pids: set[int]) -> set[int]:
    """Return all direct and indirect child processes."""
    parents = parents_by_pid()
    found: set[int] = set()
    while more := {pid for pid, parent in parents.items() if parent in pids | found} - found:
        found |= more
    return found


def parents_by_pid() -> dict[int, int]:
    """Return each process's parent, from /proc if it exists, as containers may lack ``ps``."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has just ended
            found[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    if not found:
        listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True)
        pairs = (line.split() for line in listed.stdout.splitlines())
        found = {int(pid): int(parent) for pid, parent in pairs}
    return found


def command(name: str) -> str:
    """Return the path of a command that is installed with this Python."""
    return str(Path(sys.executable).parent / name)


def free_port() -> int:
    """Return a port on which no process listens, and another one at each call."""
    port = 0
    while port in CHOSEN_PORTS:
        with socket.socket() as probe:
            probe.bind((LOOPBACK, 0))
            port = int(probe.getsockname()[1])
    CHOSEN_PORTS.add(port)
    return port


CHOSEN_PORTS = {0}
"""Ports that were given out; a process may not listen on them yet."""


def is_listening(address: str, port: int) -> bool:
    """Whether a process listens on that port."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((address, port)) == 0
