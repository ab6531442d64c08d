"""The norm bound: attacks are rejected, and training without attackers keeps its bits."""

from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import fedsift
from fedsift import algorithms, data
from fedsift.codec.update import CodedValues, Update, dense
from fedsift.engine import Reference, Stacked
from fedsift.engine.contract import Engine, Results
from fedsift.errors import ConfigError
from fedsift.federation.norm_bound import RECENT_ROUNDS, NormBound, NormHistory, norms_of
from fedsift.runs import RunConfig, RunFolder, federation_of, restore_run, train_rounds
from fedsift.runs.checkpoint import load_checkpoint
from fedsift.simulation import Options, initial_snapshot, prepare, run_rounds
from problems import ridge

CLIENTS, ROUNDS = 20, 15
NONE = NormHistory()


def scaled(factor, roles="wmv"):
    """Multiply an update's values."""

    def tamper(role, x):
        return factor * x if role in roles else x

    return tamper


def constant(value, role):
    """Replace the values of one role."""
    return lambda named, x: torch.full_like(x, value) if named == role else x


def tampered(update, tamper):
    parts = tuple(
        replace(part, values={r: CodedValues.of(tamper(r, c.restore()), c.coder)
                              for r, c in part.values.items()})
        for part in update.parts
    )  # fmt: skip
    return Update(parts, update.weights)


@dataclass
class Attacked:
    """An engine some of whose clients send what they like, from a given round on."""

    engine: Engine
    tamper: object
    attackers: tuple[int, ...] = (3, 11)
    since: int = 1

    def train(self, job):
        for reply in self.engine.train(job):
            for each in reply if isinstance(reply, Results) else [reply]:
                is_attack = each.client in self.attackers and job.round >= self.since
                update = tampered(each.update, self.tamper) if is_attack else each.update
                yield replace(each, update=update)

    def evaluate(self, w):
        return self.engine.evaluate(w)


def perceptron():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))


def digits(algorithm, clients=CLIENTS, **options):
    x, y = (part.flatten(1) if part.dim() > 1 else part for part in data.load("digits").train)
    test = data.load("digits").test
    pairs = [(x[n::clients], y[n::clients]) for n in range(clients)]
    options = {"participation": 1.0, "dropout": 0.0, "min_clients": 0, "wire": "count", **options}
    made = prepare(
        perceptron(), pairs, (test[0].flatten(1), test[1]), algorithm,
        Options(batch_size=32, loss=cross_entropy, seed=1, device="cpu", **options),
    )  # fmt: skip
    return replace(made, engine=Stacked(made.task, algorithm))


def trained_history(fed, rounds=ROUNDS):
    records = list(run_rounds(fed, initial_snapshot(fed), rounds))
    return records[-1][0], [record for _, record in records]


METHODS = {
    "fedadam-ssm": algorithms.fedadam_ssm(density=0.2, local_steps=5, lr=0.01),
    "sift": algorithms.sift(density=0.1, local_steps=5, lr=0.01),
}
ATTACKS = {
    "sign-flipped W": (scaled(-100.0, "w"), 0.5),
    "sign-flipped": (scaled(-100.0), 0.5),
    "huge V": (constant(1e11, "v"), 0.03),
    "out of range": (constant(9.9e5, "w"), 0.5),
}
"""What attackers send, and the accuracy that it costs at least where nothing is bounded."""


@cache
def clean(name):
    return trained_history(digits(METHODS[name]))


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("name", METHODS)
def test_an_attack_from_the_first_round_succeeds_only_without_the_bound(name, attack):
    (tamper, cost), accuracy = ATTACKS[attack], clean(name)[1][-1]["accuracy"]
    fed = digits(METHODS[name])
    bounded = replace(fed, engine=Attacked(fed.engine, tamper))
    _, with_bound = trained_history(bounded)
    _, without = trained_history(replace(bounded, max_norm_ratio=None))
    assert with_bound[-1]["accuracy"] >= accuracy - 0.01
    assert without[-1]["accuracy"] < accuracy - cost
    for record in with_bound:
        assert (record["clients"], record["rejected"]) == (CLIENTS - 2, 2)
        assert set(record["problems"]) == {"3", "11"}
        assert "times as large as usual in recent rounds; the bound is" in record["problems"]["3"]


