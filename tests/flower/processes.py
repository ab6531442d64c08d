"""Federations of real processes that run the app of faults, and what they leave behind."""

import json
from pathlib import Path

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


def left_behind(home):
    """The processes that belong to the federation with that Flower folder."""
    mark = f"FLWR_HOME={home}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            found += [path.parent.name] if mark in path.read_bytes().split(b"\0") else []
        except OSError:  # it has just ended, or is not ours
            continue
    return found
