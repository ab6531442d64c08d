"""Comparing algorithms on one task: the table, its files, and going on after a stop."""

import csv
import io
import json
import shlex
import shutil
import xml.etree.ElementTree as ElementTree
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from commands import files_under

from fedsift.algorithms import METHODS
from fedsift.cli import main
from fedsift.federation.round import Federation
from fedsift.progress import times_fewer
from fedsift.runs.compare import MIBIT, configs_of, table_of

ALGORITHMS = ("fedadam-ssm", "fedadam", "fedsgd")
TARGET = 0.5
SHORT = ("--clients", "2", "--rounds", "1", "--local-steps", "2")
SETTINGS = ("--clients", "4", "--rounds", "4", "--local-steps", "8", "--density", "0.1")


def compare(out, *words, algorithms=ALGORITHMS, target=TARGET):
    names = ",".join(algorithms)
    words = words or SETTINGS
    return main(
        ["compare", "--algorithms", names, "--target", str(target), "--out", str(out), *words]
    )


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    """A finished comparison: its folder and what it said."""
    out, said = tmp_path_factory.mktemp("comparison") / "out", io.StringIO()
    with redirect_stdout(said), redirect_stderr(io.StringIO()):
        assert compare(out) == 0
    return out, said.getvalue()


@pytest.fixture
def copied(comparison, tmp_path):
    """The finished comparison's folder, to change at will."""
    return shutil.copytree(comparison[0], tmp_path / "copied")


