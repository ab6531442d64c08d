"""A run that was stopped, and resumed, ends bit for bit as one that was not."""

import json
import os
import random
import shlex
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from fedsift.cli import main
from fedsift.engine.processes.forked import num_cores
from fedsift.errors import ConfigError
from fedsift.federation.round import Federation
from fedsift.progress import display
from fedsift.runs import RunFolder, run
from fedsift.runs.disk import load_tensors, save_tensors
from fork_server import ForkedPython

ROUNDS = 40
METHODS = {
    "fedadam-ssm": ("--algorithm", "fedadam-ssm", "--local-steps", "1"),
    "sift": ("--algorithm", "sift", "--local-steps", "1"),
    "efficient-adam": ("--algorithm", "efficient-adam"),
}
PATIENCE = 60.0


def words_of(method, folder):
    federation = ("--clients", "8", "--participation", "0.5", "--dropout", "0.2")
    rounds = ("--rounds", str(ROUNDS))
    return ["run", *METHODS[method], *federation, *rounds, "--out", str(folder)]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The folder of each method's uninterrupted run."""
    folders = {}

    def folder_of(method):
        if method not in folders:
            folders[method] = tmp_path_factory.mktemp("uninterrupted") / method
            assert main(words_of(method, folders[method])) == 0
        return folders[method]

    return folder_of


def start(*words):
    """Run the command in its own process."""
    return ForkedPython("-m", "fedsift", *words)


def stop(process, when, with_signal, delay=0.0):
    """Wait until something holds, and a little more, then send a signal; give what was said."""
    end = time.monotonic() + PATIENCE
    try:
        while not when():
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.001)
        time.sleep(delay)
        process.send_signal(with_signal)
        return process.communicate(timeout=PATIENCE)[1]
    finally:
        process.kill()
        process.wait()


def rounds_in(folder):
    try:
        return max(0, (folder / "metrics.jsonl").read_bytes().count(b"\n") - 1)  # without round 0
    except FileNotFoundError:
        return 0


def checkpoint_round(folder):
    with safe_open(folder / "checkpoint.safetensors", "pt") as file:
        return json.loads(file.metadata()["fedsift"])["round"]


def without_seconds(record):
    return {k: v for k, v in record.items() if not k.startswith("seconds")}


def assert_same_run(folder, other):
    """Every tensor, every round's metrics, and the summary are equal, bit for bit."""
    ours, theirs = (load_file(x / "checkpoint.safetensors") for x in (folder, other))
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    ours, theirs = (
        [without_seconds(record) for record in RunFolder.open(x).history()] for x in (folder, other)
    )
    assert ours == theirs
    assert [record["round"] for record in ours] == list(range(ROUNDS + 1))
    for name in ("uploads.jsonl", "clients.json"):
        assert (folder / name).read_bytes() == (other / name).read_bytes(), name
    ours, theirs = (json.loads((x / "summary.json").read_text()) for x in (folder, other))
    assert without_seconds(ours) == without_seconds(theirs)


@pytest.mark.parametrize(
    ("method", "kills"),
    [("fedadam-ssm", (4, 20)), ("sift", (6, 17)), ("efficient-adam", (2, 13, 24))],
)
def test_a_run_killed_repeatedly_equals_an_uninterrupted_one(method, kills, tmp_path, uninterrupted):
    draw, folder = random.Random(method), tmp_path / "killed"
    command = words_of(method, folder)
    for lines in kills:
        process = start(*command)
        delay = draw.uniform(0, 0.06)
        stop(process, lambda n=lines: rounds_in(folder) >= n, signal.SIGKILL, delay)
        assert process.returncode == -signal.SIGKILL
        assert not (folder / "summary.json").exists()
        command = ["resume", str(folder)]
    assert main(command) == 0
    assert_same_run(folder, uninterrupted(method))


def test_the_compared_runs_cover_all_kinds_of_state(uninterrupted):
    plain = load_file(uninterrupted("fedadam-ssm") / "checkpoint.safetensors")
    kept = load_file(uninterrupted("efficient-adam") / "checkpoint.safetensors")
    assert set(plain) == {"w", "m", "v"}
    assert {
        "w",
        "server/residual",
        "client/0/m",
        "client/0/v",
        "client/0/residual",
    } <= set(kept)
    nonzero = [name for name, x in kept.items() if bool(x.any())]
    assert {"w", "server/residual", "client/0/residual"} <= set(nonzero)
    received = {record["clients"] for record in RunFolder.open(uninterrupted("fedadam-ssm")).history()}
    assert len(received) > 1
    assert max(received) == 4


