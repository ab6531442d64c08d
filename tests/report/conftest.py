"""Runs, their report and their exported files, and a browser, for all tests of reports."""

import pytest

from chromium import chromium, find_chromium
from fedsift.cli import main
from shared import shared_folder
from small_runs import METHODS, SEEDS, trained


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Four methods with two seeds each."""
    return shared_folder(tmp_path_factory, "report-runs", train_all)


def train_all(folder):
    for method in METHODS:
        steps = {} if method == "efficient-adam" else {"local_steps": 4}
        for seed in SEEDS:
            values = {"algorithm": method, "seed": seed, "client_tests": True, **steps}
            trained(folder / f"{method}-{seed}", **values)


@pytest.fixture(scope="session")
def page(runs, tmp_path_factory):
    """Their report."""

    def write(folder):
        assert main(["report", str(runs), "-o", str(folder / "report.html")]) == 0

    return shared_folder(tmp_path_factory, "report", write) / "report.html"


@pytest.fixture(scope="session")
def browser():
    """A page in Chromium."""
    if not find_chromium():
        pytest.skip("there is no Chromium here; on Debian: apt install chromium")
    with chromium() as page:
        yield page
