"""The help of every command, and the catalog behind it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
import typer

import fedsift
from fedsift.algorithms import METHODS
from fedsift.cli import catalog
from fedsift.cli.entry import app, main
from fedsift.cli.options import DEFAULTS, run_parameters

FLAGS = (
    "--algorithm", "--dataset", "--model", "--clients", "--rounds", "--local-steps",
    "--batch-size", "--lr", "--density", "--partition", "--theta", "--participation", "--dropout",
    "--min-clients", "--seed", "--device", "--config", "--out", "--tensorboard",
)  # fmt: skip


def test_help_lists_every_documented_flag(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["run", "--help"]) == 0
    said = capsys.readouterr()
    assert all(flag in said.out for flag in FLAGS)
    assert said.err == ""


def test_methods_are_listed_by_their_names(capsys, monkeypatch):
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 400)
    for command in ("run", "compare"):
        assert main([command, "--help"]) == 0
        assert f"{', '.join(sorted(METHODS))}." in capsys.readouterr().out


@pytest.mark.parametrize("words", [["data", "list"], ["bounds"]], ids=" ".join)
def test_tables_have_few_lines_and_fit_a_terminal(words, capsys, monkeypatch):
    monkeypatch.setenv("FEDSIFT_DATA", "data")
    assert main(words) == 0
    said = capsys.readouterr().out
    assert not set(said) & set("┃│…")
    assert max(map(len, said.splitlines())) <= 80


def test_the_bare_command_shows_its_help_without_an_error(capsys):
    main([])
    said = capsys.readouterr()
    assert all(command in said.out for command in ("run", "resume", "compare"))
    assert said.err == ""


def commands_with_arguments(command, *words):
    for name, each in command.commands.items():
        if isinstance(each, click.Group):
            yield from commands_with_arguments(each, *words, name)
        elif any(isinstance(p, click.Argument) for p in each.params):
            yield [*words, name], each


def test_help_explains_every_argument(capsys, monkeypatch):
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 300)
    found = dict.fromkeys(
        ("resume", "rollback", "report", "reproduce", "frame", "data", "deploy"), 0
    )
    for words, command in commands_with_arguments(typer.main.get_command(app)):
        assert main([*words, "--help"]) == 0
        said = capsys.readouterr().out
        for argument in (p for p in command.params if isinstance(p, click.Argument)):
            assert argument.help, f"{words}: {argument.name} (see click in pyproject.toml)"
            assert argument.help in said
            found[words[0]] += 1
    assert all(found.values())


def test_no_arguments_show_the_help(capsys):
    assert main(["--help"]) == 0
    with_option = capsys.readouterr().out
    assert main([]) == 0
    assert capsys.readouterr().out.rstrip() == with_option.rstrip()


HELP_IMPORTS = """
import sys
from time import process_time

import typer

began = process_time()
from fedsift.cli.entry import app, main

def words_of(command, *words):
    yield [*words, "--help"]
    for name, child in getattr(command, "commands", {}).items():
        yield from words_of(child, *words, name)

main(["--version"])
for words in words_of(typer.main.get_command(app)):
    assert main(words) == 0, words
print(process_time() - began, file=sys.stderr)
heavy = {"torch", "numpy", "scipy", "sklearn", "matplotlib", "plotly", "safetensors"}
assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()
"""


def test_no_help_imports_torch_or_takes_long():
    environment = {**os.environ, "PYTHONPATH": str(Path(fedsift.__file__).parents[1])}
    words = [sys.executable, "-c", HELP_IMPORTS]
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "Train a model" in done.stdout
    assert float(done.stderr) < 10  # seconds of CPU time for the help of every command


def test_the_catalog_is_up_to_date():
    stored = json.loads(catalog.FILE.read_text(encoding="utf-8"))
    built_in = json.loads(json.dumps(catalog.declarations()))
    assert built_in == stored, f"catalog.json is out of date: run {catalog.COMMAND}"


def test_every_field_of_a_configuration_is_an_option():
    names = [parameter.name for parameter in run_parameters(DEFAULTS)]
    assert len(names) == len(set(names))
    settings = {setting for method in METHODS.values() for setting in method.settings}
    assert set(names) == set(DEFAULTS) - {"algorithm"} | settings