def test_a_run_killed_before_its_first_checkpoint_starts_over(tmp_path):
    words = ["--clients", "8", "--rounds", "1"]
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    process = start("run", *words, "--out", str(killed))
    stop(process, (killed / "config.toml").exists, signal.SIGKILL)
    assert not (killed / "checkpoint.safetensors").exists()
    assert main(["resume", str(killed)]) == 0
    assert main(["run", *words, "--out", str(whole)]) == 0
    ours, theirs = (load_file(x / "checkpoint.safetensors") for x in (killed, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert rounds_in(killed) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="beside a GPU there are no such processes")
@pytest.mark.skipif(num_cores() < 2, reason="on one core there is one process")
def test_a_killed_run_leaves_no_process_that_blocks_the_next_run(tmp_path):
    folder = tmp_path / "killed"
    process = start("run", "--clients", "8", "--rounds", "1000", "--out", str(folder))
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    stop(process, lambda: len(children.read_text().split()) > 1, signal.SIGKILL, delay=0.2)
    assert process.returncode == -signal.SIGKILL
    end = time.monotonic() + 5
    while is_locked(folder) and time.monotonic() < end:
        time.sleep(0.05)
    assert not is_locked(folder)


def is_locked(folder):
    try:
        with RunFolder(folder).locked():
            return False
    except ConfigError:
        return True


def test_ctrl_c_ends_a_process_with_130_and_says_how_to_continue(tmp_path, uninterrupted):
    folder = tmp_path / "stopped"
    process = start(*words_of("fedadam-ssm", folder))
    said = stop(process, lambda: rounds_in(folder) >= 8, signal.SIGINT)
    assert process.returncode == 130
    assert f"fedsift resume {folder}" in said
    assert "Traceback" not in said
    # Ctrl-C may come between the writing of a round's metrics and the round's end.
    assert rounds_in(folder) - checkpoint_round(folder) in (0, 1)
    assert not (folder / "summary.json").exists()
    assert main(["resume", str(folder)]) == 0
    assert_same_run(folder, uninterrupted("fedadam-ssm"))


def test_ctrl_c_while_progress_is_shown_keeps_the_last_finished_round(tmp_path, monkeypatch):
    save, round_line = run.save_checkpoint, display.round_line

    def slow_save(*words):
        time.sleep(0.05)  # so that not every round is saved at once
        save(*words)

    def interrupted(name, record, rounds):
        if rounds_in(tmp_path / "out") == 3:
            raise KeyboardInterrupt
        return round_line(name, record, rounds)

    with monkeypatch.context() as patched:
        patched.setattr(run, "save_checkpoint", slow_save)
        patched.setattr(display, "round_line", interrupted)
        assert main(words_of("efficient-adam", tmp_path / "out")) == 130
    assert checkpoint_round(tmp_path / "out") == 3


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """The folder of an efficient-adam run that was interrupted after its 38th round."""
    folder = tmp_path_factory.mktemp("interrupted") / "run"
    play = Federation.run_round

    def stop_there(self, snapshot):
        if snapshot.round == ROUNDS - 2:
            raise KeyboardInterrupt
        return play(self, snapshot)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Federation, "run_round", stop_there)
        assert main(words_of("efficient-adam", folder)) == 130
    return folder


def cut_a_line(folder):
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"round": 39, "accuracy": 0.9')


def cut_a_checkpoint(folder):
    half = (folder / "checkpoint.safetensors").read_bytes()[:5000]
    (folder / "checkpoint.safetensors.partial").write_bytes(half)


def leave_half_of_new_metrics(folder):
    half = (folder / "metrics.jsonl").read_bytes()[:700]
    (folder / "metrics.jsonl.partial").write_bytes(half)


def record_a_round_too_many(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    later = json.loads(lines[-1]) | {"round": ROUNDS - 1, "accuracy": 0.0}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(later) + "\n")


