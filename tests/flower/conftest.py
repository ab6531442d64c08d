"""Federations of real processes for the tests: TLS, node keys, and short heartbeats."""

import json
import os
import signal
from pathlib import Path

import pytest

import fedsift
from fedsift.flower.local import LocalFederation

HERE = Path(__file__).parent
SOURCE = str(Path(fedsift.__file__).parents[1])


class Federation(LocalFederation):
    """A local federation that runs the app of faults."""

    @property
    def run_folder(self):
        return self.folder / "run"

    def say(self, **settings):
        """Start a run with these settings of the app."""
        words = {"folder": str(self.folder), **settings}
        self.run(HERE / "app", " ".join(f"{k}={json.dumps(v)}" for k, v in words.items()))

    def ended(self, seconds=500):
        """Wait for the run's end, and give its log."""
        self.wait_until(lambda: self.processes["run"].poll() is not None, seconds=seconds)
        return self.log("run").read_text()

    def fault(self, round, client, word):
        path = self.folder / "faults" / f"{round}-{client}"
        path.parent.mkdir(exist_ok=True)
        path.write_text(word)

    def noted(self, name, seconds=500):
        """Wait until a process of the app has noted something; gives its id."""
        path = self.folder / "notes" / name
        self.wait_until(path.exists, seconds=seconds)
        pid = int(path.read_text())
        path.unlink()
        return pid

    def history(self):
        path = self.run_folder / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def federation_of(tmp_path_factory):
    """Start a federation of so many nodes; all its processes end with the test."""
    started = []

    def start(nodes):
        folder = tmp_path_factory.mktemp("federation")
        path = os.pathsep.join([str(HERE / "fast"), SOURCE])
        federation = Federation(folder, {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"})
        started.append(federation)
        federation.__enter__()
        keys = federation.register([f"node-{n}" for n in range(nodes)])
        for n, (name, key) in enumerate(keys.items()):
            federation.start_node(name, key, n, nodes)
        return federation

    yield start
    for federation in started:
        federation.close(signal.SIGKILL)
