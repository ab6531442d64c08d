"""The report: what it reads, how it summarizes, and that a real browser draws it."""

import json
import random
import shutil
import statistics
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from fedsift.cli import main
from fedsift.errors import ConfigError
from fedsift.report.charts import FigureBlock, View
from fedsift.report.collect import find_runs, read_run
from fedsift.report.comparisons import arrange, likely_target
from fedsift.report.groups import Spread
from fedsift.report.html import write_report
from fedsift.report.sections import FIGURES
from fedsift.runs.compare import reached
from small_runs import METHODS, ROUNDS, SEEDS, data_in, trained


def shown(runs, *names):
    return [read_run(runs / name) for name in names]


class Tables(HTMLParser):
    """The rows of a page's tables, as text."""

    def __init__(self, text):
        super().__init__()
        self.rows, self.cell = [], None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.cell = ""

    def handle_data(self, text):
        if self.cell is not None:
            self.cell += text

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self.rows[-1].append(" ".join(self.cell.split()))
            self.cell = None


# What it reads.


def test_seeds_of_one_method_are_one_group(runs):
    (comparison,) = arrange([read_run(path) for path in find_runs([runs])])
    assert {g.name: [r.setting("seed") for r in g.runs] for g in comparison.groups} == {
        name: list(SEEDS) for name in METHODS
    }


def test_copies_of_a_run_count_once(runs, tmp_path, monkeypatch, capsys):
    here, other = tmp_path / "fedadam-0", tmp_path / "half"
    for copy in (here, other):
        shutil.copytree(runs / "fedadam-0", copy)
    for name in ("summary.json", "checkpoint.safetensors"):
        (other / name).unlink()
    lines = (other / "metrics.jsonl").read_text().splitlines(keepends=True)
    (other / "metrics.jsonl").write_text("".join(lines[:2]))
    monkeypatch.chdir(tmp_path)
    words = ["half", "fedadam-0", str(here), str(runs / "fedadam-1")]
    assert main(["report", *words, "-o", "r.html"]) == 0
    said = capsys.readouterr().err
    assert "half is left out" in said
    assert "2 runs" in said
    (group,) = data_in(tmp_path / "r.html")["comparisons"]["comparison0"]["groups"]
    assert [len(run["accuracy"]) for run in group["runs"]] == [ROUNDS + 1, ROUNDS + 1]


def test_runs_on_different_devices_are_separate_groups(runs, tmp_path):
    shutil.copytree(runs / "fedadam-1", tmp_path / "cuda")
    summary = json.loads((tmp_path / "cuda" / "summary.json").read_text())
    (tmp_path / "cuda" / "summary.json").write_text(json.dumps(summary | {"device": "cuda"}))
    (comparison,) = arrange([*shown(runs, "fedadam-0"), read_run(tmp_path / "cuda")])
    assert [g.name for g in comparison.groups] == ["fedadam · device auto", "fedadam · device cuda"]


def test_variants_of_a_method_are_named_by_their_differing_settings(runs, tmp_path):
    denser = trained(tmp_path / "denser", algorithm="fedadam-ssm", density=0.2, local_steps=4)
    (comparison,) = arrange([*shown(runs, "fedadam-ssm-0", "fedadam-0"), read_run(denser)])
    assert [g.name for g in comparison.groups] == [
        "fedadam-ssm · density 0.05",
        "fedadam",
        "fedadam-ssm · density 0.2",
    ]
    looks = [(g.color, g.dash) for g in comparison.groups]
    assert looks[0][0] == looks[2][0] != looks[1][0]
    assert len(set(looks)) == 3


def test_a_method_has_the_same_color_in_every_report(runs):
    colors = [
        {g.name: g.color for g in arrange(shown(runs, *names))[0].groups}
        for names in (("fedadam-0", "fedadam-ssm-0"), ("fedadam-ssm-1", "fedadam-top-0"))
    ]
    assert colors[0]["fedadam-ssm"] == colors[1]["fedadam-ssm"]


