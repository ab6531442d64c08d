"""The demo and the example: what a newcomer runs first."""

import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

from flwr.app import Context, RecordDict
from inline import InlineGrid, InlineNode
from processes import SOURCE, left_behind

from fedsift.cli import main

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower-quickstart"


def test_a_stopped_demo_leaves_no_process_behind(tmp_path):
    words = ["deploy", "demo", "--clients", "2", "--rounds", "50", "--out", str(tmp_path / "run")]
    demo = subprocess.Popen(
        [sys.executable, "-m", "fedsift", *words], stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": SOURCE}, start_new_session=True,
    )  # fmt: skip
    home = tmp_path / "run" / "federation" / "home"
    while not (home / "fedsift").exists():  # a client has trained: every kind of process is there
        assert demo.poll() is None
        time.sleep(0.2)
    assert left_behind(home)
    demo.send_signal(signal.SIGINT)
    _, said = demo.communicate(timeout=100)
    assert demo.returncode == 130, said
    assert "Traceback" not in said
    assert gone(home)


def gone(home, seconds=20):
    until = time.monotonic() + seconds
    while (left := left_behind(home)) and time.monotonic() < until:
        time.sleep(0.2)
    return not left


def test_what_only_a_simulation_has_is_refused(capsys):
    assert main(["deploy", "demo", "--dropout", "0.5"]) == 2
    assert "--dropout is for simulations" in capsys.readouterr().err


def test_a_run_on_flower_is_not_resumed_as_a_simulation(tmp_path, capsys):
    (tmp_path / "config.toml").write_text('wire = "flower"\nmodel = "mine"\n')
    assert main(["resume", str(tmp_path)]) == 2
    assert "start its app again" in capsys.readouterr().err


def test_the_quickstart_learns(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    from quickstart.client_app import app as client
    from quickstart.server_app import app as server

    about = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())
    config = about["tool"]["flwr"]["app"]["config"] | {"folder": str(tmp_path / "run")}
    grid = InlineGrid((InlineNode(client, n, 4) for n in range(4)), config)
    server(grid, Context(1, 1, {}, RecordDict(), config))
    summary = (tmp_path / "run" / "summary.json").read_text()
    assert '"rounds": 5' in summary
    accuracy = float(summary.split('"final_accuracy": ')[1].split(",")[0])
    assert accuracy > 0.8
