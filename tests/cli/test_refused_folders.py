"""Refused folders and data, and files that cannot be written."""

import errno
import shutil
import sys
from pathlib import Path

import pytest
import torch
from commands import (
    QUICK,
    files_under,
    refused,
    run_in_process,
)

from fedsift.cli.entry import main
from fedsift.runs import RunConfig, RunFolder
from fedsift.runs.disk import replace_file


def test_a_dataset_with_missing_files_is_refused(cwd, capsys, monkeypatch):
    monkeypatch.setenv("FEDSIFT_DATA", str(cwd / "data"))
    refused(["run", "--dataset", "cifar-10"], capsys, str(cwd / "data"), "FEDSIFT_DATA")


@pytest.mark.parametrize("how", ["flag", "config", "resume", "compare"])
def test_the_data_folder_can_be_given_on_the_command_line(how, cwd, capsys, monkeypatch):
    monkeypatch.setenv("FEDSIFT_DATA", "elsewhere")
    (cwd / "a.toml").write_text('data-dir = "there"')
    (cwd / "there").mkdir()
    (cwd / "run").mkdir()
    (cwd / "run" / "config.toml").write_text('dataset = "cifar-10"')
    words = {
        "flag": ["run", "--dataset", "cifar-10", "--data-dir", "there"],
        "config": ["run", "--dataset", "cifar-10", "--config", "a.toml"],
        "resume": ["resume", "run", "--data-dir", "there"],
        "compare": [
            "compare",
            "--dataset",
            "cifar-10",
            "--algorithms",
            "fedsgd",
            "--target",
            "1",
            "--data-dir",
            "there",
        ],
    }
    refused(words[how], capsys, "there is no there/cifar-10-batches-bin")


def test_a_file_cannot_be_the_folder_of_a_run(cwd, capsys):
    (cwd / "a.txt").touch()
    words = ["run", "--clients", "3", "--rounds", "1", "--out", "a.txt"]
    refused(words, capsys, "a.txt is a file; name a folder")


def test_a_folder_that_holds_another_run_is_refused_and_left_unchanged(quick_run, cwd, capsys):
    before = files_under(quick_run)
    words = ["run", *QUICK, "--out", str(quick_run)]
    refused(words, capsys, str(quick_run), "fedsift resume", "--out")
    assert files_under(quick_run) == before


def test_a_folder_with_a_checkpoint_but_no_config_is_not_taken_for_a_new_one(
    quick_run, cwd, capsys
):
    (cwd / "out").mkdir()
    checkpoint = (quick_run / "checkpoint.safetensors").read_bytes()
    (cwd / "out" / "checkpoint.safetensors").write_bytes(checkpoint)
    refused(["run", *QUICK, "--out", "out"], capsys, "out")


@pytest.mark.parametrize("out", ["file", "file/below"])
def test_a_file_in_place_of_the_folder_is_refused(out, cwd, capsys):
    (cwd / "file").write_text("mine")
    refused(["run", *QUICK, "--out", out], capsys, str(Path(out)))


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="has no /proc")
def test_an_unwritable_folder_is_refused(cwd, capsys):
    refused(["run", *QUICK, "--out", "/proc/self"], capsys, "/proc/self")


@pytest.mark.parametrize("name", ["nowhere", "."])
def test_resume_of_a_folder_without_a_run_is_refused(name, cwd, capsys):
    refused(["resume", name], capsys, f"{Path(name)} holds no run", "config.toml")


OWN = """
from torch import nn

class Two(nn.Sequential):
    def forward(self, x):
        return super().forward(x), x

def five():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 5))

def pair():
    return Two(nn.Flatten(), nn.Linear(64, 10))

def images():
    return nn.Conv2d(1, 10, 3)
"""


