"""The demo and the example: what a newcomer runs first."""

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from flwr.app import Context, RecordDict
from inline import InlineGrid, InlineNode
from processes import SOURCE, ForkedFederation, processes_of
from typer.main import get_command

from fedsift.cli import demo as cli_demo
from fedsift.cli.entry import app, main
from fedsift.flower import demo, local
from fedsift.flower.local import LocalFederation, ProcessFailed
from fedsift.runs import RunFolder
from fedsift.runs.config import RunConfig

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
    assert processes_of(home)
    demo.send_signal(signal.SIGINT)
    _, said = demo.communicate(timeout=100)
    assert demo.returncode == 130, said
    assert "Traceback" not in said
    assert has_no_processes(home)


def has_no_processes(home, seconds=20):
    until = time.monotonic() + seconds
    while (left := processes_of(home)) and time.monotonic() < until:
        time.sleep(0.2)
    return not left


def test_options_of_simulations_only_are_refused(tmp_path, capsys):
    for name in ("dropout", "dp_clip"):
        assert main(["deploy", "demo", f"--{name.replace('_', '-')}", "0.5"]) == 2
        assert "No such option" in capsys.readouterr().err
        (tmp_path / "a.toml").write_text(f"{name} = 0.5")
        assert main(["deploy", "demo", "--config", str(tmp_path / "a.toml")]) == 2
        assert f"{name} applies to simulations" in capsys.readouterr().err


def test_the_help_shows_the_options_and_defaults_of_the_demo():
    options = {p.name: p for p in get_command(app).commands["deploy"].commands["demo"].params}
    shown = {name: options[name].show_default for name in ("clients", "rounds", "min_clients")}
    assert shown == {"clients": "3", "rounds": "5", "min_clients": "1"}
    assert "data_dir" in options
    assert not options.keys() & {"dropout", "wire", "device", "precision", "tensorboard"}


def test_invalid_options_are_refused_before_files_are_created(tmp_path, capsys):
    out = tmp_path / "run"
    assert main(["deploy", "demo", "--partition", "by chance", "--out", str(out)]) == 2
    assert "by chance" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("other", [("--density", "0.5"), ("--partition", "dirichlet")])
def test_a_folder_with_other_settings_is_refused_before_processes_start(
    other, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(cli_demo, "deploy_demo", lambda *_: None)
    words = ["deploy", "demo", "--out", str(tmp_path)]
    assert main(words) == 0
    assert main([*words, "--rounds", "7"]) == 0
    assert main([*words, *other]) == 2
    assert "holds another run" in capsys.readouterr().err
    assert RunFolder(tmp_path).config().rounds == 7


def test_the_server_has_the_configuration_of_the_command_line(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    started = []
    monkeypatch.setattr(cli_demo, "deploy_demo", lambda *words: started.append(words))
    words = ["--rounds", "1", "--local-steps", "1", "--partition", "dirichlet", "--theta", "0.5"]
    assert main(["deploy", "demo", *words, "--out", str(tmp_path / "run")]) == 0
    ((settings, folder, *_),) = started
    config = {**settings.flat(), "out": str(folder.path)}
    grid = InlineGrid((InlineNode(demo.client(), n, 3) for n in range(3)), config)
    demo.server()(grid, Context(1, 1, {}, RecordDict(), config))
    assert folder.config().flat() == settings.flat()
    assert json.loads(folder.summary_file.read_text())["theta"] == 0.5


def test_a_failed_demo_is_reported_even_after_a_successful_one(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", SOURCE)
    monkeypatch.setattr(local, "LocalFederation", ForkedFederation)
    words = ["deploy", "demo", "--clients", "1", "--out", str(tmp_path)]
    with monkeypatch.context() as patched:
        patched.setattr(cli_demo, "deploy_demo", lambda *_: None)
        assert main(words) == 0
    folder = RunFolder(tmp_path)
    folder.write_summary({"algorithm": "the one before"})
    folder.checkpoint_file.write_bytes(b"broken")
    assert main(words) == 3
    said = capsys.readouterr()
    assert "corrupt" in said.err
    assert said.out == ""


def test_a_dead_superlink_is_reported_in_one_line(tmp_path, monkeypatch):
    federation = LocalFederation(tmp_path)
    said = json.dumps({"success": False, "error-message": "Connection\n refused"})
    monkeypatch.setattr(federation, "flwr", lambda *words: said)
    with pytest.raises(ProcessFailed, match=r"^flwr list failed: Connection refused$"):
        federation.statuses()
    sleeping, ended = [sys.executable, "-c", "input()"], [sys.executable, "-c", "exit(9)"]
    with subprocess.Popen(sleeping, stdin=subprocess.PIPE) as run:
        federation.processes = {"run": run, "superlink": subprocess.Popen(ended)}
        with pytest.raises(ProcessFailed, match=r"^superlink ended with 9: see .*superlink.log$"):
            cli_demo.wait_with_progress(federation, RunFolder(tmp_path), RunConfig(), 1)
        run.stdin.close()


def test_no_port_is_given_out_twice(monkeypatch):
    offered = iter([50_001, 50_001, 50_002])
    probe = MagicMock()
    probe.__enter__().getsockname.side_effect = lambda: (local.LOOPBACK, next(offered))
    monkeypatch.setattr(local, "CHOSEN_PORTS", {0})
    monkeypatch.setattr(local.socket, "socket", lambda: probe)
    assert [local.free_port(), local.free_port()] == [50_001, 50_002]


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