@pytest.mark.parametrize("name", METHODS)
def test_an_attack_that_begins_later_is_rejected_too(name):
    fed = digits(METHODS[name])
    tamper, _ = ATTACKS["sign-flipped W"]
    _, history = trained_history(replace(fed, engine=Attacked(fed.engine, tamper, since=6)))
    assert [record["rejected"] for record in history] == [0] * 5 + [2] * (ROUNDS - 5)
    assert history[-1]["accuracy"] >= clean(name)[1][-1]["accuracy"] - 0.02


def test_rejected_uploads_count_as_traffic_and_do_not_change_memories():
    fed = digits(METHODS["sift"])
    attacked = replace(fed, engine=Attacked(fed.engine, scaled(-100.0, "w")))
    clean, _ = fed.run_round(fed.initial_snapshot())
    after, happened = attacked.run_round(attacked.initial_snapshot())
    assert happened.rejected == 2
    assert after.traffic.uplink_bits_paper == clean.traffic.uplink_bits_paper
    assert set(after.client_memory) == set(range(CLIENTS)) - {3, 11}


def settings(name, **wanted):
    known = algorithms.settings_of(name)
    return {key: value for key, value in wanted.items() if key in known}


@pytest.mark.parametrize("held", ["as by default", "all", "none"])
@pytest.mark.parametrize("engine", [None, Reference, Stacked])
@pytest.mark.parametrize("name", algorithms.METHODS)
def test_the_bound_keeps_the_bits_of_runs_without_attackers(name, engine, held, monkeypatch):
    if held == "all":
        monkeypatch.setattr("fedsift.federation.norm_bound.TYPICAL", 0.0)
    if held == "none":
        monkeypatch.setattr("fedsift.federation.inbox.MAX_HELD_BYTES", 0)
    problem = ridge(1, clients=5, d=40, dtype=torch.float32)
    wanted = {"density": 0.2, "local_steps": 3, "lr": 0.01, "warmup_rounds": 2}
    method = algorithms.find(name)(**settings(name, **wanted))
    ends = []
    for ratio in (1e6, 0):
        fed = prepare(
            problem.model, problem.clients, None, method, Options(batch_size=4, participation=0.8,
            dropout=0.1, min_clients=0, wire="count", loss=mse_loss, seed=0, device="cpu",
            max_norm_ratio=ratio),
        )  # fmt: skip
        if engine:
            extra = () if engine is Reference else (method,)
            fed = replace(fed, engine=engine(fed.task, *extra))
        ends.append(trained_history(fed, 4))
    (ours, history), (theirs, other) = ends
    assert all(torch.equal(x, y) for x, y in zip(ours.state, theirs.state, strict=True))
    for one, same in zip(history, other, strict=True):
        assert {**one, "seconds": 0} == {**same, "seconds": 0}


@pytest.mark.parametrize("name", METHODS)
def test_the_default_rejects_nothing_without_attackers(name):
    bounded, history = clean(name)
    unbounded, _ = trained_history(digits(METHODS[name], max_norm_ratio=None))
    assert all(record["rejected"] == 0 for record in history)
    assert all(torch.equal(x, y) for x, y in zip(bounded.state, unbounded.state, strict=True))


@pytest.mark.parametrize(("clients", "since"), [(1, 1), (1, 2), (2, 1)])
def test_one_or_two_clients_that_differ_are_merged(clients, since):
    fed = digits(METHODS["fedadam-ssm"], clients=clients)
    wild = replace(fed, engine=Attacked(fed.engine, scaled(1e3, "w"), (0,), since))
    _, history = trained_history(wild, 2)
    assert [record["rejected"] for record in history] == [0, 0]


def test_updates_that_all_grow_at_once_are_merged():
    fed = digits(METHODS["fedadam-ssm"])
    everyone = tuple(range(CLIENTS))
    grown = replace(fed, engine=Attacked(fed.engine, scaled(1e3, "w"), everyone, since=3))
    _, history = trained_history(grown, 3)
    assert [record["rejected"] for record in history] == [0, 0, 0]


def test_updates_of_all_zeros_do_not_affect_the_usual_norm():
    zeros = NONE.after([{"w": 0.0}] * 5)
    assert zeros.medians == {}
    assert zeros.typical("w", [{"w": 0.0}] * 5) is None
    bound = NormBound(50.0, zeros)
    assert bound.violation({"w": 3.0}, [{"w": 0.0}, {"w": 3.0}]) is None
    assert bound.violation({"w": 0.0}, [{"w": 0.0}, {"w": 3.0}]) is None


