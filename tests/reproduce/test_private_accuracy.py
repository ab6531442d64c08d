"""Accuracy against ε: the documentation has the committed table, and runs can be continued."""

import importlib.util
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "reproduce" / "privacy"


def load(name):
    spec = importlib.util.spec_from_file_location(f"privacy_{name}", FOLDER / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


page, accuracy = load("page"), load("accuracy")


def test_the_documentation_has_the_committed_results():
    text = page.PAGE.read_text("utf-8")
    tables = (page.rows(name) for name in ("accuracy", "variants", "settings"))
    found = page.pieces(*tables)
    assert page.between(text, "accuracy", found) == text


def row(method, budget, seed, share, **more):
    common = {"noisy_values": "500", "up_bytes": "3000", "device": "cpu", "commit": "abc"}
    return {"method": method, "budget": budget, "seed": seed, "accuracy": share, **common, **more}


def test_a_cell_is_the_mean_over_the_seeds_and_a_dash_without_runs():
    found = [row("fedavg", "4", "1", "0.5"), row("fedavg", "4", "2", "0.6")]
    line = list(page.accuracies(found))[1]
    assert line == ("`fedavg`", "–", "–", "55.00 %", "–", "–", "1/2", "500", "1.5 kB")
    assert (page.COHORT, page.ROUNDS) == (
        accuracy.CLIENTS * accuracy.PARTICIPATION,
        accuracy.ROUNDS,
    )


def test_a_trial_that_diverged_has_no_traffic():
    tried = row("fedavg", "4", "0", "0.5", lr="0.8", clip="1", density="", moments="")
    failed = {**tried, "accuracy": "0", "noisy_values": "", "up_bytes": "", "device": ""}
    lines = list(page.of_trials([tried, failed]))[1:]
    assert lines[0] == ("`fedavg`", "0.8", "1", "–", "50.00 %", "500", "1.5 kB")
    assert lines[1][4:] == ("0.00 %", "–", "–")
    assert page.origin([tried, failed]) == "Device cpu; commit abc"


@pytest.fixture
def study(tmp_path, monkeypatch):
    """A study whose runs are replaced by a formula: best at lr 0.4 and clip 1."""
    monkeypatch.setattr(accuracy.data, "load", lambda name: None)
    study = accuracy.Study(tmp_path, "cpu")
    study.trainings = []

    def trained(name, budget, settings, given):
        study.trainings.append((name, budget, dict(settings)))
        distance = abs(settings["lr"] - 0.4) + abs(settings["clip"] - 1)
        return {"accuracy": 1 - distance / 10}

    study.trained = trained
    study.federation = lambda seed, is_validation=False: {}
    return study


def test_settings_are_searched_from_the_best_so_far_with_a_fixed_number_of_trials(study):
    assert study.chosen("fedavg") == {"lr": 0.4, "clip": 1.0}
    assert len(study.trainings) == accuracy.TRIALS
    assert len({str(settings) for *_, settings in study.trainings}) == accuracy.TRIALS


def test_a_run_in_the_tables_is_not_trained_again(study, tmp_path, monkeypatch):
    study.judge("fedavg", "1", seed=1)
    count = len(study.trainings)
    again = accuracy.Study(tmp_path, "cpu")
    again.trained = None
    assert again.judge("fedavg", "1", seed=1)["accuracy"] == "1"
    assert len(study.trainings) == count == accuracy.TRIALS + 1
