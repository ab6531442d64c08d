"""The size and the documentation of the code: ``python tests/test_code_metrics.py`` prints them."""

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import median, quantiles

SOURCE = Path(__file__).parents[1] / "src" / "fedsift"
Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text("utf-8")) for path in sorted(SOURCE.rglob("*.py"))}


def nodes(*kinds: type[ast.AST]) -> Iterator[ast.AST]:
    return (node for tree in trees().values() for node in ast.walk(tree) if isinstance(node, kinds))


def functions() -> list[Function]:
    return [node for node in nodes(ast.FunctionDef) if isinstance(node, Function)]


def length(function: Function) -> int:
    return (function.end_lineno or 0) - function.lineno + 1


def is_annotated(function: Function) -> bool:
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    typed = [a.annotation for a in named if a.arg not in ("self", "cls", "ctx", "_")]
    return function.returns is not None and all(typed)


def public() -> Iterator[tuple[str, ast.AST]]:
    """Public modules, classes and functions, without what is defined inside functions."""
    for path, tree in trees().items():
        yield str(path.relative_to(SOURCE)), tree
        yield from public_members(tree, str(path.relative_to(SOURCE)))


def public_members(parent: ast.Module | ast.ClassDef, where: str) -> Iterator[tuple[str, ast.AST]]:
    for node in parent.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            yield f"{where}:{node.name}", node
            if isinstance(node, ast.ClassDef):
                yield from public_members(node, f"{where}:{node.name}")


def metrics() -> dict[str, float]:
    lengths = [length(function) for function in functions()]
    documented = [bool(ast.get_docstring(node)) for _, node in public()]
    return {
        "functions": len(lengths),
        "median function, lines": median(lengths),
        "95th percentile, lines": quantiles(lengths, n=20)[-1],
        "longest file, lines": max(len(path.read_text("utf-8").splitlines()) for path in trees()),
        "fully annotated, %": 100 * sum(map(is_annotated, functions())) / len(lengths),
        "public docstrings, %": 100 * sum(documented) / len(documented),
    }


def test_functions_are_short() -> None:
    found = metrics()
    assert found["median function, lines"] <= 8
    assert found["95th percentile, lines"] <= 25


def test_no_file_is_longer_than_400_lines() -> None:
    assert metrics()["longest file, lines"] <= 400


def test_functions_are_annotated() -> None:
    assert metrics()["fully annotated, %"] >= 98


def test_everything_public_has_a_docstring() -> None:
    assert [name for name, node in public() if not ast.get_docstring(node)] == []


def test_no_two_classes_share_a_name() -> None:
    names = Counter(node.name for node in nodes(ast.ClassDef) if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []


if __name__ == "__main__":
    for name, value in metrics().items():
        print(f"{name:25}{value:8.1f}")
