import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from fedsift.advise import calibration
from fedsift.advise.calibration import (
    CalibrationRuns,
    advise,
    calibrate,
    calibration_task,
    initial_settings,
)
from fedsift.advise.coordinate_search import CoordinateSearch
from fedsift.advise.forecast import Forecast, Point, interpolated_mibit, predicted_mibit
from fedsift.advise.hyperparameters import CANDIDATES, Hyperparameters
from fedsift.advise.recommendation import (
    MAX_EXTRAPOLATION,
    MIN_GAIN,
    TARGET_MARGIN,
    next_steps,
    recommended_rounds,
)
from fedsift.errors import Diverged
from fedsift.runs.config import RunConfig
from fedsift.vector import Layout


def made_up(speed):
    """Runs whose error is 1/(1 + speed · Mibit); a round at density 0.05 is 1 Mibit."""

    def train(settings, stop):
        curve = []
        while not (curve and stop(curve)):
            mibit = (len(curve) + 1) * settings.density / 0.05
            curve.append(Point(mibit, 1.0, 1 - 1 / (1 + speed(settings) * mibit)))
        return curve

    return train


def test_the_search_finds_the_best_of_settings_that_do_not_interact():
    best = Hyperparameters(90, 3e-3, 0.01)

    def speed(c):
        off = abs(math.log(c.lr / best.lr)) + abs(math.log(c.density / best.density))
        return 1 / (1 + off + abs(math.log(c.local_steps / best.local_steps)))

    search = CoordinateSearch(made_up(speed), accuracy=0.7, max_rounds=10**4)
    assert search.run(Hyperparameters()) == best
    assert len(search.measured) < math.prod(len(values) for values in CANDIDATES.values()) / 2


def test_the_search_keeps_the_initial_settings_if_nothing_is_better():
    speed = {Hyperparameters(): 1.0}
    search = CoordinateSearch(made_up(lambda c: speed.get(c, 0.5)), 0.8, max_rounds=10**4)
    assert search.run(Hyperparameters()) == Hyperparameters()


def test_the_search_does_not_train_settings_beyond_the_budget():
    train = made_up(lambda c: c.lr)
    search = CoordinateSearch(train, 0.001, 10**4, is_allowed=lambda c: c.lr <= 3e-3)
    best = search.run(Hyperparameters())
    assert best.lr == 3e-3
    assert all(settings.lr <= 3e-3 for settings in search.measured)


def test_a_run_that_cannot_win_is_stopped():
    search = CoordinateSearch(made_up(lambda c: 1e-6), accuracy=0.9, max_rounds=10**6)
    assert search.measure(Hyperparameters(), limit=7.0) == math.inf
    assert search.measured[Hyperparameters()].rounds == 8
    assert search.measured[Hyperparameters()].mibit_or_none is None


def test_an_accuracy_counts_as_reached_even_if_it_falls_again():
    curve = [Point(1, 2.0, 0.1), Point(2, 1.0, 0.5), Point(3, 1.5, 0.4)]
    assert interpolated_mibit(curve, 0.42) == pytest.approx(1.8)
    assert interpolated_mibit([Point(1, 0.5, 0.9)], 0.8) == 1


def test_a_forecast_follows_a_power_law_and_refuses_a_rising_error():
    curve = [Point(x, 1.0, 1 - 0.3 * x**-0.7) for x in (0.5, 1, 2, 3, 4)]
    found = Forecast.fit(curve)
    assert found.accuracy(10) == pytest.approx(1 - 0.3 * 10**-0.7)
    assert found.mibit(found.accuracy(10)) == pytest.approx(10)
    assert predicted_mibit(curve, 0.95) == pytest.approx((0.3 / 0.05) ** (1 / 0.7))
    assert Forecast.fit([Point(1, 1, 0.5), Point(2, 1, 0.4), Point(3, 1, 0.3)]) is None
    assert Forecast.fit([Point(1, 1, 0.5)]) is None
    assert predicted_mibit([Point(1, 1, 0.5)], 0.9) is None


@pytest.mark.parametrize("power", [0.3, 0.7, 1.5])
def test_a_forecast_is_flat_where_doubling_adds_less_than_the_gain(power):
    forecast = Forecast(math.log(0.4), power)
    x = forecast.mibit_until_flat(0.01)
    assert forecast.accuracy(2 * x) - forecast.accuracy(x) == pytest.approx(0.01)


def curve_of(errors):
    return [Point(0.1 * n, 1.0, 1 - error) for n, error in enumerate(errors, 1)]


