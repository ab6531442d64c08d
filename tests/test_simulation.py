"""The Python interface: rounds, own metrics, early stopping and results."""

import json
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fedsift
from fedsift import algorithms
from fedsift.cli import main

DRAW = torch.Generator().manual_seed(0)
X = torch.randn(90, 4, generator=DRAW)
Y = (X[:, 0] + X[:, 1] > 0).long()
CLIENTS = [(X[n::3][:25], Y[n::3][:25]) for n in range(3)]
TEST = (X[60:], Y[60:])
METHOD = algorithms.efficient_adam(lr=0.05)
"""It has memories of clients and of the server."""


def make_model(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Linear(4, 2)


def simulate(rounds=6, **given):
    settings = {"test": TEST, "algorithm": METHOD, "batch_size": 8, "participation": 0.7, **given}
    return fedsift.simulate(make_model(), CLIENTS, rounds=rounds, **settings)


def without_seconds(history):
    return [{k: v for k, v in record.items() if k != "seconds"} for record in history]


def assert_same(ours, theirs):
    """Every bit of the snapshots and all records are equal."""
    for name, x in theirs.state.items():
        assert torch.equal(ours.state[name], x), name
    one, other = ours.snapshot, theirs.snapshot
    assert (one.round, one.traffic, one.norms) == (other.round, other.traffic, other.norms)
    assert one.server_memory.keys() == other.server_memory.keys()
    assert all(torch.equal(one.server_memory[k], x) for k, x in other.server_memory.items())
    assert set(one.client_memory) == set(other.client_memory)
    for n in other.client_memory:
        for name, x in other.client_memory[n].items():
            assert torch.equal(one.client_memory[n][name], x), (n, name)
    assert without_seconds(ours.history) == without_seconds(theirs.history)


@pytest.fixture(scope="module")
def whole():
    return simulate()


def share_correct(output, y):
    return (output.argmax(1) == y).float().mean()


def test_the_initial_model_is_round_0(whole):
    first = whole.history[0]
    output = make_model()(TEST[0]).detach()
    assert first["round"] == first["clients"] == first["uplink_bytes"] == first["seconds"] == 0
    assert first["accuracy"] == pytest.approx(float(share_correct(output, TEST[1])))
    assert first["loss"] == pytest.approx(float(F.cross_entropy(output, TEST[1])))
    assert [record["round"] for record in whole.history] == list(range(7))


def test_metrics_functions_and_clients_are_columns_that_change_no_bit(whole):
    result = simulate(
        metrics={"share": share_correct, "size": lambda output, y: len(y)},
        evaluate=lambda model: {"norm": model.weight.detach().norm(), "nothing": float("nan")},
        client_tests=CLIENTS,
    )
    for record in result.history:
        assert record["share"] == pytest.approx(record["accuracy"])
        assert record["size"] == len(TEST[1])
        each = record["client_accuracy"]
        assert len(each) == 3
        assert record["client_accuracy_worst"] == min(each)
        assert record["client_accuracy_mean"] == pytest.approx(sum(each) / 3)
        assert record["client_accuracy_worst"] <= record["client_accuracy_p10"] <= max(each)
        assert record["client_accuracy_std"] >= 0
        assert record["nothing"] is None
    model = make_model()
    result.load_into(model)
    last = result.history[-1]
    assert last["norm"] == pytest.approx(float(model.weight.detach().norm()))
    x, y = CLIENTS[1]
    assert last["client_accuracy"][1] == pytest.approx(float(share_correct(model(x), y)))
    own = ("share", "size", "norm", "nothing")
    result.history[:] = [
        {k: v for k, v in r.items() if k not in own and "client_accuracy" not in k}
        for r in result.history
    ]
    assert_same(result, whole)


def test_metrics_are_weighted_by_samples():
    x = torch.randn(1500, 4, generator=DRAW)
    sizes = []

    def metric(output, y):
        sizes.append(len(y))
        return float(len(y))

    result = simulate(1, test=(x, (x[:, 0] > 0).long()), metrics={"m": metric})
    assert sizes[:2] == [1000, 500]
    assert result.history[0]["m"] == pytest.approx((1000 * 1000 + 500 * 500) / 1500)


def test_evaluate_every_skips_rounds_but_not_the_first_and_the_last(whole):
    result = simulate(evaluate_every=4, metrics={"share": share_correct})
    tested = [r["round"] for r in result.history if r["accuracy"] is not None]
    assert tested == [r["round"] for r in result.history if "share" in r] == [0, 4, 6]
    assert torch.equal(result.weights, whole.weights)


def test_evaluate_may_replace_the_test_set():
    result = simulate(2, test=None, evaluate=lambda model: {"accuracy": 0.5})
    assert [record["accuracy"] for record in result.history] == [0.5] * 3
    assert result.accuracy == 0.5


def test_on_round_gets_the_model_and_may_stop(whole):
    seen = []

    def stop(record, model):
        with torch.no_grad():
            assert record["accuracy"] == pytest.approx(
                float(share_correct(model(TEST[0]), TEST[1]))
            )
        seen.append(record["round"])
        return record["round"] == 3

    result = simulate(on_round=stop)
    assert seen == [1, 2, 3]
    assert result.snapshot.round == 3
    assert without_seconds(result.history) == without_seconds(whole.history[:4])


def test_on_round_may_take_only_the_record():
    seen = []
    result = simulate(2, on_round=seen.append)
    assert seen == result.history[1:]


def test_rounds_can_be_left_and_continued(whole):
    run = fedsift.rounds(
        make_model(), CLIENTS, TEST, METHOD, rounds=6, batch_size=8, participation=0.7
    )
    for record, model, snapshot in run:
        assert record["round"] == snapshot.round
        assert torch.equal(model.weight.flatten(), snapshot.state.w[:8])
        if snapshot.round == 2:
            break
    assert run.result.snapshot.round == 2
    assert [record["round"] for record, _, _ in run] == [3, 4, 5, 6]
    assert_same(run.result, whole)


def test_the_result_has_a_short_text_and_a_report(whole, tmp_path):
    assert re.fullmatch(
        r"Result\(rounds=6, accuracy=0\.\d{4}, uplink_bytes=\d+ per client, parameters=10\)",
        repr(whole),
    )
    whole.report(tmp_path / "new" / "report.html")
    page = (tmp_path / "new" / "report.html").read_text()
    assert "efficient-adam on own data" in page
    found = re.search(r'<script[^>]*id="data"[^>]*>(.*?)</script>', page, re.DOTALL)
    (group,) = json.loads(found[1])["comparisons"]["comparison0"]["groups"]
    assert group["runs"][0]["rounds"] == list(range(7))


BAD = {
    "metrics without a test set": ({"metrics": {"f": len}, "test": None}, "pass test=(x, y)"),
    "a metric with the name of a column": ({"metrics": {"loss": share_correct}}, "'loss'"),
    "a metric that is no function": ({"metrics": {"f": 1}}, "must be a function"),
    "metrics without names": ({"metrics": [share_correct]}, "must be a dict"),
    "a metric that fails": ({"metrics": {"f": lambda output, y: 1 / 0}}, "'f' fails: division"),
    "evaluate that gives no dict": ({"evaluate": lambda model: 1}, "must return a dict"),
    "evaluate that gives no number": ({"evaluate": lambda model: {"a": "b"}}, "'a' is not one"),
    "evaluate_every": ({"evaluate_every": 0}, "evaluate_every must be a whole number"),
    "too few client tests": ({"client_tests": CLIENTS[:2]}, "each of the 3 clients, got 2"),
    "client tests of another shape": (
        {"client_tests": [(X[:, :3], Y)] * 3},
        "the model fails on the test data of client 0",
    ),
    "client tests without classes": (
        {"loss": lambda output, y: output.sum(), "client_tests": [(X, X[:, 0])] * 3},
        "measures accuracy",
    ),
    "on_round with three arguments": ({"on_round": lambda a, b, c: None}, "(record, model)"),
}


@pytest.mark.parametrize(("given", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_one_line(given, message):
    with pytest.raises(ValueError, match=re.escape(message)) as problem:
        simulate(2, **given)
    assert "\n" not in str(problem.value)


@pytest.mark.parametrize("large", [False, True])
def test_half_of_a_run_and_the_other_half_are_the_whole(whole, large, monkeypatch):
    if large:  # memories in a file
        monkeypatch.setattr("fedsift.federation.memories.MAX_RAM", 0)
    half = simulate(3)
    for start in (half, half.snapshot):
        again = simulate(6, start=start)
        if start is half.snapshot:
            again.history[:0] = half.history
        assert_same(again, whole)


def test_a_schedule_follows_the_total_number_of_rounds():
    method = algorithms.fedadam(lr=fedsift.schedules.cosine(0.05), local_steps=2)
    expected = simulate(algorithm=method)
    half = simulate(algorithm=method, on_round=lambda record, model: record["round"] == 3)
    assert_same(simulate(algorithm=method, start=half), expected)


def test_a_result_can_be_saved_and_loaded(whole, tmp_path):
    half = simulate(3)
    half.save(tmp_path / "half")
    loaded = fedsift.Result.load(tmp_path / "half")
    assert_same(loaded, half)
    assert torch.equal(loaded.weights, half.weights)
    assert (loaded.layout, loaded.settings) == (half.layout, half.settings)
    assert_same(simulate(start=loaded), whole)
    assert main(["report", str(tmp_path / "half"), "-o", str(tmp_path / "r.html")]) == 0
    with pytest.raises(ValueError, match="already holds a run: save the result in another folder"):
        half.save(tmp_path / "half")


BAD_STARTS = {
    "too few rounds": ({}, {"rounds": 2}, "pass at least rounds=3"),
    "another method": ({"algorithm": algorithms.fedsgd()}, {}, "start has the vectors w, but"),
    "another memory": ({"algorithm": algorithms.fedadam()}, {}, "server/residual"),
    "no result": (None, {}, "start must be a Result or a Snapshot"),
}


@pytest.mark.parametrize(("before", "given", "message"), BAD_STARTS.values(), ids=BAD_STARTS)
def test_a_start_that_does_not_fit_is_refused(before, given, message):
    start = "runs/mine" if before is None else simulate(2, **before)
    with pytest.raises(ValueError, match=re.escape(message)) as problem:
        simulate(**{"rounds": 3, **given}, start=start)
    assert "\n" not in str(problem.value)


def test_a_start_of_another_model_is_refused():
    other = fedsift.simulate(nn.Linear(4, 3), CLIENTS, algorithm=METHOD, rounds=1)
    with pytest.raises(ValueError, match="start has another model"):
        simulate(start=other)


def lines_of(capsys):
    return capsys.readouterr().err.splitlines()


def test_progress_is_one_line_per_round_unless_it_is_off(capsys):
    simulate(3)
    lines = lines_of(capsys)
    assert [line.partition(" · ")[0] for line in lines] == [
        f"efficient-adam round {n}/3" for n in (1, 2, 3)
    ]
    simulate(3, progress=False)
    list(fedsift.rounds(make_model(), CLIENTS, rounds=2))
    assert lines_of(capsys) == []
