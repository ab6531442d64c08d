"""Differential privacy of secure sums: clipped whole numbers, noise from every client, its cost."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import fedsift
from fedsift import algorithms
from fedsift.cli import main
from fedsift.errors import ConfigError
from fedsift.federation import secure_round
from fedsift.privacy import DifferentialPrivacy
from fedsift.privacy.accounting import epsilon_after
from fedsift.privacy.discrete_gaussian import Bits
from fedsift.privacy.distributed import DistributedNoise, log_ratio
from fedsift.privacy.secure.messages import SecureStage

METHOD = algorithms.sift_common(density=0.5, nominate=False, local_steps=2, lr=0.01)


def client(seed):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(20, 8, generator=draw)
    return x, (x[:, 0] > 0).long()


def train(rounds=4, clients=10, method=METHOD, seed=0, **more):
    torch.manual_seed(0)
    return fedsift.simulate(
        nn.Linear(8, 2), [client(n) for n in range(clients)], algorithm=method, rounds=rounds,
        batch_size=10, seed=seed, device="cpu", progress=False, **more,
    )  # fmt: skip


@pytest.mark.parametrize(("variance", "summands"), [(1, 2), (1, 5), (2, 4)])
def test_the_ratio_of_a_sum_of_discrete_gaussians_to_one_is_bounded(variance, summands):
    x = np.arange(-60, 61)
    one = np.exp(-(x**2) / (2 * variance))
    one, total = one / one.sum(), np.ones(1)
    for _ in range(summands):
        total = np.convolve(total, one)
    values = np.arange(len(total)) - len(total) // 2
    whole = np.exp(-(values**2) / (2 * variance * summands))
    is_likely = np.abs(values) < 6 * math.sqrt(variance * summands)
    ratios = np.log(total / (whole / whole.sum()))[is_likely]
    assert 0 < np.abs(ratios).max() <= log_ratio(summands, variance)


def test_clipped_numbers_are_whole_and_within_the_clip():
    noise = DistributedNoise(10.0, 1.0, fewest=6, most=10, values=50)
    draw = np.random.default_rng(0)
    for scale in (1, 3, 127):
        codes = draw.integers(-scale, scale + 1, 50)
        clipped = noise.clipped(codes)
        assert (clipped**2).sum() <= 100
        assert (np.abs(clipped) <= np.abs(codes)).all()
    assert noise.clipped(np.array([1, -2])).tolist() == [1, -2]


def test_the_smallest_sum_has_the_noise_that_is_counted():
    """Clients are lost with their noise: what is left has at least the variance (z C)²."""
    noise = DistributedNoise(12.0, 1.5, fewest=6, most=10, values=20_000)
    zeros = np.zeros(20_000, np.int64)
    total = sum(noise.added_to(zeros, Bits(bytes([n] * 16))) for n in range(6))
    assert total.var() == pytest.approx((1.5 * 12) ** 2, rel=0.05)
    counted = noise.epsilon(10, 1e-5)
    assert counted <= epsilon_after(10, 1.5, 1.0, 1e-5) + 1e-9
    assert counted > epsilon_after(10, 1.6, 1.0, 1e-5)


def test_every_client_of_a_secure_sum_adds_its_noise(monkeypatch):
    seen = {}
    run = secure_round.SecureExchange.run

    def recorded(self, codes, largest):
        seen[self.round] = {u: np.array(x) for u, x in codes.items()}
        return run(self, codes, largest)

    monkeypatch.setattr(secure_round.SecureExchange, "run", recorded)
    private = DifferentialPrivacy(clip=8.0, noise=2.0)
    result = train(privacy=private, secure=True)
    noise = private.distributed(fewest=7, most=10, values=9)
    assert noise.variance == 37
    spread = np.concatenate([x for codes in seen.values() for x in codes.values()])
    assert spread.var() == pytest.approx(37, rel=0.35)
    assert np.abs(spread).max() > 7  # beyond what a client sends without noise
    assert result.history[-1]["clients"] == 10  # nobody is left out by chance
    assert result.history[-1]["epsilon"] == pytest.approx(noise.epsilon(4, 1e-5))


@pytest.mark.parametrize(("missing", "in_sum"), [(3, 7), (4, 0)])
def test_no_sum_has_fewer_clients_than_its_noise_is_counted_for(missing, in_sum, monkeypatch):
    """Clients that are lost before they send keys make the group smaller, and its threshold."""
    lost = dict.fromkeys(range(missing), SecureStage.KEYS)
    monkeypatch.setattr(secure_round.SecureRounds, "losses", lambda self, round, cohort: lost)
    result = train(1, privacy=DifferentialPrivacy(clip=8.0, noise=2.0), secure=True)
    assert result.history[-1]["clients"] == in_sum
    assert in_sum or "at least 7 clients" in result.history[-1]["problems"]["9"]
    assert result.history[-1]["epsilon"] > 0
    assert train(1, secure=True).history[-1]["clients"] == 10 - missing


def test_a_secure_private_run_ends_before_its_budget_and_can_be_repeated():
    private = DifferentialPrivacy(clip=8.0, noise=4.0, epsilon=3.0)
    result = train(50, privacy=private, secure=True, dropout=0.05)
    last = result.history[-1]
    assert 0 < last["round"] < 50
    assert last["epsilon"] <= 3.0 < epsilon_after(last["round"] + 1, 4.01, 1.0, 1e-5)
    again = train(50, privacy=private, secure=True, dropout=0.05)
    assert torch.equal(again.weights, result.weights)
    other = train(2, privacy=private, secure=True)
    assert not torch.equal(other.weights, train(2, secure=True).weights)


def test_sampling_makes_a_secure_run_no_cheaper():
    """The server that the sum is hidden from knows who takes part."""
    half = DifferentialPrivacy(clip=8.0, noise=4.0)
    all_train, some = (train(3, privacy=half, secure=True, participation=q) for q in (1.0, 0.5))
    assert some.history[-1]["epsilon"] == pytest.approx(all_train.history[-1]["epsilon"], rel=0.02)
    assert some.history[-1]["clients"] == 5
    assert half.spent(3, 0.5) < 0.8 * half.spent(3, 1.0)


@pytest.mark.parametrize("secure", [False, True])
def test_a_private_mask_does_not_depend_on_what_clients_send(secure):
    """Without a step of the server, the masks of two runs on other data are the same."""
    masks = []
    for first in (0, 100):
        clients = [client(first + n) for n in range(6)]
        run = fedsift.rounds(
            nn.Linear(8, 2), clients, rounds=2, batch_size=10, device="cpu", secure=secure,
            algorithm=METHOD, privacy=DifferentialPrivacy(clip=8.0, noise=1.0),
        )  # fmt: skip
        masks.append([snapshot.state.c for _, _, snapshot in run])
    assert torch.equal(masks[0][0], masks[1][0])
    assert int((masks[0][0] > 0).sum()) == 9


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"clip": 0.5}, "a secure sum is of whole numbers, so the clip is at least 1, got 0.5"),
        ({"clip": 1e6}, "is too much for whole numbers: their product must be at most"),
    ],
)
def test_impossible_noise_is_refused_in_one_line(given, message):
    with pytest.raises(ConfigError, match=message) as problem:
        train(1, privacy=DifferentialPrivacy(**given, noise=1.0), secure=True)
    assert "\n" not in str(problem.value)


def test_nominations_are_not_private():
    method = algorithms.sift_common(density=0.5)
    with pytest.raises(ConfigError, match="set nominate to false"):
        train(1, method=method, privacy=DifferentialPrivacy(clip=8.0, noise=1.0))


def test_a_secure_private_run_on_the_command_line(tmp_path, capsys):
    words = [
        "--algorithm",
        "sift-common",
        "--nominate",
        "false",
        "--clients",
        "5",
        "--local-steps",
        "1",
    ]
    private = ["--secure", "--dp-clip", "20", "--dp-epsilon", "8", "--rounds", "2"]
    assert main(["run", *words, *private, "--out", str(tmp_path / "run")]) == 0
    assert " · ε " in capsys.readouterr().out