def history_of(out, algorithm):
    text = (Path(out) / algorithm / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def rows_of(out):
    with (out / "compare.csv").open(newline="") as file:
        return {row["algorithm"]: row for row in csv.DictReader(file)}


def line_of(said, algorithm):
    (line,) = [x for x in said.splitlines() if f" {algorithm} " in x]
    return line


def no_more_training(*_):
    raise AssertionError("a finished run was trained again")


def test_the_csv_agrees_with_the_metrics(comparison):
    out, _ = comparison
    rows = rows_of(out)
    assert tuple(rows) == ALGORITHMS
    for name, row in rows.items():
        history = history_of(out, name)
        accuracies = [r["accuracy"] for r in history]
        reached = [r for r in history[1:] if r["accuracy"] >= TARGET][:1]
        assert float(row["target"]) == TARGET
        assert float(row["best_accuracy"]) == max(accuracies)
        assert float(row["final_accuracy"]) == accuracies[-1]
        assert row["round"] == "".join(str(r["round"]) for r in reached)
        assert row["mibit"] == "".join(str(r["uplink_bits_paper"] / 2**20) for r in reached)
        assert row["megabytes"] == "".join(str(r["uplink_bytes"] / 1e6) for r in reached)


def test_the_comparison_has_methods_that_reach_the_target_and_one_that_does_not(comparison):
    reached = {name: row["mibit"] != "" for name, row in rows_of(comparison[0]).items()}
    assert reached == {"fedadam-ssm": True, "fedadam": True, "fedsgd": False}


def test_the_accuracy_on_the_clients_is_in_the_table_and_the_csv(tmp_path, capsys):
    words = ("--clients", "3", "--rounds", "2", "--local-steps", "2", "--partition", "dirichlet")
    names = ("fedadam-ssm", "fedsgd")
    assert compare(tmp_path, *words, "--client-tests", algorithms=names) == 0
    said = capsys.readouterr().out.partition("accuracy on the clients")[2]
    for name, row in rows_of(tmp_path).items():
        last = history_of(tmp_path, name)[-1]
        columns = [f"client_accuracy_{part}" for part in ("mean", "worst", "p10", "std")]
        assert [float(row[column]) for column in columns] == [last[column] for column in columns]
        shown = [f"{100 * last[column]:.2f}" for column in columns]
        assert line_of(said, name).split()[1:] == shown


def test_without_tests_of_clients_there_is_no_table_of_them(comparison):
    out, said = comparison
    assert "accuracy on the clients" not in said
    assert all(row["client_accuracy_worst"] == "" for row in rows_of(out).values())


def test_the_ratio_is_to_the_fewest_bits(comparison):
    rows = rows_of(comparison[0])
    best = min(float(row["mibit"]) for row in rows.values() if row["mibit"])
    for row in rows.values():
        assert row["ratio"] == (str(float(row["mibit"]) / best) if row["mibit"] else "")


def test_the_table_shows_megabytes_and_bits(comparison):
    out, said = comparison
    for name in ("fedadam-ssm", "fedadam"):
        row = rows_of(out)[name]
        dense = 12 * 27_430 * int(row["round"])
        assert f" {float(row['megabytes']):.2f} " in line_of(said, name)
        assert f" {times_fewer(1e6 * float(row['megabytes']), dense)} " in line_of(said, name)
        assert f" {float(row['mibit']):.2f} " in line_of(said, name)


def test_the_table_shows_infinity_for_a_method_that_misses_the_target(comparison):
    _, said = comparison
    assert "∞" in line_of(said, "fedsgd")
    assert said.count("∞") == 1
    assert "×" not in line_of(said, "fedsgd")


def test_the_figure_is_a_png_and_an_svg_that_names_every_algorithm(comparison):
    out, _ = comparison
    assert (out / "compare.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert ElementTree.parse(out / "compare.svg").getroot().tag.endswith("svg")
    drawn = (out / "compare.svg").read_text()
    assert all(name in drawn for name in ALGORITHMS)


def test_the_report_names_every_algorithm_and_loads_nothing_from_the_network(comparison):
    page = (comparison[0] / "report.html").read_text()
    assert all(f'<tr data-group="{name}">' in page for name in ALGORITHMS)
    assert 'src="http' not in page


def test_the_paths_of_table_figure_and_report_are_printed(comparison):
    out, said = comparison
    for name in ("compare.csv", "compare.png", "report.html"):
        assert str(out / name) in said


def test_each_algorithm_gets_the_settings_it_has_and_the_others_their_defaults(comparison):
    configs = {c.algorithm: c for c in configs_of(ALGORITHMS, {"density": 0.1, "lr": 0.01})}
    assert configs["fedadam-ssm"].settings == {"density": 0.1, "lr": 0.01}
    assert configs["fedsgd"].settings == {"lr": 0.01}
    assert "density" not in (comparison[0] / "fedsgd" / "config.toml").read_text()


def test_rerunning_in_the_same_folder_trains_nothing_twice(copied, monkeypatch):
    table = (copied / "compare.csv").read_bytes()
    trained = {name: history_of(copied, name) for name in ALGORITHMS}
    monkeypatch.setattr(Federation, "run_round", no_more_training)
    assert compare(copied) == 0
    assert {name: history_of(copied, name) for name in ALGORITHMS} == trained
    assert (copied / "compare.csv").read_bytes() == table


def test_another_target_for_a_finished_comparison_needs_no_training(copied, monkeypatch):
    monkeypatch.setattr(Federation, "run_round", no_more_training)
    assert compare(copied, target=0.01) == 0
    assert {row["round"] for row in rows_of(copied).values()} == {"1"}


def test_an_algorithm_can_be_added_to_a_finished_comparison(copied):
    before = history_of(copied, "fedadam")
    assert compare(copied, algorithms=("fedadam", "sparse-fedsgd")) == 0
    assert history_of(copied, "fedadam") == before
    assert tuple(rows_of(copied)) == ("fedadam", "sparse-fedsgd")


def test_a_comparison_stopped_in_its_second_run_resumes_to_the_same_table(
    comparison, tmp_path, monkeypatch, capsys
):
    play, calls = Federation.run_round, []

    def interrupted(self, snapshot):
        calls.append(snapshot)
        if len(calls) == 7:
            raise KeyboardInterrupt
        return play(self, snapshot)

    with monkeypatch.context() as patched:
        patched.setattr(Federation, "run_round", interrupted)
        assert compare(tmp_path / "out") == 130
    assert not (tmp_path / "out" / "compare.csv").exists()
    capsys.readouterr()
    assert compare(tmp_path / "out") == 0
    assert rows_of(tmp_path / "out") == rows_of(comparison[0])


@pytest.mark.parametrize("change", [("--seed", "1"), ("--lr", "0.002"), ("--rounds", "5")])
def test_other_settings_in_the_same_folder_are_refused_and_change_nothing(change, copied, capsys):
    before = files_under(copied)
    assert compare(copied, *SETTINGS, *change) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert files_under(copied) == before


def test_a_comparison_that_is_refused_makes_no_folder_for_its_other_algorithms(copied):
    before = set(copied.rglob("*"))
    assert compare(copied, *SETTINGS, "--seed", "1", algorithms=("fedadam-top", "fedadam")) == 2
    assert set(copied.rglob("*")) == before


BAD = {
    "target 0": (["--algorithms", "fedadam", "--target", "0"], ["target", "(0, 1]"]),
    "target 1.5": (["--algorithms", "fedadam", "--target", "1.5"], ["target", "(0, 1]"]),
    "target nan": (["--algorithms", "fedadam", "--target", "nan"], ["target", "(0, 1]"]),
    "no target": (["--algorithms", "fedadam"], ["--target"]),
    "no algorithms": (["--target", "0.5"], ["--algorithms"]),
    "an empty name": (["--algorithms", "fedadam,", "--target", "0.5"], list(METHODS)),
    "unknown algorithm": (["--algorithms", "fedadam,adam", "--target", "0.5"], list(METHODS)),
    "an algorithm twice": (
        ["--algorithms", "fedadam-ssm,fedadam,fedadam_ssm", "--target", "0.5"],
        ["fedadam-ssm is listed twice"],
    ),
    "a setting that none has": (
        ["--algorithms", "fedadam,fedsgd", "--target", "0.5", "--density", "0.1"],
        ["density", "local-steps", "lr"],
    ),
}


@pytest.mark.parametrize(("words", "phrases"), BAD.values(), ids=BAD)
def test_bad_input_gets_one_line_and_writes_nothing(words, phrases, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["compare", *words]) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert said.out == ""
    assert all(phrase in said.err for phrase in phrases)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("algorithms", ["5", '["fedadam", 3]', "[]"])
def test_algorithms_in_a_config_file_must_be_strings(algorithms, tmp_path, capsys):
    (tmp_path / "a.toml").write_text(f"algorithms = {algorithms}\ntarget = 0.5\n")
    assert main(["compare", "--config", str(tmp_path / "a.toml")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fedsift: algorithms must be names")


def record(round, accuracy, bits):
    return {
        "round": round,
        "accuracy": accuracy,
        "uplink_bits_paper": bits,
        "uplink_bytes": bits / 8,
    }


def test_a_target_counts_from_the_first_round_that_reaches_it():
    history = [record(1, 0.4, MIBIT), record(2, 0.5, 2 * MIBIT), record(3, 0.3, 3 * MIBIT)]
    (row,) = table_of({"a": history}, target=0.5)
    assert (row.round, row.mibit, row.megabytes) == (2, 2.0, 2 * MIBIT / 8e6)
    assert (row.best_accuracy, row.final_accuracy, row.ratio) == (0.5, 0.3, 1.0)


def test_where_no_method_reaches_the_target_there_is_no_ratio():
    rows = table_of({"a": [record(1, 0.1, 8)], "b": [record(1, 0.2, 8)]}, target=0.9)
    assert [(row.mibit, row.ratio) for row in rows] == [(None, None)] * 2


def test_a_method_that_diverges_is_a_row_of_the_table(tmp_path, capsys):
    words = ("--clients", "3", "--rounds", "2", "--local-steps", "8", "--lr", "100")
    assert compare(tmp_path / "out", *words, algorithms=("fedadam", "fedsgd")) == 0
    said = capsys.readouterr()
    assert "fedsgd: training diverged in round 1" in " ".join(said.err.split())
    row = rows_of(tmp_path / "out")["fedsgd"]
    assert (row["mibit"], row["best_accuracy"], row["final_accuracy"]) == ("", "", "")
    assert "∞" in line_of(said.out, "fedsgd")
    assert (tmp_path / "out" / "report.html").exists()


def test_a_comparison_in_which_all_methods_diverge_fails(tmp_path, capsys):
    words = ("--clients", "3", "--rounds", "2", "--local-steps", "8", "--lr", "100")
    assert compare(tmp_path / "out", *words, algorithms=("fedsgd",)) == 3
    assert "every algorithm diverged; try a smaller --lr" in capsys.readouterr().err


def test_a_stopped_comparison_says_how_to_continue(tmp_path, capsys, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Federation, "run_round", stop)
    assert compare(tmp_path / "the out", *SHORT, algorithms=("fedsgd",)) == 130
    place = f"'{tmp_path}/the out'"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("continue with: fedsift compare --algorithms ")
    assert f" --out {place} " in line
    monkeypatch.undo()
    assert main(shlex.split(line.removeprefix("continue with: fedsift "))) == 0
    assert rows_of(tmp_path / "the out").keys() == {"fedsgd"}
