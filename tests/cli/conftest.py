"""Folders in which the tests of commands run."""

import pytest
from commands import QUICK

from fedsift.cli.entry import main


@pytest.fixture
def cwd(tmp_path, monkeypatch):
    """An empty working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def quick_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quick") / "run"
    assert main(["run", *QUICK, "--out", str(folder)]) == 0
    return folder
