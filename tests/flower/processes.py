"""Federations of real processes that run the app with faults, and the processes they leave."""

import json
import sys
from pathlib import Path

import fedsift
from fedsift.flower.local import LocalFederation, ProcessFailed, command
from fork_server import ForkedPython

HERE = Path(__file__).parent
SOURCE = str(Path(fedsift.__file__).parents[1])


class Federation(LocalFederation):
    """A local federation that runs the app in tests/flower/app."""

    @property
    def run_folder(self):
        return self.folder / "run"

    def start_run(self, **settings):
        """Start a run of the app with these settings."""
        words = {"folder": str(self.folder), **settings}
        self.run(HERE / "app", " ".join(f"{k}={json.dumps(v)}" for k, v in words.items()))

    def wait_for_end(self, seconds=500):
        """Wait for the end of the run, and return its log."""
        self.wait_until(lambda: self.processes["run"].poll() is not None, seconds=seconds)
        return self.log("run").read_text()

    def set_fault(self, round, client, word):
        path = self.folder / "faults" / f"{round}-{client}"
        path.parent.mkdir(exist_ok=True)
        path.write_text(word)

    def wait_for_note(self, name, seconds=500):
        """Wait until a process of the app has written a note, and return its process id."""
        path = self.folder / "notes" / name
        self.wait_until(path.exists, seconds=seconds)
        pid = int(path.read_text())
        path.unlink()
        return pid

    def history(self):
        path = self.run_folder / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]


class ForkedFederation(Federation):
    """The same, with processes that are forks of one that has imported Flower and PyTorch.

    They do what new interpreters would, without two seconds of imports each. The names of their
    commands are not in the list of processes.
    """

    def start(self, name, arguments, within=()):
        environment = self.environment() | dict(word.split("=", 1) for word in within[1:])
        outputs = 2 * [self.log(name)]
        self.processes[name] = self.fork(
            arguments, environment, start_new_session=True, outputs=outputs
        )

    def flwr(self, *arguments):
        process = self.fork(["flwr", *arguments], self.environment())
        said = "".join(process.communicate())
        if process.returncode:
            raise ProcessFailed(f"flwr {arguments[0]} failed: {said[-500:]}")
        return process.printed()

    def fork(self, arguments, environment, **options):
        first, *words = arguments
        called = [] if first == sys.executable else [command(first)]
        return ForkedPython(
            "-m", "as_process", *called, *words, cwd=self.folder, env=environment, **options
        )


def processes_of(home):
    """Return the processes of the federation with that Flower folder.

    The environment of a forked process is not in /proc, but its working folder is.
    """
    mark, folder = f"FLWR_HOME={home}".encode(), Path(home).parent
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            marked = mark in (path / "environ").read_bytes().split(b"\0")
            found += [path.name] if marked or (path / "cwd").readlink() == folder else []
        except OSError:  # the process has just ended, or belongs to someone else
            continue
    return found
