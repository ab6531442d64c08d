"""Differential privacy: the mechanism, its accounting, its limits, and an attack that it stops."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.stats import norm
from torch import nn

import fedsift
from fedsift import algorithms
from fedsift.cli.entry import main
from fedsift.codec.update import dense
from fedsift.engine.processes import forked
from fedsift.errors import ConfigError
from fedsift.federation.round import Federation
from fedsift.privacy import DifferentialPrivacy, differential
from fedsift.privacy.accounting import ORDERS, epsilon_after, noise_for
from fedsift.privacy.differential import private_roles
from fedsift.runs.folder import RunFolder

pytest.importorskip("dp_accounting")
D = 6


def client(seed, samples=12):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 2, generator=draw)
    return x, (x[:, 0] > 0).long()


def train(clients=5, rounds=3, algorithm=None, **more):
    torch.manual_seed(0)
    return fedsift.simulate(
        nn.Linear(2, 2),
        [client(n) for n in range(clients)],
        algorithm=algorithm or algorithms.fedavg(local_steps=2, lr=0.5),
        rounds=rounds,
        **{"test": client(99), "progress": False, **more},
    )


@given(
    x=st.lists(
        st.lists(st.floats(-(2.0**90), 2.0**90, width=32), min_size=3, max_size=3), min_size=1
    ),
    bound=st.floats(1e-3, 1e3),
)
@settings(max_examples=50)
def test_no_update_is_larger_than_its_bound_and_directions_stay(x, bound):
    given_x = torch.tensor(x)
    (part,) = DifferentialPrivacy(clip=bound, noise=1.0).clipped(dense({"w": given_x}))
    found = part.values["w"].restore()
    norms = given_x.double().norm(dim=-1)
    assert (found.double().norm(dim=-1) <= bound * (1 + 1e-5)).all()
    small = norms <= bound
    assert torch.equal(found[small], given_x[small])
    cosines = (found.double() * given_x.double()).sum(-1)
    assert (cosines >= 0).all()


def test_the_noise_has_the_promised_deviation_on_every_vector():
    clip = {"w": 2.0, "m": 0.5}
    private = DifferentialPrivacy(clip=clip, noise=3.0)
    total = fedsift.vector.State(w=torch.zeros(20_000), m=torch.zeros(20_000))
    noisy = private.noisy_mean(total, ("w", "m"), 10.0, differential.seeded_noise(1))
    for role, bound in clip.items():
        deviation = float(noisy[role].std())
        assert deviation == pytest.approx(math.sqrt(2) * 3.0 * bound / 10, rel=0.03)
    other = private.noisy_mean(total, ("w", "m"), 10.0, differential.seeded_noise(2))
    assert not torch.equal(noisy.w, other.w)


def test_a_round_is_the_clipped_sum_plus_noise_over_the_expected_number_of_clients(monkeypatch):
    """One round of FedAvg, recomputed from the updates of a run without privacy."""
    clients, clip, noise = 5, 0.05, 0.3
    always_one = SimpleNamespace(standard_normal=np.ones)
    monkeypatch.setattr(differential, "stream", lambda *_: always_one)
    algorithm = algorithms.fedavg(local_steps=2, lr=0.5)
    private = train(
        clients, 1, algorithm, privacy=DifferentialPrivacy(clip, noise), participation=0.6
    )
    start = train(clients, 1, algorithms.fedavg(local_steps=1, lr=1e-30)).weights
    total = torch.zeros(D)
    torch.manual_seed(0)
    model, data = nn.Linear(2, 2), [client(n) for n in range(clients)]
    run = fedsift.rounds(
        model, data, algorithm=algorithm, rounds=1, participation=0.6, seed=0,
        privacy=DifferentialPrivacy(clip, noise), test=client(99),
    )  # fmt: skip
    cohort = run.federation.cohort(1)
    engine, snapshot = run.federation.engine, run.snapshot
    for reply in engine.train(run.federation.job_after(snapshot)):
        (part,) = reply.update.parts
        delta = part.values["w"].restore()[0]
        total += delta * min(1.0, clip / float(delta.norm()))
    assert len(cohort) not in (0, clients)
    expected = start + (total + noise * clip) / (0.6 * clients)
    assert torch.allclose(private.weights, expected, atol=1e-6)


def test_cohorts_are_drawn_independently_per_client():
    run = fedsift.rounds(
        nn.Linear(2, 2), [client(n) for n in range(40)], participation=0.25,
        algorithm=algorithms.fedavg(), privacy=DifferentialPrivacy(1.0, 1.0), rounds=1,
    )  # fmt: skip
    cohorts = [run.federation.cohort(round) for round in range(1, 2001)]
    sizes = np.array([len(cohort) for cohort in cohorts])
    assert sizes.mean() == pytest.approx(10, abs=0.3)
    assert sizes.var() == pytest.approx(40 * 0.25 * 0.75, rel=0.15)  # of a binomial distribution
    assert min(sizes) < 5 < 15 < max(sizes)


def test_a_round_without_clients_still_gets_noise():
    result = train(3, 30, participation=0.05, privacy=DifferentialPrivacy(1.0, 1.0))
    empty = [r["round"] for r in result.history if r["round"] and not r["clients"]]
    assert empty
    torch.manual_seed(0)
    run = fedsift.rounds(
        nn.Linear(2, 2), [client(n) for n in range(3)], rounds=30, participation=0.05,
        algorithm=algorithms.fedavg(local_steps=2, lr=0.5), privacy=DifferentialPrivacy(1.0, 1.0),
    )  # fmt: skip
    before = run.snapshot.state.w
    for record, _, snapshot in run:
        if record["round"] == empty[0]:
            assert not torch.equal(snapshot.state.w, before)
            break
        before = snapshot.state.w


def gaussian_epsilon(noise, rounds, delta):
    """The exact ε of a composition of Gaussian mechanisms (Balle and Wang, 2018)."""
    mu = math.sqrt(rounds) / noise

    def excess(epsilon):
        shift = epsilon / mu
        tail = math.exp(epsilon + norm.logcdf(-shift - mu / 2))
        return norm.cdf(-shift + mu / 2) - tail - delta

    return brentq(excess, 1e-9, 500)


@pytest.mark.parametrize(("noise", "rounds"), [(1.0, 1), (2.0, 10), (5.0, 30), (20.0, 100)])
def test_epsilon_bounds_the_exact_value_closely_when_every_client_takes_part(noise, rounds):
    exact = gaussian_epsilon(noise, rounds, 1e-5)
    found = epsilon_after(rounds, noise, 1.0, 1e-5)
    assert exact <= found <= 1.15 * exact


@pytest.mark.parametrize(("noise", "rate", "rounds"), [(1.0, 0.1, 30), (0.7, 0.02, 100)])
def test_epsilon_agrees_with_opacus(noise, rate, rounds):
    rdp = pytest.importorskip("opacus.accountants.analysis.rdp")
    orders = [order for order in ORDERS if order > 1.5]
    costs = rdp.compute_rdp(q=rate, noise_multiplier=noise, steps=rounds, orders=orders)
    theirs, _ = rdp.get_privacy_spent(orders=orders, rdp=costs, delta=1e-5)
    assert epsilon_after(rounds, noise, rate, 1e-5) == pytest.approx(theirs, rel=0.02)


@pytest.mark.parametrize(("epsilon", "rate", "rounds"), [(0.5, 0.3, 7), (8.0, 0.05, 40)])
def test_calibrated_noise_just_meets_the_budget(epsilon, rate, rounds):
    noise = noise_for(epsilon, 1e-5, rate, rounds)
    assert 0.97 * epsilon < epsilon_after(rounds, noise, rate, 1e-5) <= epsilon
    assert epsilon_after(rounds + 1, noise, rate, 1e-5) > 0.97 * epsilon


def test_metrics_have_epsilon_after_every_round_and_no_training_loss():
    private = DifferentialPrivacy(clip=1.0, epsilon=3.0)
    result = train(5, 4, privacy=private, participation=0.5)
    epsilons = [record["epsilon"] for record in result.history]
    assert epsilons[0] == 0
    assert epsilons == sorted(epsilons)
    assert 2.9 < epsilons[-1] <= 3.0
    assert all(record["train_loss"] is None for record in result.history)


def test_training_stops_before_the_budget_is_exceeded(tmp_path):
    private = DifferentialPrivacy(clip=1.0, noise=3.0, epsilon=3.0)
    result = train(5, 50, privacy=private, out=tmp_path / "run")
    last = result.history[-1]
    assert 0 < last["round"] < 50
    assert last["epsilon"] <= 3.0 < epsilon_after(last["round"] + 1, 3.0, 1.0, 1e-5)
    again = train(5, 50, privacy=private, out=tmp_path / "run")
    assert again.history == result.history
    assert torch.equal(again.weights, result.weights)
    with pytest.raises(ValueError, match="dp_noise"):
        train(5, 50, privacy=DifferentialPrivacy(1.0, 2.0, 3.0), out=tmp_path / "run")


def test_a_run_continued_with_another_noise_is_refused():
    private = DifferentialPrivacy(clip=1.0, noise=3.0)
    half = train(5, 2, privacy=private)
    whole = train(5, 4, privacy=private)
    assert torch.equal(train(5, 4, privacy=private, start=half).weights, whole.weights)
    with pytest.raises(ValueError, match="epsilon counts the rounds of start"):
        train(5, 4, privacy=DifferentialPrivacy(clip=1.0, noise=1.0), start=half)
    with pytest.raises(ValueError, match="epsilon counts the rounds of start"):
        train(5, 4, privacy=private, start=train(5, 2))


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "fedopt", "fedsgd", "decomfl"])
def test_methods_that_send_one_vector_in_full_can_be_private(name):
    method = algorithms.find(name)
    more = {"perturbations": 2} if name == "decomfl" else {}
    result = train(4, 2, method(local_steps=2, **more), privacy=DifferentialPrivacy(0.1, 1.0))
    assert torch.isfinite(result.weights).all()
    assert result.history[-1]["epsilon"] > 0


def test_moments_need_a_clip_of_their_own():
    method, clip = algorithms.fedadam(local_steps=2), {"w": 1.0, "m": 0.1, "v": 0.01}
    assert private_roles(method, DifferentialPrivacy(clip, 1.0)) == ("w", "m", "v")
    result = train(4, 2, method, privacy=DifferentialPrivacy(clip, 1.0))
    assert (result.state.v >= 0).all()
    with pytest.raises(ValueError, match="also sends M: give a clip for it, not only for W"):
        train(4, 2, method, privacy=DifferentialPrivacy(1.0, 1.0))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("sift", "its clients choose which coordinates they send"),
        ("fedadam-ssm", "its clients choose which coordinates they send"),
        ("compressed-fedavg", "its clients choose which coordinates they send"),
        ("scaffold", "the mean of C must be exact"),
    ],
)
def test_other_methods_are_refused_in_one_line(name, why):
    with pytest.raises(ConfigError, match=f"^{name} cannot be private: {why}; .* fedavg$"):
        train(4, 1, algorithms.find(name)(), privacy=DifferentialPrivacy(1.0, 1.0))


@pytest.mark.parametrize("buffers", ["average", "local"])
def test_trained_running_statistics_are_refused(buffers):
    """With "local", the model would have the mean of the clients' own layers, without noise."""
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    more = {"rounds": 1, "privacy": DifferentialPrivacy(1.0, 1.0), "progress": False}
    clients, method = [client(n) for n in range(3)], algorithms.fedavg(local_steps=1)
    with pytest.raises(ValueError, match='choose buffers="frozen"'):
        fedsift.simulate(model, clients, algorithm=method, buffers=buffers, **more)
    fedsift.simulate(model, clients, algorithm=method, buffers="frozen", **more)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"clip": 1.0}, "differential privacy needs noise or epsilon"),
        ({"clip": 0.0, "noise": 1.0}, "clip of W must be a positive number, got 0.0"),
        ({"clip": 1.0, "epsilon": -1.0}, "epsilon must be a positive number, got -1.0"),
        ({"clip": 1.0, "noise": math.nan}, "noise must be a positive number, got nan"),
        ({"clip": 1.0, "noise": 1.0, "delta": 1.0}, "delta must be between 0 and 1, got 1.0"),
    ],
)
def test_impossible_settings_are_refused(given, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        DifferentialPrivacy(**given)


def test_unequal_weights_are_refused():
    with pytest.raises(ValueError, match="needs weights=\"equal\", got weights='examples'"):
        train(4, 1, weights="examples", privacy=DifferentialPrivacy(1.0, 1.0))


def run_cli(folder, *words):
    common = ["--algorithm", "fedavg", "--clients", "5", "--local-steps", "1", "--lr", "0.1"]
    return main(["run", *common, "--rounds", "2", "--out", str(folder), *words])


def test_a_private_run_on_the_command_line(tmp_path, capsys):
    assert run_cli(tmp_path / "run", "--dp-clip", "1", "--dp-epsilon", "4") == 0
    assert " · ε " in capsys.readouterr().out
    folder = RunFolder(tmp_path / "run")
    config = folder.config()
    assert config.dp_noise == noise_for(4.0, 1e-5, 1.0, 2)
    assert 3.9 < folder.summary()["epsilon"] <= 4.0
    text = folder.config_file.read_text().replace("rounds = 2", "rounds = 3")
    folder.config_file.write_text(text)
    assert main(["resume", str(folder.path)]) == 0  # there is no budget for a third round
    assert folder.history()[-1]["round"] == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dp-epsilon", "4"], "set dp-clip"),
        (["--dp-clip", "1"], "needs noise or epsilon"),
        (["--dp-clip", "1", "--dp-epsilon", "-4"], "epsilon must be a positive number"),
        (["--dp-clip", "1", "--dp-noise", "1", "--weights", "batch"], "needs weights equal"),
        (["--dp-clip", "1", "--dp-noise", "1", "--algorithm", "sift"], "cannot be private"),
    ],
)
def test_bad_options_are_refused_in_one_line(words, message, tmp_path, capsys):
    assert run_cli(tmp_path / "run", *words) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert not (tmp_path / "run").exists()


