"""Every module imports only from packages above its own, in the order of ROWS."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedsift
from fedsift.algorithms import METHODS

ROWS = (
    ("errors", "seeding", "native"),
    ("schedules",),
    ("vector",),
    ("adam",),
    ("optim",),
    ("task",),
    ("selection",),
    ("codec",),
    ("algorithms",),
    ("privacy",),
    ("engine",),
    ("federation",),
    ("progress",),
    ("simulation",),
    ("integrations",),
    ("data",),
    ("llm",),
    ("models",),
    ("runs",),
    ("report",),
    ("api",),
    ("theory",),
    ("advise",),
    ("reproduce",),
    ("flower",),
    ("cli",),
)
"""The packages and modules from top to bottom. Those of one row do not import each other."""

SOURCE = Path(fedsift.__file__).parent
RANK = {package: rank for rank, row in enumerate(ROWS) for package in row}
ENTRANCES = {SOURCE / "__init__.py", SOURCE / "__main__.py"}
MODULES = sorted(path for path in SOURCE.rglob("*.py") if path not in ENTRANCES)


def package_of(module: str) -> str:
    """The package that a dotted name below ``fedsift`` is in."""
    return module.split(".")[1]


def imported(tree: ast.AST) -> Iterator[str]:
    """Every module of fedsift that a file names, also inside functions, for types or as text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports are not used here"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield f"{node.value.id}.{node.attr}"
        elif isinstance(node, ast.Call) and called_name(node) == "import_module":
            yield from (x.value for x in ast.walk(node) if isinstance(x, ast.Constant))


def called_name(call: ast.Call) -> str:
    """The name of the function that is called, without its module."""
    return ast.unparse(call.func).rpartition(".")[2]


def packages_in(source: str) -> set[str]:
    """The packages of fedsift that a file's text imports from."""
    names = (name for name in imported(ast.parse(source)) if isinstance(name, str))
    return {package_of(name) for name in names if name.startswith("fedsift.")} & RANK.keys()


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_module_imports_only_from_rows_above_its_own(path: Path) -> None:
    own = package_of(".".join(("fedsift", *path.relative_to(SOURCE).with_suffix("").parts)))
    for package in packages_in(path.read_text(encoding="utf-8")) - {own}:
        assert RANK[package] < RANK[own], f"{own} imports {package}"


@pytest.mark.parametrize(
    "source",
    [
        "from fedsift.cli import main",
        "from fedsift import cli",
        "import fedsift.cli.entry",
        "def f():\n    from fedsift.cli import main",
        "if TYPE_CHECKING:\n    from fedsift.cli import main",
        "import fedsift\nfedsift.cli.main()",
        "import_module('fedsift.cli')",
        "importlib.import_module(f'fedsift.cli.{name}')",
    ],
)
def test_every_way_to_import_is_seen(source: str) -> None:
    assert packages_in(source) == {"cli"}


def test_the_root_holds_at_most_nine_modules() -> None:
    assert len(list(SOURCE.glob("*.py"))) <= 9


def test_every_package_has_a_row() -> None:
    packages = {path.relative_to(SOURCE).parts[0].removesuffix(".py") for path in MODULES}
    assert packages <= RANK.keys()


@pytest.mark.parametrize(
    "init", sorted(SOURCE.rglob("*/__init__.py")), ids=lambda init: init.parent.name
)
def test_every_package_says_what_each_of_its_modules_is(init: Path) -> None:
    text = ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))) or ""
    methods = {f"{name.replace('-', '_')}.py" for name in METHODS}
    modules = {path.name for path in init.parent.glob("*.py")} - {"__init__.py"} - methods
    packages = {f"{path.parent.name}/" for path in init.parent.glob("*/__init__.py")}
    assert {name for name in modules | packages if name not in text} == set()
