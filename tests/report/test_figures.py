"""What the figures draw: references, markers, own metrics, accuracy on each client."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import fedsift
from fedsift.algorithms import fedadam_ssm
from fedsift.cli import main
from fedsift.report.charts import MOST_MARKERS
from fedsift.report.clients import by_client
from fedsift.report.collect import read_run
from fedsift.report.comparisons import arrange
from fedsift.report.curves import DENSE, by_rounds, by_traffic
from fedsift.report.sections import sections_of
from fedsift.report.styles import MARKERS
from fedsift.report.tables import comparison_table, fairness_table, tiles
from fedsift.report.upload_charts import PARTS, PATTERNS
from small_runs import METHODS, ROUNDS, SEEDS, data_in, trained


@pytest.fixture(scope="module")
def comparison(runs):
    (found,) = arrange([read_run(runs / f"{m}-{seed}") for m in METHODS for seed in SEEDS])
    return found


def view_of(block, name="", quantity=""):
    """One view's charts."""
    (view,) = [v for v in block.views if (v.name, v.quantity) == (name, quantity)]
    return view.charts


def traces_named(chart, name):
    return [trace for trace in chart["data"] if trace.get("name") == name]


# Lines.


@pytest.mark.parametrize("unit", ["MB up", "Mibit"])
def test_dense_fedadam_is_a_line_at_twelve_bytes_per_parameter_and_round(comparison, unit):
    (chart,) = view_of(by_traffic(comparison), unit, "test accuracy")
    (line,) = traces_named(chart, DENSE)
    sent = 12 * 27_430 * ROUNDS
    assert line["x"] == pytest.approx(2 * [sent / 1e6 if unit == "MB up" else 8 * sent / 2**20])
    low, high = chart["layout"]["xaxis"]["range"]
    assert low < math.log10(line["x"][0]) < high


def test_the_traffic_of_dense_fedadam_grows_with_the_rounds(comparison):
    (chart,) = view_of(by_rounds(comparison), quantity="MB up")
    (line,) = traces_named(chart, DENSE)
    assert line["y"] == pytest.approx([12e-6 * 27_430 * n for n in range(1, ROUNDS + 1)])


def test_a_logarithmic_axis_leaves_out_the_initial_model_which_has_sent_nothing(comparison):
    (chart,) = view_of(by_traffic(comparison), "MB up", "test accuracy")
    assert chart["layout"]["xaxis"]["type"] == "log"
    assert all(x is None or x > 0 for trace in chart["data"] for x in trace["x"])


def test_each_line_has_a_marker_of_its_own_for_black_and_white(comparison):
    groups = comparison.groups
    assert len({group.marker for group in groups}) == len(groups) == len(METHODS)
    assert {group.marker for group in groups} <= set(MARKERS)
    (chart,) = view_of(by_rounds(comparison), quantity="test accuracy")
    for group in groups:
        (line,) = traces_named(chart, group.name)
        assert line["marker"]["symbol"] == group.marker
        assert line["marker"]["maxdisplayed"] == MOST_MARKERS
        assert line["cliponaxis"] is False


def test_the_parts_of_a_bar_differ_in_pattern():
    patterns = [PATTERNS.get(part, "") for part in PARTS if part != "header"]
    assert len(set(patterns)) == len(patterns)


# Accuracy on each client.


def test_the_clients_are_drawn_from_worst_to_best(comparison):
    (chart,) = view_of(by_client(comparison), "each client")
    for group in comparison.groups:
        last = [sorted(run.history[-1]["client_accuracy"]) for run in group.runs]
        columns = zip(*last, strict=True)
        (line,) = traces_named(chart, group.name)
        assert line["y"] == pytest.approx([sum(each) / len(SEEDS) for each in columns])
        assert line["x"] == pytest.approx([0, 100 / 3, 200 / 3, 100])


def test_a_single_run_has_a_bar_per_client(runs):
    run = read_run(runs / "fedadam-0")
    (comparison,) = arrange([run])
    (chart,) = view_of(by_client(comparison), "each client")
    bars, mean, percentile = chart["data"]
    last = run.history[-1]
    order = [int(name) for name in bars["x"]]
    assert sorted(order) == [0, 1, 2, 3]
    assert bars["y"] == [last["client_accuracy"][n] for n in order] == sorted(bars["y"])
    assert set(mean["y"]) == {last["client_accuracy_mean"]}
    assert set(percentile["y"]) == {last["client_accuracy_p10"]}


def test_the_fairness_table_has_the_summaries_of_the_last_round(runs):
    run = read_run(runs / "fedadam-0")
    table = fairness_table(arrange([run])[0])
    columns = ("worst", "p10", "mean", "std")
    assert [column.name.split(",")[0] for column in table.columns] == [
        "worst client", "10th percentile", "mean", "deviation",
    ]  # fmt: skip
    expected = [f"{100 * run.history[-1][f'client_accuracy_{name}']:.2f}" for name in columns]
    assert [cell.text for cell in table.rows[0].cells] == expected


def test_without_tests_of_clients_there_is_neither_figure_nor_table(runs):
    run = read_run(runs / "fedadam-0")
    own = [{k: v for k, v in r.items() if "client_accuracy" not in k} for r in run.history]
    (comparison,) = arrange([replace(run, history=own)])
    assert not by_client(comparison).views
    assert fairness_table(comparison) is None


# Runs from Python.

DRAW = torch.Generator().manual_seed(0)
X = torch.randn(60, 4, generator=DRAW)


