"""Differential privacy on Flower: the server's noise, its cost, and what is refused."""

import json
import math
import struct
from contextlib import contextmanager

import pytest
import torch
from flwr.app import ArrayRecord
from inline import InlineGrid, InlineNode
from torch import nn

from fedsift import algorithms
from fedsift.errors import ConfigError
from fedsift.flower import FedSift, arrays_of, client_app, noise
from fedsift.flower.run import DeployedRun
from fedsift.privacy import DifferentialPrivacy
from fedsift.privacy.accounting import epsilon_after, noise_for
from fedsift.runs.rollback import rollback

pytest.importorskip("dp_accounting")
CLIENTS = 4
METHOD = algorithms.fedavg(local_steps=2, lr=0.5)


def make_model():
    torch.manual_seed(0)
    return nn.Linear(50, 10)


def load_data(client, clients):
    draw = torch.Generator().manual_seed(client)
    x = torch.randn(20, 50, generator=draw)
    return x, (x[:, 0] > 0).long()


@pytest.fixture
def train(tmp_path):
    def start(name, rounds, method=METHOD, **options):
        app = client_app(make_model, load_data, method, state_dir=tmp_path / f"state-{name}")
        grid = InlineGrid(InlineNode(app, n, CLIENTS) for n in range(CLIENTS))
        options = {"batch_size": 8, "wait": 0.1, **options}
        strategy = FedSift(method, CLIENTS, tmp_path / name, **options)
        return strategy.start(grid, arrays_of(make_model()), rounds, 60.0)

    return start


def vector(arrays: ArrayRecord) -> torch.Tensor:
    return torch.cat([torch.from_numpy(array.numpy()).flatten() for array in arrays.values()])


def history(tmp_path, name):
    return [json.loads(x) for x in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]


def test_two_runs_with_one_seed_differ_by_the_noise_that_is_counted(train):
    privacy = DifferentialPrivacy(clip=0.1, noise=20.0)
    first, second = (vector(train(name, 1, privacy=privacy).arrays) for name in ("a", "b"))
    expected = 2**0.5 * 20.0 * 0.1 / CLIENTS
    assert float((first - second).std()) == pytest.approx(expected, rel=0.15)


def test_updates_are_clipped_before_they_are_summed(train):
    tiny = DifferentialPrivacy(clip=0.01, noise=1e-6)
    moved = vector(train("run", 1, privacy=tiny).arrays) - vector(arrays_of(make_model()))
    assert 0.002 < float(moved.norm()) <= 0.01 * (1 + 1e-3)


def test_epsilon_is_that_of_all_clients_in_all_rounds_and_stops_the_run(train, tmp_path):
    """Clients know who takes part, so sampling makes nothing cheaper."""
    privacy = DifferentialPrivacy(clip=1.0, noise=5.0, epsilon=2.0)
    train("run", 9, privacy=privacy, participation=0.5, seed=3)
    rounds = history(tmp_path, "run")
    expected = [epsilon_after(n, 5.0, 1.0, 1e-5) for n in range(1, len(rounds) + 1)]
    assert [record["epsilon"] for record in rounds] == expected
    assert expected[-1] <= 2.0 < epsilon_after(len(rounds) + 1, 5.0, 1.0, 1e-5)
    assert len({record["clients"] for record in rounds}) > 1  # each joins independently
    assert {record["train_loss"] for record in rounds} == {None}
    train("run", 9, privacy=privacy, participation=0.5, seed=3)  # nothing is left to do
    assert history(tmp_path, "run") == rounds


def test_the_noise_is_chosen_for_all_rounds_and_recorded(train, tmp_path):
    train("run", 3, privacy=DifferentialPrivacy(clip=1.0, epsilon=4.0))
    assert 3.9 < history(tmp_path, "run")[-1]["epsilon"] <= 4.0
    multiplier = noise_for(4.0, 1e-5, 1.0, 3)
    assert f"dp_noise = {multiplier}" in (tmp_path / "run" / "config.toml").read_text()
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["epsilon"] > 3.9
    with pytest.raises(ValueError, match="dp_noise"):
        train("run", 3, privacy=DifferentialPrivacy(clip=1.0, noise=1.0))


def test_a_round_without_clients_gets_noise_too(train, tmp_path):
    train("run", 6, privacy=DifferentialPrivacy(1.0, noise=5.0), participation=0.25, seed=2)
    rounds = history(tmp_path, "run")
    assert 0 in [record["clients"] for record in rounds]
    assert len(rounds) == 6


@contextmanager
def killed_in_round(number, monkeypatch):
    """Let the server end when it writes a round."""
    write_round = DeployedRun.write_round

    def write_unless_killed(run):
        if run.snapshot.round == number:
            raise KeyboardInterrupt
        write_round(run)

    with monkeypatch.context() as patch:
        patch.setattr(DeployedRun, "write_round", write_unless_killed)
        yield


