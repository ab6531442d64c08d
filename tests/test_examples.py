"""The examples run, are short, draw their pictures, and the documentation quotes them."""

import json
import re
import sys
from importlib import import_module
from pathlib import Path

import matplotlib as mpl
import pytest

from fedsift.cli import main

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py"))
NAMES = [*SCRIPTS, "notebook"]


@pytest.fixture(autouse=True)
def cwd(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(FOLDER)
    mpl.use("agg")
    yield
    for name in SCRIPTS:
        sys.modules.pop(name, None)


def source(name):
    """Return the code of an example."""
    if name != "notebook":
        return (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    cells = json.loads((FOLDER / "notebook.ipynb").read_text(encoding="utf-8"))["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.filterwarnings("ignore:the final accuracy", "ignore:the test loss")
def test_a_script_trains_and_draws(name, tmp_path):
    example = import_module(name)
    found = example.train(rounds=2)
    example.draw(*(found if isinstance(found, tuple) else (found,)), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    results = found.values() if isinstance(found, dict) else found[:1]
    for result in results:
        assert [record["round"] for record in result.history] == [0, 1, 2]


@pytest.mark.filterwarnings("ignore:the final accuracy")
def test_the_notebook_runs(tmp_path):
    code = source("notebook")
    assert "ROUNDS = 20\n" in code
    cells = {}
    exec(code.replace("ROUNDS = 20\n", "ROUNDS = 2\n"), cells)
    assert cells["longer"].snapshot.round == 12
    assert {path.name for path in tmp_path.iterdir()} == {"notebook.png", "report.html"}


def test_the_notebook_runs_in_jupyter(tmp_path, monkeypatch):
    """In a real kernel, each bar ends with the last round, and there are no lines per round."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(FOLDER / "notebook.ipynb", as_version=4)
    notebook.cells[1].source = notebook.cells[1].source.replace("ROUNDS = 20", "ROUNDS = 2")
    where = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=120, resources=where).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    shown = [
        output.data["text/html"] for output in outputs if "text/html" in output.get("data", ())
    ]
    assert [bar.split(" ·")[0] for bar in shown] == [
        '<progress value="2" max="2"></progress> sift round 2/2',
        '<progress value="12" max="12"></progress> sift round 12/12',
    ]
    streams = [output.text for output in outputs if output.output_type == "stream"]
    assert all("round" not in text for text in streams)


def test_early_stopping_ends_the_run_and_keeps_the_best_model():
    example = import_module("early_stopping")
    result, stopping = example.train(rounds=60)
    scores = {record["round"]: record["f1"] for record in result.history if "f1" in record}
    assert list(scores) == list(range(0, result.snapshot.round + 1, 5))
    assert result.snapshot.round == stopping.round + 15 < 60
    assert stopping.best == max(scores.values())
    assert example.f1(stopping.model, example.load()[1]) == stopping.best


def test_an_example_runs_on_the_command_line(tmp_path):
    words = ["--data", "numpy_data:load", "--model", "numpy_data:network", "--local-steps", "2"]
    assert main(["run", *words, "--rounds", "1", "--out", "run"]) == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["clients"] == 10


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_short_and_shown(name):
    assert len(source(name).splitlines()) < 80
    page = (ROOT / "docs" / "tutorial" / "examples.md").read_text(encoding="utf-8")
    gallery = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
    picture = ROOT / "docs" / "images" / f"example-{name}.png"
    assert picture.stat().st_size < 60_000
    assert f"../images/{picture.name}" in page
    assert f"images/{picture.name}" in gallery


def test_the_documentation_quotes_the_examples():
    page = (ROOT / "docs" / "tutorial" / "examples.md").read_text(encoding="utf-8")
    lines = {line.strip() for name in NAMES for line in source(name).splitlines()}
    quoted = "".join(re.findall(r"^```py\n(.*?)^```", page, re.MULTILINE | re.DOTALL))
    assert quoted
    for line in quoted.splitlines():
        assert line.strip() in lines, line
