"""Commands that tests run, and what they leave behind."""

import json
import os
import subprocess
import sys
from pathlib import Path

import fedsift
from fedsift.cli.entry import main
from fork_server import ForkedPython

QUICK = ("--clients", "4", "--rounds", "3", "--local-steps", "1")


def start(*words, **options):
    """Run the command in its own process, with the code under test."""
    source = Path(fedsift.__file__).parents[1]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(source)}
    return subprocess.Popen([sys.executable, "-m", "fedsift", *words], env=env, **options)


def run_in_process(*words, cwd):
    """Run the command in a forked process; return its exit code and what it said on stderr."""
    process = ForkedPython("-m", "fedsift", *words, cwd=cwd)
    said = process.communicate(timeout=60)[1]
    return process.returncode, said


def strict_json(text):
    """JSON as the standard has it, without NaN or Infinity."""

    def refuse(word):
        raise ValueError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def metrics_of(folder):
    return [strict_json(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def summary_of(folder):
    return strict_json((folder / "summary.json").read_text())


def without_seconds(records):
    return [{k: v for k, v in record.items() if k != "seconds"} for record in records]


def files_under(path):
    return {p.relative_to(path): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def refused(words, capsys, *phrases):
    """Check that a command ends with 2 and one line on stderr, and leaves the folder as it is."""
    before = files_under(Path.cwd())
    capsys.readouterr()
    code = main(words)
    said = capsys.readouterr()
    assert code == 2
    assert said.out == ""
    assert said.err.count("\n") == 1, said.err
    assert said.err.startswith("fedsift: ")
    assert [phrase for phrase in phrases if phrase not in said.err] == [], said.err
    assert files_under(Path.cwd()) == before