def test_the_history_has_a_bounded_length():
    history = NONE
    for number in range(1, 20):
        history = history.after([{"w": float(number)}])
    assert history.medians == {"w": [float(n) for n in range(20 - RECENT_ROUNDS, 20)]}


def test_a_role_in_two_parts_has_one_norm():
    parts = (*dense({"w": torch.tensor([[3.0]])}), *dense({"w": torch.tensor([[4.0]])}))
    assert norms_of(Update(parts, (1.0,))) == [{"w": 5.0}]
    assert norms_of(Update((), (1.0, 1.0))) == [{}, {}]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_norms_do_not_overflow(dtype):
    x = torch.full((1, 4), torch.finfo(dtype).max / 4, dtype=dtype)
    (norms,) = norms_of(Update(dense({"w": x}), (1.0,)))
    assert norms["w"] == pytest.approx(float(x[0, 0]) * 2) or dtype == torch.float64


usual = st.floats(1.0, 10.0)


@given(
    st.lists(usual, max_size=RECENT_ROUNDS),
    st.lists(usual, min_size=3, max_size=20),
    st.lists(st.floats(1e4, 1e300), max_size=2),
)
def test_a_minority_can_neither_pass_nor_get_others_rejected(recent, honest, huge):
    bound = NormBound(50.0, NormHistory({"w": recent} if recent else {}))
    round = [{"w": norm} for norm in (*huge, *honest)]
    rejected = [norms["w"] for norms in round if bound.violation(norms, round)]
    assert rejected == huge
    assert max(bound.history.after(round).medians["w"]) <= 10


@given(st.lists(usual, min_size=1), st.lists(st.floats(0.0, 1e9), min_size=1))
def test_the_usual_norm_is_between_the_extremes_of_the_round(recent, norms):
    round = [{"w": norm} for norm in norms]
    found = NormHistory({"w": recent}).typical("w", round)
    positive = [norm for norm in norms if norm > 0] or recent
    assert min(positive) <= found <= max(positive)


WORDS = {"clients": 4, "local_steps": 2, "participation": 0.75, "algorithm": "fedadam-ssm"}


def run(path, rounds, until):
    config = RunConfig.from_values({**WORDS, "rounds": rounds})
    fed = federation_of(config)
    folder = RunFolder.create_or_extend(path, config)
    list(train_rounds(folder, fed, restore_run(folder, fed), until))
    return restore_run(folder, fed).checkpoint.snapshot


def test_a_resumed_run_has_the_same_history_bit_for_bit(tmp_path):
    run(tmp_path / "stopped", 7, until=3)
    resumed, whole = run(tmp_path / "stopped", 7, 7), run(tmp_path / "whole", 7, 7)
    assert resumed.norms == whole.norms
    assert {role: len(medians) for role, medians in whole.norms.medians.items()} == {
        "w": RECENT_ROUNDS, "m": RECENT_ROUNDS, "v": RECENT_ROUNDS,
    }  # fmt: skip
    assert all(torch.equal(x, y) for x, y in zip(resumed.state, whole.state, strict=True))


def test_a_run_without_the_bound_setting_is_refused_in_one_line(tmp_path):
    run(tmp_path / "run", 2, until=2)
    folder = RunFolder(tmp_path / "run")
    lines = folder.config_file.read_text().splitlines(keepends=True)
    old = "".join(line for line in lines if not line.startswith("max_norm_ratio"))
    folder.config_file.write_text(old)
    with pytest.raises(
        ConfigError,
        match=r"older version of fedsift and lacks the setting `max_norm_ratio`; .*--out",
    ):
        load_checkpoint(folder, federation_of(folder.config()), "cpu")


@pytest.mark.parametrize("ratio", [1, -1, float("nan"), float("inf"), "many", True])
def test_an_invalid_bound_is_refused(ratio):
    problem = ridge(0)
    with pytest.raises(ValueError, match="max_norm_ratio must be a number above 1, or 0"):
        fedsift.simulate(problem.model, problem.clients, loss=mse_loss, max_norm_ratio=ratio)