def membership_scores(privacy, worlds=24):
    """How far the model moved toward a planted client, in worlds with and without it."""
    x = torch.tensor([[8.0, -8.0]]).repeat(12, 1)
    planted, torch_model = (x, torch.zeros(12).long()), nn.Linear(2, 2)
    scores = {True: [], False: []}
    for seed in range(worlds):
        for is_in in scores:
            others = [client(1000 * seed + n) for n in range(10)]
            torch.manual_seed(seed)
            model = nn.Linear(2, 2)
            result = fedsift.simulate(
                model, [*others, *([planted] if is_in else [])], seed=seed, rounds=2,
                algorithm=algorithms.fedavg(local_steps=2, lr=0.5), weights="equal",
                privacy=privacy, progress=False, device="cpu",
            )  # fmt: skip
            result.load_into(torch_model)
            with torch.no_grad():
                logits = torch_model(planted[0][:1])[0]
            scores[is_in].append(float(logits[0] - logits[1]))
    return scores


def area_under_curve(scores):
    """The probability that a world with the planted client has the higher score."""
    inside, outside = (np.array(scores[key]) for key in (True, False))
    return float((inside[:, None] > outside[None]).mean())


def test_an_attack_finds_a_planted_client_only_without_privacy(monkeypatch):
    monkeypatch.setattr(forked, "num_cores", lambda: 1)  # small runs need no processes
    assert area_under_curve(membership_scores(None)) > 0.9
    private = DifferentialPrivacy(clip=0.2, epsilon=1.0).calibrated(rate=1.0, rounds=2)
    # ε = 1 allows at most about 0.73; the standard error of 24 worlds is 0.08.
    assert area_under_curve(membership_scores(private)) < 0.73


def test_a_federation_needs_equal_weights():
    run = fedsift.rounds(nn.Linear(2, 2), [client(0)], algorithm=algorithms.fedavg(), rounds=1)
    task, algorithm, engine = run.federation.task, run.federation.algorithm, run.federation.engine
    with pytest.raises(ValueError, match="needs equal weights"):
        Federation(task, algorithm, engine, privacy=DifferentialPrivacy(1.0, 1.0))