SLOW = curve_of(0.5 * n**-0.2 for n in range(1, 11))
FAST = curve_of(0.5 * n**-1.0 for n in range(1, 11))
FLAT = curve_of([0.3] * 10)


def test_the_rounds_for_a_measured_target_have_a_margin():
    rounds, why = recommended_rounds(FAST, 0.9, 0.1, budget=200.0)
    assert rounds == TARGET_MARGIN * 5
    assert why == f"rounds 10: {TARGET_MARGIN} times the 5 that reach 90.0 %, as measured"


def test_the_rounds_for_a_forecast_target_have_a_margin():
    rounds, why = recommended_rounds(FAST, 0.975, 0.1, budget=200.0)
    assert rounds == TARGET_MARGIN * 20
    assert why.endswith("the 20 that reach 97.5 %, by the forecast")


def test_without_a_target_the_rounds_end_where_doubling_them_adds_too_little():
    rounds, why = recommended_rounds(FAST, None, 0.1, budget=200.0)
    assert rounds == 25  # from an error of 2 % to one of 1 %
    assert f"less than {100 * MIN_GAIN:g} percentage point" in why


@pytest.mark.parametrize("target", [None, 0.9, 0.999])
def test_a_large_budget_recommends_no_more_than_the_forecast_is_trusted(target):
    rounds, why = recommended_rounds(SLOW, target, 0.1, budget=1e6)
    assert rounds == MAX_EXTRAPOLATION * len(SLOW)
    assert "50: 5 times the 10 measured; the forecast is not trusted beyond" in why


@pytest.mark.parametrize("target", [None, 0.9])
def test_a_curve_that_does_not_rise_justifies_no_further_rounds(target):
    assert recommended_rounds(FLAT, target, 0.1, budget=1e6)[0] == len(FLAT)


@pytest.mark.parametrize("curve", [SLOW, FAST, FLAT])
@pytest.mark.parametrize("target", [None, 0.9])
def test_the_rounds_fit_into_a_small_budget(curve, target):
    rounds, why = recommended_rounds(curve, target, 0.1, budget=0.35)
    assert rounds == 3
    assert why == "rounds 3: all that the budget allows"


@pytest.mark.parametrize("budget", [0.0, -1.0, math.nan, math.inf, 1e-6])
def test_a_meaningless_budget_is_refused(budget):
    with pytest.raises(ValueError, match="budget-mbit"):
        initial_settings(Layout.of(nn.Linear(27_429, 1)), budget)


def test_the_next_steps_name_settings_at_the_end_of_their_range():
    lines = next_steps(Hyperparameters(30, 1e-2, 0.002), Hyperparameters())
    assert "lr 0.01 is the largest value tried; try larger ones" in lines
    assert "density 0.002 is the smallest value tried; try smaller ones" in lines
    lines = next_steps(Hyperparameters(), Hyperparameters())
    assert any("calibration-rounds" in line for line in lines)


@pytest.fixture(scope="module")
def digits():
    return calibration_task(RunConfig.from_values({"clients": 3}))


