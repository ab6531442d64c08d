"""Scripts outside the package, which no other test runs as a whole, import names that exist."""

import ast
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("benchmarks", "docs", "examples", "fuzz", "reproduce")
SCRIPTS = sorted(
    path
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*.py")
    if "environments" not in path.parts
)


def imported_names(path: Path) -> Iterator[tuple[str, str]]:
    """Each module of fedsift that a script imports from, and the name that it imports."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fedsift":
            yield from ((node.module or "", alias.name) for alias in node.names)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_script_imports_from_fedsift_exists(path: Path) -> None:
    for module, name in imported_names(path):
        if "flower" in module and not find_spec("flwr"):
            continue
        if "triton" in module and not find_spec("triton"):
            continue
        if not hasattr(import_module(module), name):
            import_module(f"{module}.{name}")
