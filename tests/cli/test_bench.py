"""The command ``fedsift bench``."""

import json

import pytest

from fedsift.cli.bench import show_timings
from fedsift.cli.entry import main
from fedsift.cli.timings import Timing


def test_bench_shows_the_parts_of_a_round(capsys):
    parts = {"round": 2.0, "train": 1.5, "select": 0.3, "merge": 0.2, "evaluate": 0.1}
    work = {"flops": 1e11, "bytes": 1e9, "limit": 0.5}
    show_timings([Timing("cnn", "20 clients", 21_840, "cpu", "fp32", **parts, **work)])
    said = " ".join(capsys.readouterr().out.split())
    for part in ("training 1.5 75.0 %", "merging 0.2 10.0 %", "100 GFLOP", "0.5 25.0 %"):
        assert part in said


def test_bench_as_json_adds_up(capsys):
    words = ["bench", "--models", "small-cnn", "--rounds", "1", "--device", "cpu", "--json"]
    assert main(words) == 0
    result = json.loads(capsys.readouterr().out)
    (row,) = result["timings"]
    assert row["parameters"] == 27_430
    assert row["train"] + row["select"] + row["merge"] == pytest.approx(row["round"])
    assert row["limit"] > 0  # and below the round, where nothing else disturbs both
    assert row["ratio"] == pytest.approx(row["round"] / row["limit"])
    assert {"commit", "torch", "device"} <= result["environment"].keys()


@pytest.mark.parametrize(
    ("words", "phrase"),
    [
        (["--models", "moon"], "unknown model"),
        (["--precision", "bf16", "--device", "cpu"], "precision"),
        (["--rounds", "0"], "at least 1"),
        (["--device", "abacus"], "unknown device"),
    ],
)
def test_bench_refuses_bad_input_in_one_line(words, phrase, capsys):
    assert main(["bench", *words]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert phrase in line