@pytest.fixture(scope="module")
def task(digits):
    """Two clients with 20 digits each, a linear model and batches of 4: a round takes 20 ms."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    clients = [(x[:20], y[:20]) for x, y in digits.clients[:2]]
    return replace(digits, model=model, layout=Layout.of(model), clients=clients, batch_size=4)


def test_the_held_out_samples_are_not_trained_on(digits):
    trained = {x.numpy().tobytes() for part, _ in digits.clients for x in part}
    held = [x.numpy().tobytes() for x in digits.test[0]]
    assert len(held) == 287
    assert sum(len(x) for x, _ in digits.clients) == 1151
    assert sum(x in trained for x in held) == 0


def test_advice_on_a_real_task_is_complete_and_repeatable(task, monkeypatch):
    monkeypatch.setattr(calibration, "MAX_ROUNDS", 4)
    settings_lines, round_lines = [], []
    callbacks = {"on_settings": settings_lines.append, "on_round": round_lines.append}
    advice = calibrate(task, rounds=2, budget_mibit=5.0, **callbacks)
    assert advice.choice.density in CANDIDATES["density"]
    assert 0 < advice.target < 1
    assert len(advice.reasons) >= 3
    assert any(line.startswith("density: 0.01 (") for line in advice.reasons)
    assert advice.reasons[-1].startswith(f"rounds {advice.rounds}: ")
    assert settings_lines
    assert len(round_lines) >= sum(tried.rounds for tried in advice.tried)
    assert advice.json()["choice"] == vars(advice.choice)
    assert calibrate(task, rounds=2, budget_mibit=5.0).choice == advice.choice


@pytest.mark.parametrize("target", [None, 0.5, 0.99])
def test_advice_never_recommends_rounds_that_only_the_budget_justifies(task, target, monkeypatch):
    monkeypatch.setattr(calibration, "MAX_ROUNDS", 3)
    advice = calibrate(task, rounds=2, budget_mibit=50.0, target=target)
    assert 50 / advice.choice.mibit(task.layout) > 1000
    assert advice.rounds <= MAX_EXTRAPOLATION * 3


def test_a_run_continues_where_it_stopped(task):
    whole, halves = (CalibrationRuns(task, print, print) for _ in range(2))
    settings = Hyperparameters(local_steps=2)
    whole.train(settings, lambda c: len(c) >= 4)
    halves.train(settings, lambda c: len(c) >= 2)
    halves.train(settings, lambda c: len(c) >= 4)
    assert halves.curves == whole.curves


def test_running_statistics_are_trained_and_counted(task, monkeypatch):
    monkeypatch.setattr(calibration, "MAX_ROUNDS", 2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.BatchNorm1d(10))
    model[2].running_mean += 100  # nobody learns with these statistics
    given = replace(task, model=model, layout=Layout.of(model))
    advice = calibrate(given, rounds=2, budget_mibit=5.0)
    curves = {x.settings.algorithm: x for x in advice.tried}
    assert set(curves) == {"fedadam-ssm", "sift"}
    assert advice.target > 0.2
    assert model[2].running_mean.min() > 99
    buffers = given.layout.with_buffers(model, ["2.running_mean", "2.running_var"])
    more = Hyperparameters().mibit(buffers) - Hyperparameters().mibit(given.layout)
    assert more == pytest.approx(20 * 32 / 2**20)


class Pairs(Dataset):
    """The same samples, one at a time."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, row):
        return self.x[row], self.y[row]


def test_own_models_and_data_are_taken_in_every_format(monkeypatch):
    monkeypatch.setattr(calibration, "MAX_ROUNDS", 2)
    draw = np.random.default_rng(0)
    clients = [(x := draw.normal(size=(30, 4)), (x[:, 0] > 0).astype(np.int32)) for _ in range(2)]
    given = {"batch_size": 8, "rounds": 2, "budget_mibit": 5.0, "seed": 1}
    made = nn.Linear(4, 2).double()
    before = made.weight.clone()
    of_arrays = advise(made, clients, **given)
    assert torch.equal(made.weight, before)
    of_items = advise(made, [Pairs(x, y) for x, y in clients], **given)
    of_dicts = advise(made, [({"input": x}, y) for x, y in clients], **given)
    assert of_arrays == of_items == of_dicts
    assert of_arrays.choice.method.settings["lr"] == of_arrays.choice.lr
    with pytest.raises(ValueError, match="clients is empty"):
        advise(made, [])


def test_defaults_that_diverge_are_reported(task):
    x, y = task.clients[0]
    broken = replace(task, clients=[(x * math.nan, y)])
    with pytest.raises(Diverged, match="defaults"):
        calibrate(broken)


@pytest.mark.parametrize(("name", "value"), [("target", 1.5), ("target", 0.0), ("rounds", 0)])
def test_bad_settings_are_refused(task, name, value):
    with pytest.raises(ValueError, match=r"target|calibration-rounds"):
        calibrate(task, **{name: value})


@pytest.mark.parametrize("accuracies", [[0.5] * 10, [0.5 + 1e-9 * n for n in range(10)]])
def test_a_flat_curve_gives_no_forecast(accuracies):
    curve = [Point(0.04 * n, 1.0, x) for n, x in enumerate(accuracies, 1)]
    assert predicted_mibit(curve, 0.95) is None


def test_an_accuracy_out_of_reach_gives_no_forecast():
    assert Forecast(0.0, 1e-6).mibit(0.5) == math.inf
    curve = [Point(2.0**n, 1.0, 1 - 0.5 * 2.0 ** (-0.01 * n)) for n in range(10)]
    assert predicted_mibit(curve, 0.99) is None


def test_a_forecast_far_beyond_what_was_measured_is_none():
    curve = [Point(float(n), 1.0, 1 - 0.5 * n**-0.5) for n in range(1, 10)]
    assert predicted_mibit(curve, 0.95) == pytest.approx(100)
    assert predicted_mibit(curve, 0.99) is None  # 2500 Mibit, after 9


def test_a_task_without_accuracies_is_refused(task):
    with pytest.raises(ValueError, match="a test set with class labels"):
        calibrate(replace(task, test=None))
