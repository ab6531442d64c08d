"""Every module imports only from rooms above its own, in the order of ROWS."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedsift

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
"""The rooms of the package from top to bottom. Rooms of one row do not import each other."""

SOURCE = Path(fedsift.__file__).parent
RANK = {room: rank for rank, row in enumerate(ROWS) for room in row}
ENTRANCES = {SOURCE / "__init__.py", SOURCE / "__main__.py"}
MODULES = sorted(path for path in SOURCE.rglob("*.py") if path not in ENTRANCES)


def room_of(module: str) -> str:
    """The room that a dotted name below ``fedsift`` is in."""
    return module.split(".")[1]


def imported(path: Path) -> Iterator[str]:
    """Every module of fedsift that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "fedsift":
            yield from (f"fedsift.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedsift."):
            yield node.module or ""
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.startswith("fedsift."))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_module_imports_only_from_rows_above_its_own(path: Path) -> None:
    own = room_of(".".join(("fedsift", *path.relative_to(SOURCE).with_suffix("").parts)))
    for module in imported(path):
        room = room_of(module)
        assert room == own or RANK[room] < RANK[own], f"{own} imports {module}"


def test_the_root_holds_at_most_nine_modules() -> None:
    assert len(list(SOURCE.glob("*.py"))) <= 9


def test_every_room_has_a_row() -> None:
    rooms = {path.relative_to(SOURCE).parts[0].removesuffix(".py") for path in MODULES}
    assert rooms <= RANK.keys()