def test_a_round_that_is_repeated_costs_twice(train, tmp_path, monkeypatch):
    """Clients may have received its model, which had other noise."""
    privacy = DifferentialPrivacy(clip=1.0, noise=5.0)
    with killed_in_round(2, monkeypatch), pytest.raises(KeyboardInterrupt):
        train("run", 3, privacy=privacy)
    train("run", 3, privacy=privacy)
    expected = [epsilon_after(n, 5.0, 1.0, 1e-5) for n in (1, 3, 4)]
    assert [record["epsilon"] for record in history(tmp_path, "run")] == expected


def test_a_draw_that_ended_no_round_counts_in_the_summary(train, tmp_path, monkeypatch):
    """The server is killed in round 3, and the budget allows no other attempt."""
    privacy = DifferentialPrivacy(clip=1.0, epsilon=4.0)
    calibrated = privacy.calibrated(1.0, 3)
    with killed_in_round(3, monkeypatch), pytest.raises(KeyboardInterrupt):
        train("run", 3, privacy=privacy)
    train("run", 3, privacy=privacy)
    assert len(history(tmp_path, "run")) == 2
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["epsilon"] == calibrated.spent(3, 1.0)


def test_draws_outlive_their_rounds_and_rounds_their_file(train, tmp_path):
    """After a rollback the noise of the dropped round still counts."""
    privacy = DifferentialPrivacy(clip=1.0, noise=5.0)
    train("run", 3, privacy=privacy)
    rollback(tmp_path / "run", 2)
    train("run", 3, privacy=privacy)
    assert history(tmp_path, "run")[-1]["epsilon"] == epsilon_after(4, 5.0, 1.0, 1e-5)
    draws = tmp_path / "run" / "noise-draws.txt"
    draws.unlink()
    train("run", 4, privacy=privacy)
    assert history(tmp_path, "run")[-1]["epsilon"] == epsilon_after(4, 5.0, 1.0, 1e-5)
    draws.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"noise-draws.txt is corrupt: it must hold how often"):
        train("run", 5, privacy=privacy)


def test_noise_is_made_of_the_operating_systems_random_numbers(monkeypatch):
    """NumPy's generators can be recognized by their output."""
    monkeypatch.setattr(noise, "PIECE", 4)
    monkeypatch.setattr(noise.os, "urandom", lambda size: bytes(range(size)))
    found = noise.secret_noise(torch.zeros(7), "w").tolist()
    expected = []
    for numbers in (4, 3):
        words = struct.unpack("<4Q", bytes(range(32)))
        uniform = [((word >> 11) + 0.5) / 2**53 for word in words]
        radii = [math.sqrt(-2 * math.log(u)) for u in uniform[:2]]
        angles = [2 * math.pi * u for u in uniform[2:]]
        both = [r * math.cos(a) for r, a in zip(radii, angles, strict=True)]
        both += [r * math.sin(a) for r, a in zip(radii, angles, strict=True)]
        expected += both[:numbers]
    assert found == pytest.approx(expected, rel=1e-6)


def test_noise_is_normal():
    drawn = noise.secret_noise(torch.zeros(1_000_001, dtype=torch.float64), "w").sort().values
    places = torch.tensor([0.001, 0.05, 0.25, 0.5, 0.75, 0.95, 0.999], dtype=torch.float64)
    expected = torch.special.ndtri(places)
    assert torch.allclose(drawn[(places * 1_000_000).long()], expected, atol=0.03)


@pytest.mark.parametrize("buffers", ["average", "local"])
def test_trained_running_statistics_are_refused_before_the_first_round(buffers, tmp_path):
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    privacy = DifferentialPrivacy(1.0, 1.0)
    strategy = FedSift(METHOD, 2, tmp_path / "run", privacy=privacy, buffers=buffers)
    with pytest.raises(ConfigError, match='choose buffers="frozen"'):
        strategy.start(InlineGrid(()), arrays_of(model), 1, 60.0)


def test_sift_common_without_nominations_is_private_on_few_coordinates(train, tmp_path):
    method = algorithms.sift_common(density=0.2, nominate=False, local_steps=2, lr=0.01)
    train("run", 3, method, privacy=DifferentialPrivacy(clip=20.0, noise=1.0))
    assert [record["clients"] for record in history(tmp_path, "run")] == [CLIENTS] * 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": algorithms.sift()}, "sift cannot be private: its clients choose which"),
        ({"method": algorithms.sift_common()}, "set nominate to false"),
        ({"weights": "examples"}, "needs weights='equal', got 'examples'"),
        ({"enough": 2}, "pass privacy or enough, not both"),
        ({"secure": True, "method": algorithms.sift_common(nominate=False)}, "not both"),
    ],
)
def test_what_cannot_be_private_is_refused_in_one_line(options, message, train):
    with pytest.raises(ValueError, match=message) as problem:
        train("run", 1, privacy=DifferentialPrivacy(1.0, 1.0), **options)
    assert "\n" not in str(problem.value)
