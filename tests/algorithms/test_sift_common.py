"""sift_common: its transcription, its messages, exact sums, and clients that come and go."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import tensor
from torch.nn.functional import mse_loss

import fedsift
from fedsift import algorithms
from fedsift.algorithms.method import Context, LocalUpdate
from fedsift.algorithms.sift_common import Sizes, next_grid, nominations, sift_common
from fedsift.codec.frame import decode, encode
from fedsift.codec.update import WeightedSum
from fedsift.codec.values import Integer
from fedsift.codec.wire import ENCODED, SimulatedWire
from fedsift.engine import Forked, Reference, Stacked
from fedsift.engine.processes import forked
from fedsift.federation.round import apply_broadcast
from fedsift.federation.snapshot import full_update, state_from
from fedsift.simulation import Options, prepare
from fedsift.vector import State
from oracles import sift_common as oracle
from problems import ridge

CLIENTS, D, ROUNDS = 5, 40, 12
SETTINGS = {
    "density": 0.2, "shares": 3, "ahead": 0.6, "ahead_elsewhere": 0.2, "decay": 0.9, "largest": 7,
    "momentum": 0.6, "clip": 1.0, "warmup_rounds": 8, "average": 0.3, "local_steps": 5, "lr": 0.02,
    "beta1": 0.9, "beta2": 0.99, "eps": 1e-6,
}  # fmt: skip
ENGINES = {
    "one by one": lambda fed: Reference(fed.task),
    "in processes": lambda fed: Forked(fed.task, fed.algorithm, 2),
    "stacked": lambda fed: Stacked(fed.task, fed.algorithm),
}


def federation(problem, engine="one by one", participation=0.6, **settings):
    options = Options(
        batch_size=None, loss=mse_loss, seed=2, device="cpu", participation=participation,
        dropout=0.0, min_clients=0, wire="count",
    )  # fmt: skip
    method = sift_common(**{**SETTINGS, **settings})
    fed = prepare(problem.model, problem.clients, None, method, options)
    return replace(fed, engine=ENGINES[engine](fed))


def after_rounds(fed, rounds=ROUNDS, snapshot=None):
    snapshot = snapshot or fed.initial_snapshot()
    for _ in range(rounds):
        snapshot, report = fed.run_round(snapshot)
        assert not report.problems
    return snapshot


def recorded(fed):
    """A federation on the real wire, and the frames that it will send: (spec, frame)."""
    frames = []

    def send(update, spec, limits):
        frame = encode(update, spec)
        frames.append((spec, limits.client, frame))
        return decode(frame, spec.layout, replace(limits, max_abs=1e9)), len(frame)

    return replace(fed, wire=SimulatedWire(send)), frames


@pytest.mark.parametrize(
    "changes", [{}, {"largest": 1, "clip": 0.0}, {"density": 1.0, "shares": 50}]
)
@pytest.mark.parametrize("engine", ENGINES)
def test_twelve_rounds_agree_to_ten_digits_on_every_engine(engine, changes, monkeypatch):
    """Local sets differ in size, and three of five clients take part in each round."""
    monkeypatch.setattr(forked, "MIN_PARALLEL_SECONDS", -1.0)
    problem = ridge(3, clients=CLIENTS, d=D)
    fed = federation(problem, engine, **changes)
    cohorts = [fed.cohort(t) for t in range(1, ROUNDS + 1)]
    assert len(set(cohorts)) > 1
    assert len(set(problem.sizes)) > 1
    *expected, model = oracle.sift_common(
        problem.gradients, [1] * CLIENTS, problem.w0.numpy(), cohorts, **{**SETTINGS, **changes}
    )
    found = after_rounds(fed)
    for ours, theirs in zip(found.state, expected, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(fed.model_weights(found).numpy(), model, rtol=1e-10, atol=1e-10)
    assert np.abs(found.state.w.numpy() - problem.w0.numpy()).max() > 1e-3


def test_the_first_round_only_nominates():
    fed, frames = recorded(federation(ridge(0, clients=CLIENTS, d=D)))
    first = after_rounds(fed, 1)
    assert torch.equal(first.state.w, fed.initial_snapshot().state.w)
    uploads = [decode(frame, fed.task.layout) for _, client, frame in frames if client is not None]
    assert len(uploads) == 3
    assert all([*update.parts[0].values] == ["c"] for update in uploads)
    assert int((first.state.c > 0).sum()) == 8
    second = after_rounds(fed, 1, first)
    assert int((second.state.w != first.state.w).sum()) == 8


def test_everyone_sends_the_same_coordinates_as_whole_numbers_without_indices():
    fed, frames = recorded(federation(ridge(0, clients=CLIENTS, d=D, dtype=torch.float32)))
    after_rounds(fed, 4)
    assert [fed.algorithm.phase(n).summed for n in (1, 2)] == [(), ("p",)]
    for spec, client, frame in frames:
        if client is None or spec.round == 1:
            continue
        values, named = decode(frame, spec.layout).parts
        assert values.indices is None
        assert values.values["p"].coder == Integer(4)
        assert values.values["p"].quantized.codes.shape == (1, 8 + 2)
        assert named.indices.shape == (1, 3)  # a third of the mask, in its own share
        assert named.values["c"].restore().unique().numel() == 1


def test_the_sum_of_the_messages_has_the_same_bits_as_a_sum_of_whole_numbers():
    """In float32, whatever the weights and the order: a secure sum can take its place."""
    problem = ridge(1, clients=CLIENTS, d=D, dtype=torch.float32)
    fed, frames = recorded(federation(problem, participation=1.0))
    before = after_rounds(fed, 5)
    del frames[:]
    after_rounds(fed, 1, before)
    uploads = [decode(f, s.layout) for s, client, f in frames if client is not None]
    zeros = fed.algorithm.zero_update(fed.task.layout, before.state.w)
    for order in (uploads, uploads[::-1]):
        total = WeightedSum(zeros)
        for update in order:
            total.add(update)
        exact = sum(
            int(update.weights[0]) * update.parts[0].values["p"].quantized.codes[0].long()
            for update in uploads
        )
        assert exact.any()
        assert torch.equal(total.total.p, exact.to(torch.float32))


@pytest.mark.parametrize("wire", ["count", "real"])
def test_the_wire_and_the_engine_do_not_change_a_bit(wire, monkeypatch):
    monkeypatch.setattr(forked, "MIN_PARALLEL_SECONDS", -1.0)
    problem = ridge(2, clients=CLIENTS, d=D, dtype=torch.float32)
    one = after_rounds(federation(problem))
    other = federation(problem, "in processes")
    other = after_rounds(replace(other, wire=ENCODED) if wire == "real" else other)
    for ours, theirs in zip(one.state, other.state, strict=True):
        assert torch.equal(ours, theirs)
    assert one.traffic == other.traffic


def test_a_client_that_was_away_has_the_mask_from_broadcasts_or_with_the_state():
    problem = ridge(3, clients=CLIENTS, d=D, dtype=torch.float32)
    fed, frames = recorded(federation(problem))
    start, end = fed.initial_snapshot().state, after_rounds(fed, 6).state
    replayed, late = start, None
    broadcasts = [(s.round, f) for s, client, f in frames if client is None and s.round]
    for round, frame in broadcasts:
        context = Context.of(fed.task, round, replayed)
        parts = decode(frame, fed.task.layout).parts
        replayed, _ = apply_broadcast(fed.algorithm, context, replayed, parts)
        if late is not None:
            late, _ = apply_broadcast(fed.algorithm, context, late, parts)
        if round == 3:
            late = state_from(full_update(replayed), fed.task.layout, fed.algorithm.state)
    for x in (replayed, late):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(x, end, strict=True))


def sent(delta, unit, memory=None, round=2, **settings):
    """What one client sends whose weights changed by delta, with the mask 0, 1 in this unit."""
    d = len(delta)
    method = sift_common(**{**SETTINGS, "density": 2 / d, "shares": 2, **settings})
    zeros = torch.zeros(1, d)
    start = State(w=zeros, m=zeros, v=zeros, c=tensor([[unit, unit, *[0.0] * (d - 2)]]))
    layout = method.layout_for(ridge_layout(d))
    context, memory = Context(layout, round, 0, (0,)), memory or {"residual": zeros}
    update = LocalUpdate(start, start.replace(w=tensor([delta])))
    (values, named), after = method.phase(round).send(context, update, memory)
    return values.values["p"].restore()[0, :2].tolist(), named, after["residual"][0].tolist()


def ridge_layout(d):
    return fedsift.vector.Layout.of(torch.nn.Linear(d, 1, bias=False))


def test_what_is_rounded_off_or_too_large_stays_in_the_residual():
    numbers, _, residual = sent([2.25, -100.0, 3.0, 0.0, 0.0, 0.0], unit=1.0)
    assert numbers == [2.0, -7.0]
    assert residual == [0.25, -93.0, 3.0, 0.0, 0.0, 0.0]


def test_a_client_names_the_largest_of_its_share():
    delta = [0.0, 0.0, 1.0, -9.0, -2.0, 5.0]
    # With two groups, client 0 has the even coordinates in round 2, and the odd ones in round 3.
    _, even, _ = sent(delta, 1.0, shares=10)
    _, odd, _ = sent(delta, 1.0, round=3, shares=10)
    assert even.indices.tolist() == [[4]]
    assert odd.indices.tolist() == [[3]]
    assert odd.values["c"].restore().item() == pytest.approx(9 * 1.9 / 3)  # with what it keeps


@given(
    d=st.integers(1, 60), k=st.integers(1, 60), shares=st.integers(1, 80), seed=st.integers(0, 99)
)
def test_a_mask_has_k_coordinates_and_the_most_wanted_of_those_named(d, k, shares, seed):
    torch.manual_seed(seed)
    size = Sizes.of(d, min(k, d) / d, shares)
    votes = torch.rand(1, d) * (torch.rand(1, d) < torch.rand(()))
    part = next_grid(votes, torch.randn(1, d), size)
    chosen = votes[0, part.indices[0]]
    assert part.indices.shape == (1, size.k)
    assert part.indices[0].unique().numel() == size.k
    most = votes[0].topk(size.k).values
    assert torch.equal(chosen.sort(descending=True).values, most)


@given(d=st.integers(1, 90), shares=st.integers(1, 99), round=st.integers(1, 50))
def test_groups_of_clients_name_different_coordinates_of_one_round(d, shares, round):
    size = Sizes.of(d, 1 / 3, shares)
    context = Context(ridge_layout(d), round, 0, tuple(range(size.groups)))
    part = nominations(torch.randn(size.groups, d), context, size)
    assert part.indices.flatten().unique().numel() == size.named * size.groups


def loss(problem, w):
    pairs = [(mse_loss(x @ w[:, None], y), len(x)) for x, y in problem.clients]
    return float(sum(each * n for each, n in pairs) / sum(n for _, n in pairs))


@pytest.mark.parametrize("whims", [{}, {"participation": 0.5}, {"dropout": 0.3}])
def test_training_works_with_partial_participation_and_dropout(whims):
    problem = ridge(0, clients=8, d=60, dtype=torch.float32)
    method = algorithms.sift_common(density=0.3, shares=8, momentum=0.5, local_steps=10, lr=0.004)
    result = fedsift.simulate(
        problem.model, problem.clients, rounds=60, batch_size=None, loss=mse_loss,
        algorithm=method, progress=False, **whims,
    )  # fmt: skip
    assert loss(problem, result.state.w) < loss(problem, problem.w0) / 5


def test_a_round_without_updates_keeps_the_mask():
    fed = federation(ridge(0, clients=CLIENTS, d=D))
    before = after_rounds(fed, 3)
    nobody = replace(fed, dropout=0.999999)
    after, report = nobody.run_round(before)
    assert report.clients == 0
    assert all(torch.equal(x, y) for x, y in zip(before.state, after.state, strict=True))


def test_settings_may_be_schedules():
    schedule = fedsift.schedules.linear(0.7, 0.0, rounds=4)
    fed = federation(ridge(0, clients=CLIENTS, d=D), ahead=schedule)
    assert not torch.equal(
        after_rounds(fed, 6).state.w,
        after_rounds(federation(ridge(0, clients=CLIENTS, d=D)), 6).state.w,
    )
    with pytest.raises(ValueError, match=r"density must be in \(0, 1\] in all rounds, got the"):
        sift_common(density=lambda round: 0.1 * round)


def test_settings_are_checked():
    with pytest.raises(ValueError, match="shares must be a whole number of at least 1, got 0"):
        sift_common(shares=0)
    with pytest.raises(ValueError, match=r"ahead must be in \[0, 1\], got 2"):
        sift_common(ahead=2)
