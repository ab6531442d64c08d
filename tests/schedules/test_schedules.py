"""Schedules: their values, their text, and the training that follows them."""

import tomllib
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import mse_loss
from torch.optim import SGD, lr_scheduler

import fedsift
import oracle
from fedsift import algorithms, schedules
from fedsift.algorithms.settings import written
from fedsift.engine import Forked, Reference, Stacked
from fedsift.engine.processes import forked
from fedsift.runs.config import RunConfig
from fedsift.schedules import (
    constant,
    cosine,
    describe,
    join,
    linear,
    linear_warmup,
    parse_schedule,
)
from fedsift.simulation import Options, prepare
from problems import ridge

ROUNDS = 12


def learning_rates(make):
    optimizer = SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
    scheduler = make(optimizer)
    rates = []
    for _ in range(ROUNDS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (
            cosine(0.3, 0.01, rounds=ROUNDS),
            lambda o: lr_scheduler.CosineAnnealingLR(o, ROUNDS, eta_min=0.01),
        ),
        (
            linear(0.3, 0.03, rounds=8),
            lambda o: lr_scheduler.LinearLR(o, start_factor=1, end_factor=0.1, total_iters=8),
        ),
        (
            linear_warmup(0.3, rounds=5),
            lambda o: lr_scheduler.LinearLR(o, start_factor=0.2, total_iters=4),
        ),
        (
            schedules.step(0.3, at=(3, 7), factor=0.5),
            lambda o: lr_scheduler.MultiStepLR(o, [3, 7], gamma=0.5),
        ),
        (constant(0.3), lambda o: lr_scheduler.ConstantLR(o, factor=1)),
        (
            join(linear_warmup(0.3, rounds=5), cosine(0.3, rounds=7), at=5),
            lambda o: lr_scheduler.SequentialLR(
                o,
                [
                    lr_scheduler.LinearLR(o, start_factor=0.2, total_iters=4),
                    lr_scheduler.CosineAnnealingLR(o, 7),
                ],
                milestones=[5],
            ),
        ),
    ],
)
def test_values_are_those_of_pytorch(ours, theirs):
    assert [ours(r) for r in range(1, ROUNDS + 1)] == pytest.approx(learning_rates(theirs))


numbers = st.floats(1e-6, 1.0)
rounds = st.integers(1, 50)
atoms = st.one_of(
    st.builds(constant, numbers),
    st.builds(cosine, numbers, numbers, st.none() | rounds),
    st.builds(linear, numbers, numbers, st.none() | rounds),
    st.builds(linear_warmup, numbers, rounds),
    st.builds(schedules.step, numbers, st.just((2, 5)) | rounds, numbers),
)
anything = st.one_of(atoms, st.builds(lambda a, b, at: join(a, b, at=at), atoms, atoms, rounds))


@given(anything, rounds)
def test_the_text_of_a_schedule_is_read_back(schedule, run_rounds):
    bound = schedule.over(run_rounds)
    assert parse_schedule(repr(schedule)) == schedule
    assert parse_schedule(repr(bound)) == bound == bound.over(99)
    assert all(0 <= bound(r) <= 1 for r in range(1, run_rounds + 5))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cosine(0.1", "not a schedule, such as"),
        ("0.1", "is not a schedule"),
        ("exp(0.1)", "unknown schedule 'exp'; choose one of: constant, cosine"),
        ("__import__('os').system('true')", "neither a number nor a schedule"),
        ("cosine(__import__('os'))", "unknown schedule '__import__'"),
        ("cosine(0.1 ** 2)", "neither a number nor a schedule"),
        ("cosine()", "missing 1 required positional argument: 'start'"),
        ("cosine(0.1, rounds=0)", "rounds of cosine must be a whole number of at least 1, got 0"),
        ("cosine(1e999)", "start of cosine must be a finite number, got inf"),
        ("step(1, at=(3, 2))", "at of step must be rounds in ascending order"),
        ("join(cosine(1), cosine(1), at=(2, 3))", "one schedule more than rounds in at"),
        ("join(1, 2, at=3)", "join takes schedules"),
        ("-" * 900 + "1", "nested too deeply"),
        ("1" * 5000, "at most 1000 characters"),
    ],
)
def test_a_malformed_text_is_refused_in_one_line(text, said):
    with pytest.raises(ValueError, match=r"\A[^\n]*\Z") as caught:
        parse_schedule(text)
    assert said in str(caught.value)


def test_a_schedule_without_rounds_takes_those_of_the_run():
    algorithm = algorithms.for_rounds(algorithms.fedsgd(lr=cosine(0.4)), rounds=4)
    assert repr(algorithm.settings["lr"]) == "cosine(start=0.4, end=0.0, rounds=4)"
    assert algorithm.phase(3).step.lr == pytest.approx(0.2)
    with pytest.raises(ValueError, match="pass rounds="):
        algorithms.fedsgd(lr=cosine(0.4)).phase(2)


def decayed(round):
    return 0.05 / round


def steps_of(round):
    return 6 - round


DECAY = join(linear_warmup(0.05, rounds=2), cosine(0.05, 0.001), at=2)


def expected_state(problem, train, lr):
    """Rounds of an oracle's method, one by one, each with its own settings."""
    state = (problem.w0.numpy(), np.zeros(12), np.zeros(12))
    for round in range(1, 5):
        ends = [train(g, state, steps_of(round), lr(round)) for g in problem.gradients]
        moves = [
            oracle.weighted_mean([end[i] - state[i] for end in ends], problem.sizes)
            for i in range(3)
        ]
        state = tuple(x + move for x, move in zip(state, moves, strict=True))
    return state


