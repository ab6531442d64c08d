"""The documentation is true: it builds, its Python runs, its command lines parse."""

import csv
import json
import os
import pkgutil
import re
import shlex
import sys
from contextlib import suppress
from pathlib import Path

import click
import pytest
import typer
from safetensors import safe_open

import fedsift
from fedsift import advise, privacy
from fedsift.algorithms import METHODS
from fedsift.cli.entry import app
from fedsift.errors import ConfigError
from fedsift.flower import FedSift, client_app
from fedsift.privacy.differential import private_roles
from fedsift.progress import times_fewer
from fedsift.runs import RunConfig, RunFolder, federation_of, restore_run, run_summary, train_rounds
from fedsift.runs.compare import Row, dense_fedadam_bytes
from fedsift.runs.config import read_values
from fork_server import ForkedPython
from shared import shared_folder

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`(fedsift\s[^`]+)`")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[str]:
    found = FENCE.findall(page.read_text(encoding="utf-8"))
    return [text for kind, text in found if kind == language]


def command_lines(page: Path) -> list[str]:
    prose = FENCE.sub("", page.read_text(encoding="utf-8"))
    shell = "".join(blocks(page, "shell")).replace("\\\n", " ").splitlines()
    return [*INLINE.findall(prose), *(line for line in shell if line.startswith("fedsift "))]


def section(page: Path, heading: str) -> str:
    _, found, rest = page.read_text(encoding="utf-8").partition(f"\n## {heading}\n")
    assert found, f"{name_of(page)} has no section {heading!r}"
    return rest.partition("\n## ")[0]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    return shared_folder(tmp_path_factory, "site", build_site)


def build_site(folder):
    words = ("-m", "mkdocs", "build", "--strict", "--site-dir", str(folder))
    build = ForkedPython(*words, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    said = build.communicate(timeout=600)[1]
    assert build.returncode == 0, said
    assert "WARNING" not in said, said


def test_the_site_builds_without_a_warning(site):
    assert (site / "index.html").exists()
    assert (site / "search" / "search_index.json").exists()


def test_the_site_loads_nothing_from_the_network(site):
    loads = re.compile(
        r"<(?:script|img|iframe|link)\b[^>]*?(?:src|href)=\"?((?:https?:)?//[^\"\s>]+)"
    )
    for page in site.rglob("*.html"):
        assert not loads.search(page.read_text(encoding="utf-8")), page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", sheet.read_text()), sheet


def test_the_reference_has_every_method_and_its_examples(site):
    api = {
        page.parent.name: page.read_text("utf-8") for page in site.glob("reference/api/*/*.html")
    }
    for name in METHODS:
        function = name.replace("-", "_")
        assert f'id="fedsift.algorithms.{function}.{function}"' in api["algorithms"], name
    public = [fedsift.simulate, fedsift.rounds, fedsift.Result, fedsift.Diverged, fedsift.Adam]
    public += [fedsift.State, fedsift.Layout, advise.advise, advise.Advice, FedSift, client_app]
    public += [privacy.DifferentialPrivacy, privacy.SecureSettings]
    for thing in public:
        places = f"{thing.__module__}.{thing.__name__}", f"fedsift.{thing.__name__}"
        assert any(f'id="{place}"' in text for place in places for text in api.values()), thing
    for page, text in api.items():
        assert "<blockquote>" not in text, f"a doctest of {page} is not shown as code"


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=name_of)
def test_python_in_the_documentation_runs(page, tmp_path):
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks(page, "python")), encoding="utf-8")
    process = ForkedPython(str(script), cwd=tmp_path)
    said = process.communicate(timeout=600)[1]
    assert process.returncode == 0, said


@pytest.mark.parametrize("page", [p for p in PAGES if command_lines(p)], ids=name_of)
def test_command_lines_in_the_documentation_parse(page, tmp_path, monkeypatch):
    """The methods of a module ``my_methods`` have the settings that the pages use."""
    (tmp_path / "my_methods.py").write_text("def __getattr__(name):\n    return lambda: None\n")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        for line in command_lines(page):
            parse(shlex.split(line.partition(" > ")[0])[1:])  # without a redirection
    finally:
        sys.modules.pop("my_methods", None)


def parse(words: list[str]) -> None:
    """Follow a command line to its command and let that read its options, without running it."""
    command = typer.main.get_command(app)
    while isinstance(command, click.Group):
        name, *words = words
        assert name in command.commands, f"there is no command {name!r}"
        command = command.commands[name]
    if words and words != ["--help"]:  # a bare `fedsift compare` in a sentence is only a name
        command.make_context(command.name, list(words))


def test_every_command_and_option_is_in_the_reference():
    page = DOCS / "reference" / "command-line.md"
    run_options = set(options_of(typer.main.get_command(app).commands["run"]))
    for path, command in commands_of(typer.main.get_command(app), "fedsift"):
        text = section(page, path)
        mine = set(options_of(command))
        shared = path in ("fedsift compare", "fedsift deploy demo")
        wanted = mine - run_options if shared else mine
        for option in wanted:
            assert f"| `{option}` |" in text, f"{path} {option}"


def commands_of(command, path):
    if isinstance(command, click.Group):
        for name, child in command.commands.items():
            yield from commands_of(child, f"{path} {name}")
    else:
        yield path, command


def options_of(command):
    options = [p for p in command.params if isinstance(p, click.Option)]
    return [word for p in options for word in p.opts if word != "--help"]


def test_every_default_in_the_reference_is_right():
    text = section(DOCS / "reference" / "command-line.md", "fedsift run")
    shown = dict(re.findall(r"^\| `--([\w-]+)` \| `?([^|`]+?)`? \|", text, re.MULTILINE))
    config = RunConfig.from_values({}).flat() | {"model": "auto", "weights": "auto"}
    config |= {"tensorboard": "off", "client_tests": "off", "secure": "off"}
    for key, value in config.items():
        documented = shown[key.replace("_", "-")]
        same = float(documented) == value if isinstance(value, float) else documented == str(value)
        assert same, f"{key}: {documented} in the reference, {value} in the code"


def test_toml_in_the_documentation_is_a_configuration(tmp_path):
    for page in PAGES:
        for block in blocks(page, "toml"):
            file = tmp_path / "config.toml"
            file.write_text(block, encoding="utf-8")
            RunConfig.from_values(read_values(file))


def test_every_column_and_key_of_a_run_is_in_the_reference(tmp_path):
    config = RunConfig.from_values({"rounds": 1, "clients": 2, "local_steps": 1})
    federation = federation_of(config)
    folder = RunFolder.create(tmp_path / "run", config)
    history = list(train_rounds(folder, federation, restore_run(folder, federation), config.rounds))
    page = DOCS / "reference" / "run-folder.md"
    for column in history[0]:
        assert f"| `{column}` |" in section(page, "metrics.jsonl"), column
    for key in run_summary(config, federation, history).keys() - config.flat().keys():
        assert f"| `{key}` |" in section(page, "summary.json"), key
    for column in folder.uploads()[0]:
        assert f"| `{column}` |" in section(page, "uploads.jsonl"), column
    for column in Row.__dataclass_fields__:
        assert f"`{column}`" in section(page, "A comparison's folder"), column


def test_the_readme_and_the_reference_name_every_method():
    table = section(README, "Methods")
    run = section(DOCS / "reference" / "command-line.md", "fedsift run")
    (row,) = (line for line in run.splitlines() if line.startswith("| `--algorithm` |"))
    for name in METHODS:
        assert f"`{name}`" in table, name
        assert f"`{name}`" in row, name


def test_the_reference_has_every_key_of_a_checkpoint(tmp_path):
    config = RunConfig.from_values({"rounds": 1, "clients": 2, "local_steps": 1})
    folder, federation = RunFolder.create(tmp_path / "run", config), federation_of(config)
    list(train_rounds(folder, federation, restore_run(folder, federation), config.rounds))
    with safe_open(folder.checkpoint_file, "pt") as file:
        metadata = file.metadata()
    text = section(DOCS / "reference" / "run-folder.md", "checkpoint.safetensors")
    for key in (*metadata, *json.loads(metadata["fedsift"])):
        assert f"`{key}`" in text, key


def test_the_readme_has_exactly_two_commands_to_start():
    found = FENCE.findall(section(README, "Start"))
    assert [text.strip() for _, text in found] == ["make run", "make test"]
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert {"run", "test"} <= set(targets)


def test_the_table_of_the_comparison_is_that_of_the_committed_run():
    page = (DOCS / "tutorial" / "compare.md").read_text(encoding="utf-8")
    with (DOCS / "images" / "digits-compare.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    shown = [line.split() for line in page.splitlines()]
    for row in rows:
        assert cells_of(row) in shown, row["algorithm"]


def cells_of(row):
    """A row of the printed table, for the 27,430 parameters of the tutorial's model."""
    accuracies = [f"{100 * float(row[key]):.2f}" for key in ("best_accuracy", "final_accuracy")]
    if not row["round"]:
        return [row["algorithm"], "∞", "–", "–", *accuracies]
    dense = dense_fedadam_bytes(27_430, int(row["round"]), clients=20) / 1e6
    megabytes = float(row["megabytes"])
    numbers = [f"{megabytes:.2f}", times_fewer(megabytes, dense), f"{float(row['mibit']):.2f}"]
    return [row["algorithm"], *numbers, row["round"], *accuracies]


def test_the_figures_of_the_first_page_are_those_of_table_1():
    lines = json.loads((ROOT / "reproduce" / "results" / "table1.json").read_text("utf-8"))
    true = {f"{line['mibit']:.2f}" for line in lines if line["mibit"]}
    by = {(x["task"], x["setting"], x["method"]): x for x in lines}
    assert round(by["vgg11-cifar10", "iid", "fedadam"]["ratio"]) == 13
    for quoting in (README, DOCS / "index.md"):
        quoted = re.findall(r"\b\d\.\d\d\b(?= Mibit| with)", quoting.read_text(encoding="utf-8"))
        assert quoted, name_of(quoting)
        assert set(quoted) <= true, name_of(quoting)


@pytest.mark.parametrize(
    "name", ["fig1-cnn-fashion-mnist", "fig8-cnn-fashion-mnist-iid", "sift-vgg11-cifar10-noniid"]
)
def test_the_gallery_shows_the_committed_pictures(name):
    shown, committed = (DOCS / "images", ROOT / "reproduce" / "results")
    assert (shown / f"{name}.png").read_bytes() == (committed / f"{name}.png").read_bytes()


def test_the_architecture_page_names_every_package():
    text = section(DOCS / "explanation" / "architecture.md", "The packages")
    modules = pkgutil.iter_modules([str(ROOT / "src" / "fedsift")])
    for module in modules:
        assert f"`{module.name}`" in text or module.name == "__main__", module.name


def test_formulas_become_mathml(site):
    for name in ("methods", "sift", "theory"):
        text = (site / "explanation" / name / "index.html").read_text(encoding="utf-8")
        assert "<math " in text
        assert "$$" not in text
        assert "formula-" not in text


@pytest.mark.parametrize("page", [README, ROOT / "CONTRIBUTING.md"], ids=name_of)
def test_links_have_existing_targets(page):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def test_the_pages_on_privacy_name_the_methods_that_can_be_private():
    private = privacy.DifferentialPrivacy(clip=dict.fromkeys("wmvp", 1.0), noise=1.0)
    accepted = set()
    for name, make in METHODS.items():
        with suppress(ConfigError):
            private_roles(make(), private)
            accepted.add(name)
    listed = section(DOCS / "how-to" / "differential-privacy.md", "Which methods can be private")
    assert set(re.findall(r"`([a-z0-9-]+)`", listed.partition(". ")[0])) == accepted
    table = (DOCS / "explanation" / "privacy.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"\n\| (.*): methods that send everything in full \|", table)
    assert {*re.findall(r"`([a-z0-9-]+)`", row), "decomfl"} == accepted