def test_the_target_is_that_of_compare_or_one_that_is_reached(runs, page, tmp_path):
    words = ["--clients", "3", "--rounds", "1", "--local-steps", "2", "--out", str(tmp_path / "c")]
    assert main(["compare", "--algorithms", "fedsgd", "--target", "0.123", *words]) == 0
    assert main(["report", str(tmp_path / "c"), "-o", str(tmp_path / "r.html")]) == 0
    assert data_in(tmp_path / "r.html")["comparisons"]["comparison0"]["target"] == 0.123
    (comparison,) = arrange([read_run(path) for path in find_runs([runs])])
    best = max(run.summary["best_accuracy"] for run in comparison.runs)
    assert 0.9 * best < likely_target(comparison) <= 0.95 * best
    assert data_in(page)["comparisons"]["comparison0"]["target"] == likely_target(comparison)


def test_an_unfinished_run_is_shown_up_to_its_last_round(runs, tmp_path):
    half = tmp_path / "half"
    shutil.copytree(runs / "fedadam-ssm-0", half)
    for name in ("summary.json", "checkpoint.safetensors"):
        (half / name).unlink()
    lines = (half / "metrics.jsonl").read_text().splitlines(keepends=True)
    (half / "metrics.jsonl").write_text("".join(lines[:3]))
    run = read_run(half)
    assert run.summary["final_accuracy"] == json.loads(lines[2])["accuracy"]
    write_report([run, *shown(runs, "fedadam-ssm-1")], tmp_path / "report.html", "half")
    assert f"2 of {ROUNDS}" in (tmp_path / "report.html").read_text()


def test_the_report_says_which_fedadam_it_shows(runs, tmp_path):
    for name, is_said in (("fedadam-0", True), ("fedadam-ssm-0", False)):
        write_report(shown(runs, name), tmp_path / "report.html", name)
        said = "What Flower calls FedAdam is fedopt" in (tmp_path / "report.html").read_text()
        assert said == is_said