def sgd(gradient, state, steps, lr):
    return oracle.sgd(gradient, state[0], steps, lr), *state[1:]


def adam(gradient, state, steps, lr):
    return oracle.adam(gradient, state, steps, lr, 0.9, 0.99, 1e-6)


@pytest.mark.parametrize(
    ("method", "train", "more"),
    [("fedsgd", sgd, {}), ("fedadam", adam, {"beta1": 0.9, "beta2": 0.99, "eps": 1e-6})],
)
@pytest.mark.parametrize("lr", [decayed, DECAY], ids=["function", "schedule"])
@pytest.mark.parametrize("engine", ["reference", "forked", "stacked"])
def test_every_round_trains_with_its_own_settings(monkeypatch, method, train, more, lr, engine):
    monkeypatch.setattr(forked, "MIN_PARALLEL_SECONDS", -1.0)
    problem = ridge(3)
    made = getattr(algorithms, method)(lr=lr, local_steps=steps_of, **more)
    made = algorithms.for_rounds(made, 4)
    options = Options(None, 1.0, 0.0, 0, "count", mse_loss, 0, "cpu")
    federation = prepare(problem.model, problem.clients, None, made, options)
    engines = {
        "reference": lambda: Reference(federation.task),
        "forked": lambda: Forked(federation.task, made, 2),
        "stacked": lambda: Stacked(federation.task, made),
    }
    federation = replace(federation, engine=engines[engine]())
    snapshot = federation.initial_snapshot()
    for _ in range(4):
        snapshot, _ = federation.run_round(snapshot)
    rate = lr.over(4) if lr is DECAY else lr
    expected = zip(("w", "m", "v"), expected_state(problem, train, rate), strict=True)
    for name, theirs in expected:
        if name not in snapshot.state:
            np.testing.assert_array_equal(theirs, 0)
            continue
        ours = snapshot.state[name]
        np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-10, atol=1e-12)


def test_a_constant_schedule_changes_no_bits():
    problem = ridge(0, dtype=torch.float32)

    def train(**settings):
        made = algorithms.sift(density=0.3, **settings)
        return fedsift.simulate(
            problem.model, problem.clients, algorithm=made, rounds=3, batch_size=2, loss=mse_loss
        )

    plain = train(lr=0.01, local_steps=4, bits=5)
    varying = train(lr=constant(0.01), local_steps=lambda round: 4, bits=constant(5))
    assert all(torch.equal(a, b) for a, b in zip(plain.state, varying.state, strict=True))


def test_rounds_with_the_same_settings_share_their_phase():
    algorithm = algorithms.fedadam_ssm(lr=schedules.step(0.1, at=2))
    phases = [algorithm.phase(round) for round in (1, 2, 3, 4)]
    assert phases[0] is phases[1]
    assert phases[2] is phases[3]
    assert phases[1] is not phases[2]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"lr": lambda round: -1.0}, "lr must be a positive number, got -1.0 in round 1 of "),
        ({"lr": lambda round: None}, "lr must be a positive number, got None in round 1 of "),
        ({"lr": lambda round: 1 / 0}, "the schedule of lr, fails in round 1: division by zero"),
        ({"local_steps": constant(0.2)}, "local_steps must be .*, got 0 in round 1 of constant"),
        (
            {"density": linear(0.5, 2.0)},
            r"density must be in \(0, 1\], got .* in round 9 of linear",
        ),
        ({"lr": linear(0.1, -0.1, rounds=4)}, "lr must be .*, got -0.1 in round 9"),
    ],
)
def test_values_out_of_range_are_refused_before_training(settings, said):
    with pytest.raises(ValueError, match=said):
        algorithms.for_rounds(algorithms.fedadam_ssm(**settings), rounds=9)


def test_a_fixed_setting_is_no_schedule():
    with pytest.raises(ValueError, match=r"warmup_rounds must be .* in all rounds"):
        algorithms.sift(warmup_rounds=constant(3))


def test_a_function_is_found_again_by_its_name(tmp_path, monkeypatch):
    (tmp_path / "rates_of_mine.py").write_text("def halved(round):\n    return 0.5**round\n")
    monkeypatch.chdir(tmp_path)
    config = RunConfig.from_values({"algorithm": "fedsgd", "lr": "rates_of_mine:halved"})
    assert config.make_algorithm().phase(3).step.lr == 0.125
    again = RunConfig.from_values(tomllib.loads(config.toml()))
    assert again.flat() == config.flat()
    assert again.flat()["lr"] == "rates_of_mine:halved"


@pytest.mark.parametrize("lr", [lambda round: 0.1, partial(pow, 0.5), type("Own", (), {})])
def test_a_function_without_a_name_is_not_written_to_a_file(lr):
    with pytest.raises(ValueError, match="cannot be restored from a file"):
        written(lr)


def test_schedules_are_described():
    made = algorithms.fedsgd(lr=decayed, local_steps=constant(3))
    assert describe(decayed) == f"{__name__}:decayed"
    assert repr(made) == f"fedsgd(local_steps=constant(value=3.0), lr={__name__}:decayed)"
    assert describe(np.sqrt) == "numpy:ufunc" or describe(np.sqrt).endswith(":sqrt")
