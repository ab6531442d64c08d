"""Own data and models: killed at random moments, or continued from a half, with the same bits."""

import os
import random
import signal
import time

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import Dataset

import fedsift
from fedsift import algorithms, schedules
from fedsift.runs.run import CheckpointWriter
from test_simulation import assert_same

ROUNDS = 6
pytestmark = pytest.mark.filterwarnings("ignore:the (final accuracy|test loss)")


class Noisy(Dataset):
    """Random items, from all generators of random numbers."""

    def __init__(self, client):
        draw = torch.Generator().manual_seed(client)
        self.x = torch.randn(20, 4, generator=draw)
        self.y = (self.x[:, 0] > 0).long()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, row):
        return self.x[row] + 0.1 * torch.randn(4) + random.random(), self.y[row]


def simulate(method="sift", buffers="average", rounds=ROUNDS, **given):
    torch.manual_seed(0)
    layers = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.ReLU(), nn.Linear(8, 2)
    algorithm = getattr(algorithms, method)(local_steps=2, lr=schedules.cosine(0.01, 0.001))
    return fedsift.simulate(
        nn.Sequential(*layers), [Noisy(n) for n in range(5)], Noisy(9), algorithm, rounds,
        batch_size=6, participation=0.6, dropout=0.2, buffers=buffers,
        client_tests=[Noisy(n) for n in range(10, 15)], progress=False, **given,
    )  # fmt: skip


def in_a_process_of_its_own(function):
    """Run a function in a fork, which ends without a word; return its number."""
    process = os.fork()
    if process:
        return process
    try:
        function()
    finally:
        os._exit(0)


def kill(process, folder, lines, delay):
    """Kill a process after it has written this many lines; return False if it ended before."""
    metrics = folder / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= lines):
        if os.waitpid(process, os.WNOHANG)[0]:
            return False
        time.sleep(0.0005)
    time.sleep(delay)
    has_ended = os.waitpid(process, os.WNOHANG)[0]
    if not has_ended:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    return not has_ended


def write_every_checkpoint(writer, checkpoint):
    writer.latest, writer.is_on_disk = checkpoint, False
    writer.write()


def test_a_run_that_is_killed_again_and_again_ends_with_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.setattr(CheckpointWriter, "update", write_every_checkpoint)
    whole, folder = simulate(out=tmp_path / "whole"), tmp_path / "killed"
    kills, draw = 0, random.Random(0)
    for lines in (0, 1, 2, 4, 5):
        process = in_a_process_of_its_own(lambda: simulate(out=folder))
        kills += kill(process, folder, lines, draw.uniform(0, 0.02))
    assert kills >= 3
    assert_same(simulate(out=folder), whole)
    for name in ("checkpoint.safetensors", "model.safetensors"):
        ours, theirs = (load_file(path / name) for path in (folder, tmp_path / "whole"))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize("buffers", ["average", "local"])
@pytest.mark.parametrize("method", ["sift", "fedadam_ssm", "scaffold"])
def test_a_half_and_the_other_half_are_the_whole(method, buffers, tmp_path):
    given = {"method": method, "buffers": buffers}
    whole = simulate(**given)
    half = simulate(**given, on_round=lambda record, model: record["round"] == ROUNDS // 2)
    assert half.snapshot.round == ROUNDS // 2
    assert_same(simulate(**given, start=half), whole)
    half.save(tmp_path / "half")
    assert_same(simulate(**given, start=fedsift.Result.load(tmp_path / "half")), whole)