@pytest.mark.parametrize("function", ["five", "pair", "images"])
def test_a_user_model_whose_output_does_not_fit_the_labels_is_refused(
    function, cwd, capsys, monkeypatch
):
    name = f"own_{function}"  # a module is imported once
    (cwd / f"{name}.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(cwd))
    sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
    try:
        words = ["run", "--model", f"{name}:{function}", "--out", "out"]
        refused(words, capsys, f"'{name}:{function}'", "labels from 0 to 9")
    finally:
        sys.dont_write_bytecode = before


def test_a_run_cannot_be_shortened(quick_run, cwd, capsys):
    folder = shutil.copytree(quick_run, cwd / "shorter")
    text = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(text.replace("rounds = 3", "rounds = 2"))
    refused(["resume", "shorter"], capsys, "sets rounds to 2, but 3 are finished")


def test_a_comparison_refuses_the_folder_of_a_run(quick_run, cwd, capsys):
    shutil.copytree(quick_run, cwd / "taken")
    words = ["compare", "--algorithms", "fedadam", "--target", "0.5", *QUICK, "--out", "taken"]
    refused(words, capsys, "taken already holds a run")


def test_the_resume_command_can_be_pasted_into_a_shell(cwd):
    assert RunFolder(cwd / "two words").resume_command == f"fedsift resume '{cwd}/two words'"


DAMAGE = {
    "clients without a table": ("clients.json", '{"labels": 3}', True),
    "clients with ragged rows": ("clients.json", '{"labels": [[1, 2], [3]]}', True),
    "uploads of words": ("uploads.jsonl", '{"round": 1, "uploads": "x", "bytes": {}}\n', False),
    "a summary of no object": ("summary.json", "", False),
    "a summary without its surroundings": ("summary.json", '{"environment": "x"}', False),
    "metrics that are not numbers": ("metrics.jsonl", '{"round": 1, "accuracy": "x"}\n', False),
    "metrics that are not whole": ("metrics.jsonl", '{"round": 1}\n', False),
    "a comparison without a target": ("../compare.csv", "algorithm\nfedadam\n", False),
    "a target that is no number": ("../compare.csv", "target\nabc\n", False),
}


@pytest.mark.parametrize(("file", "text", "works"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_reported_or_omitted(file, text, works, quick_run, cwd, capsys):
    folder = shutil.copytree(quick_run, cwd / "runs" / "damaged")
    (folder / file).write_text(text)
    words = ["report", "runs/damaged", "-o", "report.html"]
    if works:
        assert main(words) == 0
    else:
        refused(words, capsys, "runs")


@pytest.mark.parametrize("place", ["folder", "/dev/null"])
def test_a_report_replaces_only_regular_files(place, quick_run, cwd, capsys):
    (cwd / "folder").mkdir()
    assert main(["report", str(quick_run), "-o", place]) == 1
    assert "is not a regular file" in capsys.readouterr().err
    assert files_under(cwd) == {}


def test_a_full_disk_leaves_no_partial_file(cwd, monkeypatch):
    def full(path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("fedsift.runs.disk.flush_to_disk", full)
    with pytest.raises(OSError, match="No space left"):
        replace_file(cwd / "report.html", b"...")
    assert list(cwd.iterdir()) == []


def test_a_report_that_does_not_fit_on_the_disk_can_be_written_later(cwd, capsys, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("fedsift.cli.training.write_report", full)
    assert main(["run", *QUICK, "--out", "out"]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert "No space left on device; write it later with: fedsift report out" in said
    assert (cwd / "out" / "summary.json").exists()


def test_1_and_1_0_are_the_same_setting(cwd):
    whole, real = ({"algorithm": "fedsgd", "lr": x, "participation": x} for x in (1, 1.0))
    ours, theirs = (RunConfig.from_values(values).toml() for values in (whole, real))
    assert ours == theirs
    assert "lr = 1.0" in ours
    with pytest.raises(ValueError, match="lr must be a positive number"):
        RunConfig.from_values({"lr": 10**400})
    with pytest.raises(ValueError, match="theta is too large for a number"):
        RunConfig.from_values({"theta": 10**400})


@pytest.mark.skipif(torch.cuda.is_available(), reason="has CUDA")
def test_cuda_on_a_machine_without_it_is_refused(cwd, capsys):
    refused(["run", "--device", "cuda"], capsys, "CUDA", "--device cpu")


def test_tensorboard_that_is_not_installed_is_refused(cwd, capsys, monkeypatch):
    monkeypatch.setattr("fedsift.errors.find_spec", lambda name: None)
    refused(["run", *QUICK, "--tensorboard"], capsys, "pip install", "'.[tensorboard]'")


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="has no /proc")
def test_an_unwritable_report_does_not_suggest_resuming_the_run(quick_run, capsys):
    assert main(["report", str(quick_run), "-o", "/proc/x/report.html"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "/proc/x" in line
    assert "resume" not in line


def test_an_unknown_command_is_refused(cwd, capsys):
    refused(["train"], capsys, "'train'")


def test_bad_input_ends_a_real_process_with_2_and_one_line(tmp_path):
    code, said = run_in_process("run", "--density", "0", cwd=tmp_path)
    assert (code, said) == (2, "fedsift: density must be in (0, 1], got 0\n")
    assert list(tmp_path.iterdir()) == []
