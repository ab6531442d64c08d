"""``--algorithm package.module:method``: run, compare, resume and report with the user's method."""

import csv
import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fedsift.algorithms import METHODS
from fedsift.cli import main
from fedsift.federation.round import Federation
from fedsift.report.collect import read_run
from fedsift.runs import RunConfig

MODULE = '''
"""Methods of a user."""

from typing import Annotated

from fedsift.algorithms import Algorithm, Setting, compressed, fedsgd, method
from fedsift.algorithms.settings import LearningRate, SHARE


def squeezed(
    strength: Annotated[float, Setting("Share that is sent", SHARE)] = 0.05,
    lr: LearningRate = 0.1,
) -> Algorithm:
    return compressed(fedsgd(local_steps=2, lr=lr), density=strength)


@method("deep-sgd", color="#8a2be2")
def deep(depth: int, lr: LearningRate = 0.1) -> Algorithm:
    return fedsgd(local_steps=depth, lr=lr)


def broken() -> Algorithm:
    raise KeyError("oops")


def nothing() -> None:
    pass


def clashing(rounds: int = 3) -> Algorithm:
    return fedsgd()
'''
SHORT = ("--clients", "4", "--rounds", "4", "--participation", "0.5")
SQUEEZED = ("run", "--algorithm", "my_methods:squeezed", "--strength", "0.02", *SHORT)


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    """A folder with the user's module, in which the commands run."""
    others = [path for path in sys.path if not Path(path, "my_methods.py").exists()]
    monkeypatch.setattr(sys, "path", others)  # without the folders of other tests
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_methods.py").write_text(MODULE)
    forget()
    before = dict(METHODS)
    yield tmp_path / "my_methods.py"
    forget()
    METHODS.clear()
    METHODS.update(before)


def forget():
    sys.modules.pop("my_methods", None)
    METHODS.pop("deep-sgd", None)


def stop_after(rounds, monkeypatch):
    play = Federation.run_round

    def stop_there(self, snapshot):
        if snapshot.round == rounds:
            raise KeyboardInterrupt
        return play(self, snapshot)

    monkeypatch.setattr(Federation, "run_round", stop_there)


def test_an_interrupted_run_is_resumed_with_the_users_method(monkeypatch):
    assert main([*SQUEEZED, "--out", "whole"]) == 0
    with monkeypatch.context() as patched:
        stop_after(2, patched)
        assert main([*SQUEEZED, "--out", "stopped"]) == 130
    forget()
    assert main(["resume", "stopped"]) == 0
    ours, theirs = (load_file(f"{x}/checkpoint.safetensors") for x in ("stopped", "whole"))
    assert {"server/residual", "client/0/residual"} <= ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    config = RunConfig.read(Path("whole/config.toml"))
    assert (config.algorithm, config.settings["strength"]) == ("my_methods:squeezed", 0.02)
    assert read_run(Path("whole")).summary["algorithm"] == "my_methods:squeezed"


def test_a_missing_module_is_one_line(module, capsys, monkeypatch):
    with monkeypatch.context() as patched:
        stop_after(1, patched)
        assert main([*SQUEEZED, "--out", "stopped"]) == 130
    module.unlink()
    forget()
    capsys.readouterr()
    assert main(["resume", "stopped"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("fedsift: cannot import algorithm 'my_methods:squeezed': No module")
    assert said.count("\n") == 1


def test_a_comparison_and_its_report(module, capsys):
    words = ["--algorithms", "my_methods:squeezed,my_methods:deep,compressed-fedadam"]
    words += ["--strength", "0.02", "--depth", "2", "--local-steps", "2", "--target", "0.05"]
    assert main(["compare", *words, *SHORT, "--out", "both"]) == 0
    with open("both/compare.csv") as file:
        assert [row["algorithm"] for row in csv.DictReader(file)] == words[1].split(",")
    module.unlink()
    forget()
    capsys.readouterr()
    folders = ["my_methods-squeezed", "my_methods-deep", "compressed-fedadam"]
    assert main(["report", *(f"both/{x}" for x in folders), "--out", "r.html"]) == 0
    assert "my_methods" not in sys.modules
    page = Path("r.html").read_text(encoding="utf-8")
    assert all(name in page for name in words[1].split(","))


def test_a_config_file_names_the_method(capsys):
    Path("mine.toml").write_text('algorithm = "my_methods:deep"\nrounds = 1\nclients = 2\n')
    assert main(["run", "--config", "mine.toml", "--depth", "2", "--out", "mine"]) == 0
    assert 'algorithm = "my_methods:deep"' in Path("mine/config.toml").read_text()
    assert main(["run", "--config", "mine/config.toml", "--out", "again"]) == 0


def test_help_has_the_settings_of_the_method(capsys):
    assert main(["run", "--algorithm", "my_methods:squeezed", "--help"]) == 0
    words = re.sub(r"[\s│]+", " ", capsys.readouterr().out)
    assert "--strength FLOAT my_methods:squeezed: Share that is sent; in (0, 1]." in words


BAD = {
    "my_methods:squeezed --strength 2": "strength must be in (0, 1], got 2",
    "my_methods:squeezed --strenth 2": "No such option '--strenth'. Did you mean '--strength'?",
    "my_methods:squeezed --depth 2": "No such option '--depth'",
    "my_methods:squeezed --bits 4": "my_methods:squeezed has no setting 'bits'",
    "my_methods:deep": "my_methods:deep needs the setting 'depth'",
    "my_methods:broken": "algorithm 'my_methods:broken' fails: 'oops'",
    "my_methods:nothing": "must return an Algorithm, not None",
    "my_methods:clashing": "my_methods:clashing has a setting 'rounds', which is an option of",
    "my_methods:absent": "no attribute 'absent'",
    "absent:squeezed": "cannot import algorithm 'absent:squeezed': No module named 'absent'",
    "compressed-sift": "sift cannot be compressed: it already has density",
    "compressed-fedad": "unknown algorithm 'fedad'; did you mean 'fedadam'?",
}


@pytest.mark.parametrize("words", BAD)
def test_mistakes_are_one_line(words, capsys):
    assert main(["run", "--algorithm", *words.split(), "--out", "refused"]) == 2
    said = capsys.readouterr().err
    assert BAD[words] in said
    assert said.count("\n") == 1
    assert not Path("refused").exists()
