"""Runs that diverge or lose their clients: exit code 3, and the last good round is kept."""

import re

import pytest
import torch
from commands import QUICK, files_under, metrics_of, run_in_process

from fedsift.algorithms import METHODS
from fedsift.cli.entry import main
from fedsift.runs import RunFolder, federation_of
from fedsift.runs.checkpoint import load_checkpoint


def test_a_run_that_diverges_ends_a_real_process_with_3_and_keeps_the_last_good_round(tmp_path):
    words = ["--algorithm", "fedsgd", *QUICK, "--lr", "1e30", "--out", "out"]
    code, said = run_in_process("run", *words, cwd=tmp_path)
    assert code == 3
    assert "Traceback" not in said
    assert "diverged in round 2" in said.splitlines()[-1]
    assert "; the checkpoint of round 1 is in out; try a smaller --lr" in said
    folder = RunFolder.open(tmp_path / "out")
    checkpoint = load_checkpoint(folder, federation_of(folder.config()), "cpu")
    assert checkpoint.snapshot.round == 1
    assert bool(torch.isfinite(checkpoint.snapshot.state.w).all())
    assert [r["round"] for r in metrics_of(tmp_path / "out")] == [0, 1]
    assert not (tmp_path / "out" / "summary.json").exists()


def test_resuming_a_diverged_run_reports_the_divergence_again(cwd, capsys):
    words = ["--algorithm", "fedsgd", *QUICK, "--lr", "1e30", "--out", "out"]
    assert main(["run", *words]) == 3
    before = files_under(cwd / "out")
    capsys.readouterr()
    assert main(["resume", "out"]) == 3
    assert "diverged in round 2" in capsys.readouterr().err
    assert files_under(cwd / "out") == before


@pytest.mark.parametrize("algorithm", METHODS)
def test_every_algorithm_that_diverges_ends_with_3_and_names_the_round(algorithm, cwd, capsys):
    words = ["--algorithm", algorithm, "--clients", "3", "--rounds", "4", "--lr", "1e37"]
    assert main(["run", *words, "--out", "out"]) == 3
    assert "diverged in round" in capsys.readouterr().err.splitlines()[-1]


def test_a_run_that_diverges_in_round_1_mentions_no_checkpoint(cwd, capsys):
    words = ["--algorithm", "fedsgd", "--clients", "3", "--rounds", "2", "--lr", "1e30"]
    assert main(["run", *words, "--out", "out"]) == 3
    said = capsys.readouterr().err.splitlines()[-1]
    assert "diverged in round 1" in said
    assert "checkpoint" not in said
    assert said.endswith("; try a smaller --lr")


def test_a_missing_data_folder_is_refused(cwd, capsys):
    assert main(["run", *QUICK, "--data-dir", "nowhere"]) == 2
    assert "there is no data folder nowhere" in capsys.readouterr().err


def test_a_comparison_with_other_settings_lists_the_differences(cwd, capsys):
    words = ["compare", "--algorithms", "fedadam-ssm,sift", "--target", "0.05", *QUICK]
    assert main([*words, "--out", "out"]) == 0
    assert " 0.00 " not in capsys.readouterr().out  # little traffic is shown with its digits
    assert main([*words, "--out", "out", "--seed", "1"]) == 2
    said = capsys.readouterr().err
    assert "holds another run (seed = 0, not 1): use another folder" in said


def test_a_round_with_too_few_updates_ends_with_3_and_names_the_round(cwd, capsys):
    words = ["--dropout", "0.5", "--min-clients", "4", *QUICK, "--out", "out"]
    assert main(["run", *words]) == 3
    said = capsys.readouterr().err.splitlines()[-1]
    assert re.search(r"round \d merged [0-3] updates, but needs at least 4: [1-4] were lost", said)
    assert "smaller --dropout" in said
    assert metrics_of(cwd / "out")[-1]["round"] == int(re.search(r"round (\d)", said)[1]) - 1