def test_figures_without_data_are_left_out(runs, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(runs / "fedadam-ssm-0", bare)
    for name in ("uploads.jsonl", "clients.json"):
        (bare / name).unlink()

    def titles(path):
        (comparison,) = arrange([read_run(path)])
        return [block.title for make in FIGURES if (block := make(comparison)).views]

    assert titles(bare) == [
        "Accuracy against traffic",
        "Progress by round",
        "How does accuracy differ between clients?",
    ]
    assert len(titles(runs / "fedadam-ssm-0")) == len(FIGURES)
    assert main(["report", str(bare), "-o", str(tmp_path / "report.html")]) == 0


def test_a_dense_method_has_no_mask_figures(runs):
    (comparison,) = arrange(shown(runs, "fedadam-0"))
    without = {make.__name__ for make in FIGURES if not make(comparison).views}
    assert without == {"overlap", "pairs"}


@pytest.mark.parametrize("history", ["", '{"round": 2}\n'])
def test_a_folder_without_a_round_is_refused_in_one_line(history, runs, tmp_path, capsys):
    empty = tmp_path / "empty"
    empty.mkdir()
    shutil.copy(runs / "fedadam-0" / "config.toml", empty)
    (empty / "metrics.jsonl").write_text(history)
    assert main(["report", str(empty)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_missing_folder_is_refused_in_one_line(tmp_path, capsys):
    assert main(["report", str(tmp_path / "none")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "it contains no run" in said


def test_a_broken_summary_is_named(runs, tmp_path):
    broken = shutil.copytree(runs / "fedadam-0", tmp_path / "broken")
    (broken / "summary.json").write_text("{")
    with pytest.raises(ConfigError, match=r"summary\.json"):
        read_run(broken)


def test_partitions_are_compared_separately(runs, tmp_path, capsys):
    other = trained(tmp_path / "skewed", algorithm="fedadam", local_steps=4, partition="dirichlet")
    comparisons = arrange([*shown(runs, "fedadam-0", "fedadam-ssm-0"), read_run(other)])
    assert [c.partition for c in comparisons] == ["iid", "dirichlet (θ = 0.1)"]
    assert [[g.name for g in c.groups] for c in comparisons] == [
        ["fedadam", "fedadam-ssm"],
        ["fedadam"],
    ]
    report = tmp_path / "report.html"
    assert main(["report", str(runs / "fedadam-0"), str(other), "-o", str(report)]) == 0
    text = report.read_text()
    for partition in ("iid", "dirichlet (θ = 0.1)"):
        assert f"partition {partition}</h2>" in text
    assert set(data_in(report)["comparisons"]) == {"comparison0", "comparison1"}


def test_runs_on_validation_data_are_not_compared_with_those_on_test_data(runs):
    run = read_run(runs / "fedadam-0")
    held_out = replace(run, summary={**run.summary, "validation": 0.1})
    partitions = [comparison.partition for comparison in arrange([run, held_out])]
    assert partitions == ["iid", "iid, tested on 10 % of the training data"]


def damaged_line(folder, name, number, change):
    """Change the object in one line of a file."""
    lines = (folder / name).read_text().splitlines()
    found = json.loads(lines[number - 1])
    change(found)
    lines[number - 1] = json.dumps(found)
    (folder / name).write_text("".join(f"{line}\n" for line in lines))
    (folder / "checkpoint.safetensors").unlink()  # whose digest would notice


@pytest.mark.parametrize(
    ("name", "change", "phrase"),
    [
        ("metrics.jsonl", lambda x: x.update(uplink_bytes="1"), "metrics.jsonl"),
        ("metrics.jsonl", lambda x: x.update(accuracy=-0.5), "accuracy"),
        ("metrics.jsonl", lambda x: x.update(train_loss="low"), "train_loss"),
        ("metrics.jsonl", lambda x: x.update(f1=10**400), "f1"),
        ("metrics.jsonl", lambda x: x.update(client_accuracy=[0.5, None]), "client_accuracy"),
        ("metrics.jsonl", lambda x: x.pop("client_accuracy"), "client_accuracy"),
        ("metrics.jsonl", lambda x: x.update(evaluation={"metrics": {"a": "b"}}), "evaluation"),
        ("metrics.jsonl", lambda x: x.update(evaluation=3), "evaluation"),
        ("uploads.jsonl", lambda x: x["bytes"].update(w="many"), "bytes"),
        ("uploads.jsonl", lambda x: x["masks"].update(x={}), "masks"),
        ("uploads.jsonl", lambda x: x["masks"]["wmv"].pop("kept"), "masks"),
        ("uploads.jsonl", lambda x: x["magnitudes"]["w"].update(step=0), "magnitudes"),
        ("uploads.jsonl", lambda x: x["shared"]["wmv"].pop(), "shared"),
        ("uploads.jsonl", lambda x: x["clients"].pop(), "shared does not fit clients"),
    ],
)
def test_a_damaged_line_is_named_in_one_line(name, change, phrase, runs, tmp_path, capsys):
    damaged = shutil.copytree(runs / "fedadam-ssm-0", tmp_path / "damaged")
    damaged_line(damaged, name, 2, change)
    assert main(["report", str(damaged), "-o", str(tmp_path / "r.html")]) == 2
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1
    assert name in errors
    assert phrase in errors
    assert "line 2" in errors


def test_a_damaged_byte_never_gives_a_traceback(runs, tmp_path, capsys):
    draw = random.Random(0)
    names = ("metrics.jsonl", "uploads.jsonl", "summary.json", "clients.json", "config.toml")
    refused = 0
    for number in range(60):
        damaged = shutil.copytree(runs / "fedadam-ssm-0", tmp_path / str(number))
        (damaged / "checkpoint.safetensors").unlink()
        file = damaged / names[number % len(names)]
        content = bytearray(file.read_bytes())
        content[draw.randrange(len(content))] = draw.randrange(32, 127)
        file.write_bytes(content)
        code = main(["report", str(damaged), "-o", str(tmp_path / "r.html")])
        errors = capsys.readouterr().err
        assert code in (0, 2), errors
        if code == 2:
            refused += 1
            assert errors.count("\n") == 1
    assert refused > 5


# What it says.


def test_the_table_has_mean_and_deviation_of_the_seeds(runs, page):
    first = {row[0]: row for row in reversed(Tables(page.read_text()).rows)}
    for method in METHODS:
        best = [
            100
            * json.loads((runs / f"{method}-{seed}" / "summary.json").read_text())["best_accuracy"]
            for seed in SEEDS
        ]
        wanted = f"{statistics.mean(best):.2f}"
        if best[0] != best[1]:
            wanted += f" ± {statistics.stdev(best):.2f}"
        assert wanted in first[method]


def test_the_table_compares_with_dense_fedadam(runs, page):
    rows = {row[0]: row for row in reversed(Tables(page.read_text()).rows)}
    assert rows["method"][2:7] == ["MB up", "vs dense", "rounds", "Mibit", "ratio"]
    target = likely_target(arrange([read_run(path) for path in find_runs([runs])])[0])
    for method in ("fedadam-ssm", "fedadam-top"):
        ratios = []
        for run in shown(runs, *(f"{method}-{seed}" for seed in SEEDS)):
            record = reached(run.history, target)
            if record is not None:
                dense = 12 * run.summary["parameters"] * record["round"]
                ratios.append(dense / record["uplink_bytes"])
        expected = f"{statistics.mean(ratios):.1f}×" if len(ratios) == len(SEEDS) else ""
        assert rows[method][3] == expected


def test_the_bars_add_up_to_the_uplink_per_client(runs, page):
    data = data_in(page)["blocks"]
    (bars,) = [
        views[0]["charts"][0]["data"] for views in data.values() if views[0]["file"] == "bytes"
    ]
    for method in METHODS:
        drawn = sum(trace["x"][trace["y"].index(method)] for trace in bars)
        sent = [read_run(runs / f"{method}-{seed}").summary["uplink_bytes"] for seed in SEEDS]
        assert drawn == pytest.approx(statistics.mean(sent) / ROUNDS / 1e3, rel=1e-4)


def test_a_seed_that_misses_the_target_makes_the_mean_infinite():
    assert Spread((1.0, None)).mean is None
    assert Spread((1.0, None)).text() == "∞"
    assert Spread((2.0, 2.0)).text() == "2.00"


def test_the_same_runs_give_the_same_bytes(runs, page, tmp_path):
    assert main(["report", str(runs), "-o", str(tmp_path / "again.html")]) == 0
    assert (tmp_path / "again.html").read_bytes() == page.read_bytes()


def test_names_are_escaped(runs, tmp_path):
    run = read_run(runs / "fedadam-ssm-0")
    name = "</script><script>alert(1)</script>"
    hostile = type(run)(
        {**run.summary, "dataset": name}, run.history, run.uploads, run.labels, name
    )
    write_report([hostile], tmp_path / "report.html", name)
    assert name not in (tmp_path / "report.html").read_text()


def test_views_with_long_names_become_a_drop_down_list():
    (few,) = FigureBlock("", "", [View("seed 0", []), View("seed 1", [])]).choices
    (many,) = FigureBlock("", "", [View(f"a rather long name {n}", []) for n in range(3)]).choices
    assert not few.is_list
    assert many.is_list


def test_a_machine_that_cannot_draw_still_trains(tmp_path, monkeypatch, capsys):
    for name in ("plotly", "plotly.offline", "matplotlib"):
        monkeypatch.setitem(sys.modules, name, None)
    words = ["--clients", "2", "--rounds", "1", "--local-steps", "1"]
    assert main(["run", *words, "--out", str(tmp_path / "run")]) == 0
    said = capsys.readouterr()
    assert f"fedsift report {tmp_path / 'run'}" in said.err
    assert "report:" not in said.out
    assert (tmp_path / "run" / "summary.json").exists()
    many = ["compare", "--algorithms", "fedsgd", "--target", "0.5", "--out", str(tmp_path / "many")]
    assert main([*many, *words]) == 0
    assert (tmp_path / "many" / "compare.csv").exists()


# In a browser.


LOOKS = {
    "light": {"width": 1280},
    "dark": {"width": 1280, "dark": True},
    "phone": {"width": 390},
}
TRACES = "document.querySelectorAll('.scatterlayer .trace, .barlayer .trace, .hm').length"


@pytest.mark.parametrize("look", LOOKS)
def test_the_report_is_drawn_without_errors_or_network_requests(look, page, browser):
    browser.open(page, **LOOKS[look])
    assert browser.complaints() == []
    own = (page.resolve().as_uri(), "data:")
    assert [url for url in browser.requests() if not url.startswith(own)] == []
    figures = browser.value("document.querySelectorAll('[data-block]').length")
    assert figures == len(FIGURES)
    assert browser.value("document.querySelectorAll('.main-svg').length") >= 2 * figures
    assert browser.value(TRACES) > 30
    assert browser.value("document.documentElement.scrollWidth <= innerWidth"), (
        "it scrolls sideways"
    )


def ink(browser):
    """The color of an axis' numbers, once the page has seen the last change."""
    browser.value("new Promise(seen => setTimeout(seen, 300))")
    return browser.value("getComputedStyle(document.querySelector('.xtick text')).fill")


def test_the_figures_follow_the_readers_preference(page, browser):
    browser.open(page)
    light = ink(browser)
    browser.prefer("dark")
    assert ink(browser) != light
    browser.prefer("light")
    assert ink(browser) == light
    assert browser.complaints() == []


def test_printing_uses_light_colors_and_restores_dark_mode(page, browser, tmp_path):
    browser.open(page, dark=True)
    before = ink(browser)
    seen = "window.seen = []; addEventListener('beforeprint', () => seen.push({ink}))".replace(
        "{ink}", "getComputedStyle(document.querySelector('.xtick text')).fill"
    )
    browser.value(seen)
    browser.printed(tmp_path / "report.pdf")
    assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF")
    assert browser.value("seen") != [before]
    assert ink(browser) == before
    assert browser.complaints() == []


CELLS = "[...document.querySelectorAll('.comparison tbody tr')].map(r => r.textContent.trim())"


def set_target(browser, percent):
    browser.value(
        f"(() => {{ const field = document.querySelector('input.target'); field.value = {percent};"
        "field.dispatchEvent(new Event('input', {bubbles: true})); })()"
    )


def without_spaces(rows):
    return ["".join(row.split()) for row in rows]


def test_the_table_at_another_target_equals_the_one_from_python(page, runs, browser, tmp_path):
    other = tmp_path / "other.html"
    target = 0.2
    write_report([read_run(path) for path in find_runs([runs])], other, "other", target)
    browser.open(other)
    wanted = without_spaces(browser.value(CELLS))
    browser.open(page)
    at_first = without_spaces(browser.value(CELLS))
    set_target(browser, 100 * target)
    assert sorted(without_spaces(browser.value(CELLS))) == sorted(wanted)
    set_target(browser, 100)
    assert all("∞" in row for row in browser.value(CELLS))
    set_target(browser, 100 * data_in(page)["comparisons"]["comparison0"]["target"])
    assert without_spaces(browser.value(CELLS)) == at_first
    assert browser.complaints() == []


def test_a_click_sorts_hides_and_changes_the_view(page, browser):
    browser.open(page)
    before = browser.value(TRACES)
    names = "[...document.querySelectorAll('.comparison tbody tr')].map(r => r.dataset.group)"
    browser.value("document.querySelector('.comparison thead th').click()")
    assert browser.value(names) == sorted(METHODS)
    browser.value("document.querySelector('.comparison thead th').click()")
    assert browser.value(names) == sorted(METHODS, reverse=True)
    browser.value("document.querySelector('[data-group=fedadam] .toggle').click()")
    assert browser.value(TRACES) < before
    browser.value("document.querySelector('[data-group=fedadam] .toggle').click()")
    assert browser.value(TRACES) == before
    title = "document.querySelector('[data-block] .xtitle').textContent"
    assert "MB" in browser.value(title)
    browser.value("document.querySelectorAll('[data-block] .views button')[2].click()")
    assert "Mibit" in browser.value(title)
    assert browser.complaints() == []


def test_a_run_of_one_round_is_drawn(browser, tmp_path):
    run = trained(tmp_path / "run", algorithm="sparse-fedsgd", rounds=1, clients=1, local_steps=1)
    assert main(["report", str(run), "-o", str(tmp_path / "report.html")]) == 0
    browser.open(tmp_path / "report.html")
    assert browser.value(TRACES) > 5
    assert browser.complaints() == []