def change_nothing(folder):
    pass


@pytest.mark.parametrize(
    "left",
    [change_nothing, cut_a_line, cut_a_checkpoint, leave_half_of_new_metrics, record_a_round_too_many],
)
def test_leftovers_of_a_crash_do_no_harm(left, interrupted, tmp_path, uninterrupted):
    folder = shutil.copytree(interrupted, tmp_path / "run")
    left(folder)
    assert main(["resume", str(folder)]) == 0
    assert_same_run(folder, uninterrupted("efficient-adam"))
    assert list(folder.glob("*.partial")) == []


def test_a_checkpoint_without_a_memory_that_the_method_needs_is_refused(tmp_path, uninterrupted, capsys):
    folder = RunFolder.open(shutil.copytree(uninterrupted("sift"), tmp_path / "run"))
    about, tensors = load_tensors(folder.checkpoint_file, "cpu")
    del tensors["server/velocity"]
    save_tensors(folder.checkpoint_file, tensors, about)
    config = folder.config_file.read_text()
    folder.config_file.write_text(
        config.replace(f"\nrounds = {ROUNDS}", f"\nrounds = {ROUNDS + 1}")
    )
    capsys.readouterr()
    assert main(["resume", str(folder.path)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "lacks the server's velocity" in said


def test_a_corrupt_checkpoint_names_the_command_that_goes_back(
    interrupted, tmp_path, uninterrupted, capsys
):
    folder = shutil.copytree(interrupted, tmp_path / "run")
    checkpoint = folder / "checkpoint.safetensors"
    last = folder / "checkpoints" / f"round-{checkpoint_round(folder)}.safetensors"
    last.unlink()
    os.link(checkpoint, last)  # copies are no links
    with checkpoint.open("r+b") as file:
        file.write(b"damaged")
    capsys.readouterr()
    assert main(["resume", str(folder)]) == 2
    _, _, command = capsys.readouterr().err.partition("to return to an earlier round: fedsift ")
    assert main(shlex.split(command)) == 0
    assert main(["resume", str(folder)]) == 0
    assert_same_run(folder, uninterrupted("efficient-adam"))


def test_resuming_a_finished_run_changes_nothing(tmp_path, uninterrupted, monkeypatch):
    def no_more_training(*_):
        raise AssertionError("a finished run was trained again")

    folder = shutil.copytree(uninterrupted("efficient-adam"), tmp_path / "run")
    monkeypatch.setattr(Federation, "run_round", no_more_training)
    assert main(["resume", str(folder)]) == 0
    for name in ("config.toml", "metrics.jsonl", "summary.json", "checkpoint.safetensors"):
        assert (folder / name).read_bytes() == (uninterrupted("efficient-adam") / name).read_bytes()


def test_a_folder_that_was_moved_can_be_resumed(interrupted, tmp_path, uninterrupted, monkeypatch):
    folder = shutil.copytree(interrupted, tmp_path / "moved away")
    monkeypatch.chdir(tmp_path)
    assert main(["resume", "moved away"]) == 0
    assert_same_run(folder, uninterrupted("efficient-adam"))


def test_a_resumed_run_adds_to_the_seconds_so_far(interrupted, tmp_path):
    folder = shutil.copytree(interrupted, tmp_path / "run")
    before = RunFolder.open(folder).history()[-1]["seconds"]
    assert main(["resume", str(folder)]) == 0
    seconds = [record["seconds"] for record in RunFolder.open(folder).history()]
    assert seconds[ROUNDS - 2] == before
    assert seconds == sorted(seconds)


def test_sigterm_ends_a_process_with_143_and_says_how_to_continue(tmp_path, uninterrupted):
    folder = tmp_path / "terminated"
    process = start(*words_of("fedadam-ssm", folder))
    said = stop(process, lambda: rounds_in(folder) >= 8, signal.SIGTERM)
    assert process.returncode == 143
    assert said.splitlines()[-1] == f"continue with: fedsift resume {folder}"
    assert "Traceback" not in said
    assert rounds_in(folder) - checkpoint_round(folder) in (0, 1)
    assert main(["resume", str(folder)]) == 0
    assert_same_run(folder, uninterrupted("fedadam-ssm"))
