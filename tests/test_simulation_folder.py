"""Runs from Python in a folder: written, continued after any end, and refused if they differ."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fedsift
from fedsift.cli import main
from fedsift.federation.round import Federation
from test_simulation import (
    CLIENTS,
    METHOD,
    TEST,
    assert_same,
    make_model,
    simulate,
    without_seconds,
)

ROUNDS = 12


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "finished"
    return folder, simulate(ROUNDS, out=folder)


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_same_files(folder, other):
    ours, theirs = (load_file(x / "checkpoint.safetensors") for x in (folder, other))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert without_seconds(records(folder)) == without_seconds(records(other))
    for name in ("config.toml", "uploads.jsonl", "clients.json", "model.safetensors"):
        assert (folder / name).read_bytes() == (other / name).read_bytes(), name


def test_a_folder_has_the_files_of_a_run(finished):
    folder, result = finished
    assert {path.name for path in folder.iterdir()} == {
        ".lock", "checkpoint.safetensors", "checkpoints", "clients.json", "config.toml",
        "metrics.jsonl",
        "model.safetensors", "report.html", "summary.json", "uploads.jsonl",
    }  # fmt: skip
    assert records(folder) == result.history
    model = make_model(1)
    model.load_state_dict(load_file(folder / "model.safetensors"))
    assert torch.equal(result.layout.read(model), result.weights)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["final_accuracy"] == result.accuracy
    assert summary["rounds"] == ROUNDS
    assert "stopped_after" not in summary
    assert_same(result, simulate(ROUNDS))


def no_more_training(*_):
    raise AssertionError("a finished run was trained again")


def test_a_finished_run_gives_its_result_without_training(finished, monkeypatch, capsys):
    folder, result = finished
    monkeypatch.setattr(Federation, "run_round", no_more_training)
    again = simulate(ROUNDS, out=folder)
    assert_same(again, result)
    assert again.history == result.history
    assert torch.equal(again.weights, result.weights)
    assert_same(fedsift.Result.load(folder), result)
    assert capsys.readouterr().err == ""


def start(folder):
    """Run the same in a process of its own."""
    here = Path(__file__).parent
    paths = os.pathsep.join(map(str, (here, Path(fedsift.__file__).parents[1])))
    words = f"from test_simulation import simulate; simulate({ROUNDS}, out={str(folder)!r})"
    return subprocess.Popen(
        [sys.executable, "-c", words],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def stop(process, folder, lines, with_signal, delay=0.0):
    """Wait until the metrics have this many lines, send a signal, and return stderr."""
    end = time.monotonic() + 120
    metrics = folder / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= lines):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.0005)
    time.sleep(delay)
    process.send_signal(with_signal)
    return process.communicate(timeout=120)[1]


@pytest.mark.parametrize("with_signal", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_stopped_process_is_continued_by_the_same_code(with_signal, finished, tmp_path):
    folder = tmp_path / "stopped"
    delay = random.Random(with_signal).uniform(0, 0.01)
    process = start(folder)
    said = stop(process, folder, 4, with_signal, delay)
    if with_signal != signal.SIGKILL and process.returncode:
        assert f"to continue the run in {folder}, run the same code again" in said
        assert "Traceback" not in said or with_signal == signal.SIGINT
        assert (folder / "checkpoint.safetensors").exists()
    assert_same(simulate(ROUNDS, out=folder), finished[1])
    assert_same_files(folder, finished[0])


class Interruption(Exception):
    pass


def interrupted(folder, rounds=ROUNDS, after=5, **given):
    def interrupt(record, model):
        if record["round"] == after:
            raise Interruption

    with pytest.raises(Interruption):
        simulate(rounds, out=folder, on_round=interrupt, **given)


def test_an_interrupted_run_continues_and_may_get_more_rounds(finished, tmp_path):
    interrupted(tmp_path / "run", rounds=8)
    assert not (tmp_path / "run" / "summary.json").exists()
    simulate(8, out=tmp_path / "run")
    assert_same(simulate(ROUNDS, out=tmp_path / "run"), finished[1])
    assert_same_files(tmp_path / "run", finished[0])
    with pytest.raises(ValueError, match=f"holds a run of {ROUNDS} rounds"):
        simulate(8, out=tmp_path / "run")


def test_an_early_stop_finishes_the_run(finished, tmp_path, monkeypatch):
    def run():
        return simulate(ROUNDS, out=tmp_path / "run", on_round=lambda r, model: r["round"] == 4)

    result = run()
    assert result.snapshot.round == 4
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["stopped_after"] == 4
    assert (tmp_path / "run" / "model.safetensors").exists()
    monkeypatch.setattr(Federation, "run_round", no_more_training)
    assert_same(run(), result)


def test_rounds_can_be_closed_and_taken_up_again(finished, tmp_path):
    given = {"algorithm": METHOD, "batch_size": 8, "participation": 0.7}

    def rounds():
        return fedsift.rounds(
            make_model(), CLIENTS, TEST, rounds=ROUNDS, out=tmp_path / "run", **given
        )

    run = rounds()
    next(run)
    with pytest.raises(ValueError, match="another process is using"):
        rounds()
    run.close()
    run = rounds()
    assert [record["round"] for record, _, _ in run] == list(range(2, ROUNDS + 1))
    assert_same(run.result, finished[1])
    assert_same_files(tmp_path / "run", finished[0])


def test_a_folder_continues_the_result_it_starts_from(finished, tmp_path):
    half = simulate(6)
    interrupted(tmp_path / "run", after=8, start=half)
    assert_same(simulate(ROUNDS, out=tmp_path / "run", start=half), finished[1])
    with pytest.raises(ValueError, match="holds another run"):
        simulate(ROUNDS, out=tmp_path / "run", start=simulate(5))
    with pytest.raises(ValueError, match="pass a Result"):
        simulate(ROUNDS, out=tmp_path / "other", start=half.snapshot)
    assert not (tmp_path / "other").exists()


OTHER = {
    "other settings": {"seed": 1},
    "another algorithm": {"algorithm": fedsift.algorithms.fedadam()},
    "another test set": {"test": (TEST[0] + 1, TEST[1])},
    "another loss": {"loss": torch.nn.functional.multi_margin_loss},
}


@pytest.mark.parametrize("given", OTHER.values(), ids=OTHER)
def test_another_run_is_refused_and_the_folder_left_as_it_is(given, finished):
    folder, _ = finished
    before = {path: path.read_bytes() for path in folder.rglob("*.*") if path.is_file()}
    with pytest.raises(ValueError, match="holds another run") as problem:
        simulate(ROUNDS, out=folder, **given)
    assert "\n" not in str(problem.value)
    assert {path: path.read_bytes() for path in folder.rglob("*.*") if path.is_file()} == before


def test_bad_input_writes_nothing(tmp_path):
    for given in ({"metrics": {"f": lambda output, y: 1 / 0}}, {"rounds": 0}):
        with pytest.raises(ValueError):  # noqa: PT011
            simulate(**{"rounds": 2, **given}, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_command_line_reports_such_runs_and_says_how_to_continue_them(
    finished, tmp_path, capsys
):
    mine = shutil.copytree(finished[0], tmp_path / "mine")
    words = ["--clients", "3", "--rounds", "1", "--local-steps", "1"]
    assert main(["run", *words, "--out", str(tmp_path / "digits")]) == 0
    for folders in ([mine], [tmp_path]):
        page = tmp_path / "report.html"
        assert main(["report", *map(str, folders), "-o", str(page)]) == 0
        assert re.search("own data [0-9a-f]{8}", page.read_text())
    capsys.readouterr()
    assert main(["resume", str(mine)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "rerun the script that made it" in said