@pytest.fixture(scope="module")
def regression(tmp_path_factory):
    """A regression with a metric, every other round evaluated, that was stopped early."""
    y = X.sum(1, keepdim=True)
    torch.manual_seed(0)
    fedsift.simulate(
        nn.Linear(4, 1), [(X[:30], y[:30]), (X[30:], y[30:])], (X, y),
        fedadam_ssm(density=0.5, local_steps=3, lr=0.01), rounds=9, loss=nn.functional.mse_loss,
        metrics={"mean error": lambda output, y: (output - y).abs().mean()}, evaluate_every=2,
        on_round=lambda record, model: record["round"] == 6,
        out=(folder := tmp_path_factory.mktemp("python") / "regression"), progress=False,
    )  # fmt: skip
    return folder


def test_a_regression_shows_its_loss_and_metrics_in_place_of_accuracy(regression):
    run = read_run(regression)
    (comparison,) = arrange([run])
    quantities = list(dict.fromkeys(view.quantity for view in by_traffic(comparison).views))
    assert quantities == ["test loss", "mean error"]
    assert by_traffic(comparison).title == "Progress against traffic"
    (chart,) = view_of(by_rounds(comparison), quantity="mean error")
    assert traces_named(chart, "fedadam-ssm")[0]["y"] == [r.get("mean error") for r in run.history]
    shown = {name: value for value, name in tiles(comparison)}
    assert shown["final mean error"] == f"{run.history[-1]['mean error']:.2f}"
    assert "final test loss" in shown
    assert shown["kB sent per client"] == f"{run.summary['uplink_bytes'] / 1e3:.2f}"
    assert not any("accuracy" in name for name in shown)


def test_a_run_that_was_stopped_early_says_after_how_many_rounds(regression):
    (section,) = sections_of([read_run(regression)])
    assert section.about.endswith("2 clients · 6 of 9 rounds")
    assert section.target is None
    assert not section.results.columns


def test_several_runs_without_accuracy_have_a_table_of_results(regression):
    run = read_run(regression)
    other = replace(run, summary={**run.summary, "density": 0.1})
    (comparison,) = arrange([run, other])
    names = [column.name for column in comparison_table(comparison, None).columns]
    assert names[:3] == ["final test loss", "final mean error", "total MB up"]


def test_own_data_of_other_content_is_another_comparison(regression):
    run = read_run(regression)
    assert run.setting("dataset").startswith("own data ")
    other = replace(run, summary={**run.summary, "dataset": "own data 12345678"})
    assert len(arrange([run, other])) == 2


def test_own_data_is_named_by_the_folder_of_its_runs(regression):
    run = read_run(regression)
    runs = [
        replace(run, summary={**run.summary, "dataset": f"own data {part}"}, folder=folder)
        for part, folder in (("1", "runs/iid/a"), ("1", "runs/iid/b"), ("2", "runs/skewed/a"))
    ]
    names = [section.name for section in sections_of(runs)]
    assert names == ["own data 1, Linear, in iid", "own data 2, Linear, in skewed/a"]
    (alone,) = sections_of(runs[:1])
    assert alone.name == "own data 1, Linear"


def test_values_of_theta_are_compared_separately(tmp_path, runs):
    run = read_run(runs / "fedadam-0")
    skewed = [
        replace(run, summary={**run.summary, "partition": "dirichlet", "theta": theta})
        for theta in (0.1, 1.0)
    ]
    partitions = [section.name.rpartition(", ")[2] for section in sections_of([run, *skewed])]
    assert partitions == [
        "partition iid", "partition dirichlet (θ = 0.1)", "partition dirichlet (θ = 1)",
    ]  # fmt: skip


# In a browser.


def test_a_metric_of_ones_own_can_be_chosen_as_y(regression, browser, tmp_path):
    assert main(["report", str(regression), "-o", str(tmp_path / "r.html")]) == 0
    assert len(data_in(tmp_path / "r.html")["blocks"]["comparison0-0"]) == 8
    browser.open(tmp_path / "r.html")
    block = "document.querySelector('[data-block]')"
    titles = f"['.ytitle', '.xtitle'].map(name => {block}.querySelector(name).textContent)"
    browser.value(f"{block}.querySelectorAll('.views button')[3].click()")
    assert browser.value(titles) == ["test loss", "time, s"]
    choose = f"{block}.querySelector('select')"
    browser.value(f"{choose}.value = 1")
    browser.value(f"{choose}.dispatchEvent(new Event('change', {{bubbles: true}}))")
    assert browser.value(titles) == ["mean error", "time, s"]
    assert browser.complaints() == []


def test_sections_of_different_partitions_are_labelled_and_linked(runs, browser, tmp_path):
    other = trained(tmp_path / "skewed", algorithm="fedadam", local_steps=1, partition="dirichlet")
    path = tmp_path / "r.html"
    assert main(["report", str(runs / "fedadam-0"), str(other), "-o", str(path)]) == 0
    browser.open(path)
    links = browser.value("[...document.querySelectorAll('header a')].map(a => a.hash)")
    assert links == ["#comparison0", "#comparison1"]
    names = browser.value("[...document.querySelectorAll('.section-name')].map(h => h.textContent)")
    assert [name.rpartition(", ")[2] for name in names] == [
        "partition iid", "partition dirichlet (θ = 0.1)",
    ]  # fmt: skip
    assert browser.complaints() == []
