import math
from dataclasses import replace

import pytest

from fedsift.advise import calibration
from fedsift.advise.calibration import (
    Calibration,
    advise,
    calibration_task,
    first_choice,
    mibit_to,
    next_steps,
)
from fedsift.advise.search import LADDERS, Choice, Forecast, Point, Race, climb, crossing
from fedsift.errors import Diverged
from fedsift.runs.config import RunConfig


def made_up(speed):
    """Runs whose error is 1/(1 + speed(choice) · Mibit); a round at density 0.05 is 1 Mibit."""

    def run(choice, stop):
        curve = []
        while not (curve and stop(curve)):
            mibit = (len(curve) + 1) * choice.density / 0.05
            curve.append(Point(mibit, 1.0, 1 - 1 / (1 + speed(choice) * mibit)))
        return curve

    return run


def test_the_climb_finds_the_best_of_settings_that_do_not_interact():
    best = Choice(90, 3e-3, 0.01)

    def speed(c):
        off = abs(math.log(c.lr / best.lr)) + abs(math.log(c.density / best.density))
        return 1 / (1 + off + abs(math.log(c.local_steps / best.local_steps)))

    race = Race(made_up(speed), line=0.7, max_rounds=10**4)
    assert climb(race, Choice(), lambda c: True) == best
    assert len(race.tried) < math.prod(len(rungs) for rungs in LADDERS.values()) / 2


def test_nothing_better_leaves_the_start():
    race = Race(made_up(lambda c: 1.0 if c == Choice() else 0.5), line=0.8, max_rounds=10**4)
    assert climb(race, Choice(), lambda c: True) == Choice()


def test_what_the_budget_cannot_pay_is_not_tried():
    race = Race(made_up(lambda c: c.lr), line=0.001, max_rounds=10**4)
    best = climb(race, Choice(), lambda c: c.lr <= 3e-3)
    assert best.lr == 3e-3
    assert all(t.choice.lr <= 3e-3 for t in race.tried.values())


def test_a_choice_that_cannot_win_is_stopped():
    race = Race(made_up(lambda c: 1e-6), line=0.9, max_rounds=10**6)
    assert race.enter(Choice(), limit=7.0) == math.inf
    assert race.tried[Choice()].rounds == 8
    assert race.tried[Choice()].finite is None


def test_a_curve_that_comes_back_has_crossed():
    curve = [Point(1, 2.0, 0.1), Point(2, 1.0, 0.5), Point(3, 1.5, 0.4)]
    assert crossing(curve, 0.42) == pytest.approx(1.8)
    assert crossing([Point(1, 0.5, 0.9)], 0.8) == 1


def test_a_forecast_follows_a_power_law_and_refuses_a_rising_error():
    curve = [Point(x, 1.0, 1 - 0.3 * x**-0.7) for x in (0.5, 1, 2, 3, 4)]
    found = Forecast.of(curve)
    assert found.accuracy(10) == pytest.approx(1 - 0.3 * 10**-0.7)
    assert found.mibit(found.accuracy(10)) == pytest.approx(10)
    assert mibit_to(curve, 0.95) == pytest.approx((0.3 / 0.05) ** (1 / 0.7))
    assert Forecast.of([Point(1, 1, 0.5), Point(2, 1, 0.4), Point(3, 1, 0.3)]) is None
    assert Forecast.of([Point(1, 1, 0.5)]) is None
    assert mibit_to([Point(1, 1, 0.5)], 0.9) is None


@pytest.mark.parametrize("budget", [0.0, -1.0, math.nan, math.inf, 1e-6])
def test_a_meaningless_budget_is_refused(budget):
    with pytest.raises(ValueError, match="budget-mbit"):
        first_choice(27_430, budget)


def test_the_edges_of_the_ladders_are_named():
    lines = next_steps(Choice(30, 1e-2, 0.002), Choice())
    assert any("lr 0.01" in line and "above" in line for line in lines)
    assert any("density 0.002" in line and "below" in line for line in lines)
    assert any("calibration-rounds" in line for line in next_steps(Choice(), Choice()))


@pytest.fixture(scope="module")
def task():
    config = RunConfig.from_values({"clients": 2, "batch_size": 4})
    whole = calibration_task(config)
    return replace(whole, clients=[(x[:20], y[:20]) for x, y in whole.clients])


def test_the_held_out_samples_are_not_trained_on():
    whole = calibration_task(RunConfig.from_values({"clients": 3}))
    trained = {x.numpy().tobytes() for part, _ in whole.clients for x in part}
    held = [x.numpy().tobytes() for x in whole.test[0]]
    assert len(held) == 287
    assert sum(len(x) for x, _ in whole.clients) == 1151
    assert sum(x in trained for x in held) == 0


def test_advice_on_a_real_task_is_whole_and_repeatable(task, monkeypatch):
    monkeypatch.setattr(calibration, "MAX_ROUNDS", 4)
    said, seen = [], []
    advice = advise(task, rounds=2, budget_mibit=5.0, say=said.append, watch=seen.append)
    assert advice.choice.density in LADDERS["density"]
    assert advice.rounds == int(5 / advice.choice.mibit(27_430))
    assert 0 < advice.target < 1
    assert len(advice.reasons) >= 3
    assert any(line.startswith("density: 0.01 (") for line in advice.reasons)
    assert said
    assert len(seen) >= sum(tried.rounds for tried in advice.tried)
    assert advice.json()["choice"] == vars(advice.choice)
    assert advise(task, rounds=2, budget_mibit=5.0).choice == advice.choice


def test_a_run_is_taken_up_where_it_stopped(task):
    whole, halves = Calibration(task, print, print), Calibration(task, print, print)
    choice = Choice(local_steps=2)
    whole.run(choice, lambda c: len(c) >= 4)
    halves.run(choice, lambda c: len(c) >= 2)
    halves.run(choice, lambda c: len(c) >= 4)
    assert halves.curves == whole.curves


def test_a_start_that_diverges_says_so(task):
    x, y = task.clients[0]
    broken = replace(task, clients=[(x * math.nan, y)])
    with pytest.raises(Diverged, match="defaults"):
        advise(broken)


@pytest.mark.parametrize(("name", "value"), [("target", 1.5), ("target", 0.0), ("rounds", 0)])
def test_bad_settings_are_refused(task, name, value):
    with pytest.raises(ValueError, match=r"target|calibration-rounds"):
        advise(task, **{name: value})


@pytest.mark.parametrize("accuracies", [[0.5] * 10, [0.5 + 1e-9 * n for n in range(10)]])
def test_a_curve_that_stands_still_foretells_nothing(accuracies):
    curve = [Point(0.04 * n, 1.0, x) for n, x in enumerate(accuracies, 1)]
    assert mibit_to(curve, 0.95) is None


def test_what_nobody_will_send_is_no_forecast():
    assert Forecast(0.0, 1e-6).mibit(0.5) == math.inf
    curve = [Point(2.0**n, 1.0, 1 - 0.5 * 2.0 ** (-0.01 * n)) for n in range(10)]
    assert mibit_to(curve, 0.99) is None


def test_a_task_without_accuracies_is_refused():
    task = calibration_task(RunConfig.from_values({"clients": 2}))
    with pytest.raises(ValueError, match="a test set with class labels"):
        advise(replace(task, test=None))
