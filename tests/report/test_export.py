"""Figures and tables as files: from the command line, and from the page."""

import base64
import csv
import io
import shutil
import sys
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from fedsift.cli import main
from fedsift.report.collect import read_run
from fedsift.report.figures import draw_view
from fedsift.report.files import csv_of, export, latex_of
from fedsift.report.sections import FIGURES, sections_of
from fedsift.report.tables import Cell, Table, TableColumn, TableRow
from shared import shared_folder
from small_runs import METHODS, SEEDS, data_in, trained

TWO = ("fedadam-ssm", "fedadam")


@pytest.fixture(scope="module")
def files(runs, tmp_path_factory):
    """The figures and tables of two methods, next to their report."""
    names = [str(runs / f"{method}-{seed}") for method in TWO for seed in SEEDS]

    def write(folder):
        words = ["-o", str(folder / "report.html"), "--export", str(folder / "files")]
        assert main(["report", *names, *words]) == 0

    return shared_folder(tmp_path_factory, "exported", write) / "files"


@pytest.fixture
def without_drawing(monkeypatch):
    """Write empty pictures, which takes no time."""
    drawn = {"png": b"", "svg": b""}
    monkeypatch.setattr("fedsift.report.files.draw_view", lambda *_: drawn)


def test_every_view_is_a_png_and_an_svg_and_every_table_a_csv_and_a_tex_file(files):
    data = data_in(files.parent / "report.html")
    views = [view["file"] for views in data["blocks"].values() for view in views]
    tables = ("results", "fairness", "settings", "runs")
    wanted = {f"{name}.{kind}" for name in views for kind in ("png", "svg")}
    wanted |= {f"{name}.{kind}" for name in tables for kind in ("csv", "tex")}
    assert {file.name for file in files.iterdir()} == wanted
    assert len(views) == len(set(views)) > len(FIGURES)
    for name in views:
        assert (files / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert ElementTree.parse(files / f"{name}.svg").getroot().tag.endswith("svg")


def test_the_same_view_gives_the_same_bytes(runs):
    pictures = []
    for _ in range(2):
        (section,) = sections_of([read_run(runs / "fedadam-0"), read_run(runs / "fedadam-ssm-0")])
        pictures.append(draw_view(section.blocks[0].views[0], "title", section.about, 0.5))
    assert pictures[0] == pictures[1]


def test_the_csv_file_has_a_row_per_method(files):
    with (files / "results.csv").open(newline="", encoding="utf-8") as lines:
        rows = {row["method"]: row for row in csv.DictReader(lines)}
    assert set(rows) == set(TWO)
    for method, row in rows.items():
        assert float(row["best, %"]) > 0, method
        assert row["seeds"] == "2"


@pytest.mark.usefixtures("without_drawing")
def test_runs_of_different_partitions_are_written_to_different_folders(runs, tmp_path, capsys):
    other = trained(tmp_path / "skewed", algorithm="fedadam", local_steps=1, partition="dirichlet")
    out = tmp_path / "files"
    words = [str(runs / "fedadam-0"), str(other), "-o", str(tmp_path / "r.html")]
    assert main(["report", *words, "--export", str(out)]) == 0
    assert f"figures and tables: {out}" in capsys.readouterr().out
    names = {"digits-small-cnn-partition-iid", "digits-small-cnn-partition-dirichlet-θ-0.1"}
    assert {folder.name for folder in out.iterdir()} == names
    assert all((out / name / "test-accuracy-by-round.svg").exists() for name in names)


HOSTILE = "../../$x_1$ <script>alert(1)</script> %{y} \\input{a} & \u202e\0 名"


def test_hostile_names_stay_inside_the_folder_and_are_drawn_as_text(runs, tmp_path):
    run = read_run(runs / "fedadam-ssm-0")
    history = [{**record, HOSTILE: 0.5 + record["round"]} for record in run.history]
    summary = {**run.summary, "dataset": HOSTILE, "algorithm": HOSTILE, "partition": HOSTILE}
    hostile = [type(run)({**summary, "partition": name}, history) for name in (HOSTILE, "iid")]
    folder = tmp_path / "a" / "b" / "files"
    sections = [replace(s, blocks=s.blocks[1:2]) for s in sections_of(hostile)]
    export(sections, folder)
    written = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert written
    assert all(file.is_relative_to(folder) for file in written)
    for file in folder.rglob("*.svg"):
        tags = {element.tag.rpartition("}")[2] for element in ElementTree.parse(file).iter()}
        assert "script" not in tags
    for file in folder.rglob("*.tex"):
        assert "\\input" not in file.read_text()


COLUMNS = [TableColumn("best, %"), TableColumn("MB"), TableColumn("at", "folder")]
TABLE = Table(
    "t", "T", "", "method", COLUMNS, [
        TableRow('a "b", c', [Cell("1.50 ± 0.25"), Cell("12.6×"), Cell("runs/a_b")]),
        TableRow("d", [Cell("2.50"), Cell("∞"), Cell("–")]),
    ],
)  # fmt: skip


def test_a_csv_file_has_plain_numbers_and_deviations_in_a_column_of_their_own():
    assert list(csv.reader(io.StringIO(csv_of(TABLE)))) == [
        ["method", "best, %", "best, % ±", "MB", "at"],
        ['a "b", c', "1.50", "0.25", "12.6", "runs/a_b"],
        ["d", "2.50", "", "inf", ""],
    ]


def test_a_latex_table_escapes_what_latex_would_interpret():
    assert latex_of(TABLE).splitlines()[1:6] == [
        r"\begin{tabular}{lrrl}",
        r"\toprule",
        r"method & best, \% & MB & at \\",
        r"\midrule",
        r'a "b", c & 1.50 $\pm$ 0.25 & 12.6$\times$ & runs/a\_b \\',
    ]


def test_a_machine_without_matplotlib_says_so_in_one_line(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    words = ["-o", str(tmp_path / "r.html"), "--export", str(tmp_path / "files")]
    assert main(["report", str(runs / "fedadam-0"), *words]) == 2
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1
    assert "matplotlib" in errors


# In a browser.

SAVED = """new Promise((done) => {{
  save = (name, type, content) => {{
    if (!(content instanceof Blob)) return done([name, content]);
    const reader = new FileReader();
    reader.onload = () => done([name, reader.result.split(",")[1]]);
    reader.readAsDataURL(content);
  }};
  {element}.querySelector('.save button[value={kind}]').click();
}})"""


def saved(browser, element, kind):
    """The name and the content of the file that a button of a block saves."""
    return browser.value(SAVED.format(element=element, kind=kind))


def test_every_figure_of_the_page_can_be_saved_without_network(page, browser):
    browser.open(page, dark=True)
    blocks = browser.value("document.querySelectorAll('[data-block]').length")
    assert blocks == len(FIGURES)
    for n in range(blocks):
        element = f"document.querySelectorAll('[data-block]')[{n}]"
        name, picture = saved(browser, element, "png")
        assert name.endswith(".png")
        assert base64.b64decode(picture).startswith(b"\x89PNG")
        name, drawing = saved(browser, element, "svg")
        texts = " ".join(ElementTree.fromstring(drawing).itertext())
        assert browser.value(f"{element}.querySelector('h2').textContent") in texts
        assert "small-cnn" in texts
        assert 'fill="#fff"' in drawing
    assert "trace 0" not in drawing
    own = (page.resolve().as_uri(), "data:", "blob:")
    assert [url for url in browser.requests() if not url.startswith(own)] == []
    assert browser.value("!document.documentElement.classList.contains('on-paper')")
    assert browser.complaints() == []


def test_a_saved_figure_names_every_method(page, browser):
    browser.open(page)
    _, drawing = saved(browser, "document.querySelector('[data-block]')", "svg")
    texts = list(ElementTree.fromstring(drawing).itertext())
    assert all(texts.count(name) == 1 for name in (*METHODS, "test accuracy"))
    assert not any(text.startswith("trace") for text in texts)


@pytest.mark.parametrize("kind", ["csv", "tex"])
def test_the_tables_of_the_page_are_saved_as_by_the_command(files, browser, kind):
    browser.open(files.parent / "report.html")
    for file in sorted(files.glob(f"*.{kind}")):
        element = f"document.querySelector('table[data-file={file.stem}]').closest('.block')"
        name, content = saved(browser, element, kind)
        assert (name, content) == (file.name, file.read_text(encoding="utf-8"))


def test_a_table_is_saved_as_it_is_sorted(page, browser):
    browser.open(page)
    browser.value("document.querySelector('.comparison thead th').click()")
    _, content = saved(browser, "document.querySelector('.results')", "csv")
    assert [line.split(",")[0] for line in content.splitlines()[1:]] == sorted(METHODS)


def test_a_hostile_name_is_text_in_the_page_and_in_its_files(runs, browser, tmp_path):
    folder = shutil.copytree(runs / "fedadam-ssm-0", tmp_path / "run")
    config = (folder / "config.toml").read_text()
    name = "<img src=x onerror=alert(1)> %{x} & $1$"
    (folder / "config.toml").write_text(config.replace('"digits"', f'"{name}"'))
    (folder / "summary.json").unlink()
    lines = (folder / "metrics.jsonl").read_text().replace('"loss"', f'"loss": 1, "{name}"')
    (folder / "metrics.jsonl").write_text(lines)
    (folder / "checkpoint.safetensors").unlink()
    assert main(["report", str(folder), "-o", str(tmp_path / "r.html")]) == 0
    browser.open(tmp_path / "r.html")
    assert browser.value("document.querySelectorAll('img').length") == 0
    list_of = "document.querySelector('[data-block] select')"
    assert browser.value(f"[...{list_of}.options].map(o => o.textContent)")[-1] == name
    browser.value(f"{list_of}.value = {list_of}.options.length - 1")
    browser.value(f"{list_of}.dispatchEvent(new Event('change', {{bubbles: true}}))")
    assert browser.value("document.querySelector('[data-block] .ytitle').textContent") == name
    _, drawing = saved(browser, "document.querySelector('[data-block]')", "svg")
    assert name in list(ElementTree.fromstring(drawing).itertext())
    assert browser.complaints() == []
