"""Ranks that torchrun started give the result of one process, and may be lost."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

import fedsift
from fedsift.algorithms import METHODS
from fedsift.cli import main
from fork_server import ForkedPython

TORCHRUN = ("--standalone", "--nproc-per-node")
PATIENCE = 120.0
TASK = ("--clients", "5", "--participation", "0.8", "--dropout", "0.2", "--seed", "3")
METHOD = ("--algorithm", "efficient-adam")


def start(ranks, *words, module="forked_torchrun"):
    source = str(Path(fedsift.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    launched = (module, *TORCHRUN, str(ranks), "-m", "fedsift", *map(str, words))
    return ForkedPython("-m", *launched, env=environment)


def finish(process):
    try:
        out, err = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    return process.returncode, out, err


def outcome(path):
    """Every tensor of the checkpoint, and every metric but the time."""
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    for record in lines:
        del record["seconds"]
    return load_file(path / "checkpoint.safetensors"), lines


def assert_same(one, other):
    (tensors, records), (expected, wanted) = outcome(one), outcome(other)
    assert records == wanted
    assert tensors.keys() == expected.keys()
    for name, x in expected.items():
        assert torch.equal(tensors[name], x), name


def test_ranks_give_the_result_of_one_process(tmp_path):
    methods = (*METHODS, "compressed-fedadam")
    task = (*TASK, "--rounds", "3", "--local-steps", "2", "--sample-steps", "1")
    words = ("compare", "--algorithms", ",".join(methods), "--target", "0.5", *task, "--out")
    code, out, err = finish(start(3, *words, tmp_path / "ranks"))
    assert code == 0, err
    assert out.count("compare.csv") == 1  # only rank 0 talks
    assert main([*words, str(tmp_path / "one")]) == 0
    for name in methods:
        assert_same(tmp_path / "ranks" / name, tmp_path / "one" / name)


def test_the_ranks_continue_after_a_method_diverges(tmp_path):
    task = ("--clients", "4", "--rounds", "2", "--local-steps", "5", "--lr", "1e3")
    words = ("compare", "--algorithms", "fedsgd,fedadam-ssm", "--target", "0.9", *task, "--out")
    code, _, err = finish(start(2, *words, tmp_path / "ranks"))
    assert code == 0, err
    assert main([*words, str(tmp_path / "one")]) == 0
    assert_same(tmp_path / "ranks" / "fedadam-ssm", tmp_path / "one" / "fedadam-ssm")


def test_a_lost_rank_ends_the_run_which_then_resumes(tmp_path, monkeypatch):
    monkeypatch.setenv("RANKS", str(tmp_path))
    words = ("run", *METHOD, *TASK, "--rounds", "400", "--out")
    folder = tmp_path / "lost"
    process = start(2, *words, folder)
    deadline = time.monotonic() + PATIENCE
    metrics = folder / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text().count("\n") > 3):
        assert process.poll() is None, process.printed("stderr")
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(int((tmp_path / "rank-1").read_text()), signal.SIGKILL)
    code, _, err = finish(process)
    assert code != 0
    (said,) = [line for line in err.splitlines() if line.startswith("fedsift:")]
    assert f"continue with: fedsift resume {folder}" in said
    assert "rank" in said
    done = len(metrics.read_text().splitlines())
    assert done < 400
    config = folder / "config.toml"
    config.write_text(config.read_text().replace("rounds = 400", f"rounds = {done + 2}"))
    by_ranks = shutil.copytree(folder, tmp_path / "by ranks")
    code, _, err = finish(start(2, "resume", by_ranks))
    assert code == 0, err
    assert main(["resume", str(folder)]) == 0
    whole = ["run", *METHOD, *TASK, "--rounds", str(done + 2)]
    assert main([*whole, "--out", str(tmp_path / "whole")]) == 0
    assert_same(by_ranks, tmp_path / "whole")
    assert_same(folder, tmp_path / "whole")


def test_bad_input_is_reported_once(tmp_path):
    words = ("run", "--dataset", "moon", "--out", tmp_path / "x")
    code, _, err = finish(start(2, *words, module="torch.distributed.run"))
    assert code != 0
    assert sum(line.startswith("fedsift:") for line in err.splitlines()) == 1, err
    assert not (tmp_path / "x").exists()
