"""Tables and numbers for pages of the documentation, and the marks between which they are put."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
TASKS = {
    "cnn-fashion-mnist": "CNN, Fashion-MNIST",
    "vgg11-cifar10": "VGG-11, CIFAR-10",
    "resnet18-cifar10": "ResNet-18, CIFAR-10",
    "resnet18-svhn": "ResNet-18, SVHN",
    "vit-tiny-cifar10": "ViT-Tiny, CIFAR-10",
    "char-lm": "Character language model, Python's modules",
    "cnn-500-clients": "CNN, 20 of 500 clients",
    "cnn-5000-clients": "CNN, 50 of 5,000 clients",
    "cnn-5-steps": "CNN, 5 local steps",
    "cnn-100-steps": "CNN, 100 local steps",
    "cnn-100-clients": "CNN, 100 clients",
}
SETTINGS = {
    "iid": "IID",
    "noniid": "Dirichlet 0.1",
    "theta-0.5": "Dirichlet 0.5",
    "theta-1": "Dirichlet 1",
}
OTHER_SETTINGS = {
    ("char-lm", "noniid"): "by document",
    ("cnn-500-clients", "noniid"): "Dirichlet 0.3",
    ("cnn-5000-clients", "noniid"): "Dirichlet 0.3",
}
UNITS = {"kB": 1e3, "MB": 1e6}
NO_RESULTS = "There are no results yet."


def name_of(task: str, setting: str) -> str:
    """The name of a task and setting for readers.

    >>> name_of("char-lm", "noniid"), name_of("vgg11-cifar10", "noniid")
    ("Character language model, Python's modules, by document", 'VGG-11, CIFAR-10, Dirichlet 0.1')
    """
    return f"{TASKS[task]}, {OTHER_SETTINGS.get((task, setting)) or SETTINGS[setting]}"


def unit_of(sent: Iterable[float]) -> str:
    """The unit in which the smallest number of bytes has few digits.

    >>> unit_of([5_200.0, 1_223_300.0]), unit_of([5_232_600.0])
    ('kB', 'MB')
    """
    return "MB" if min(sent, default=math.inf) >= UNITS["MB"] else "kB"


def amount(x: float | None, unit: str) -> str:
    """Bytes in a unit; a dash if not all seeds reached the target.

    >>> amount(1_223_300.0, "kB"), amount(None, "kB")
    ('1,223.3', '–')
    """
    return "–" if x is None else f"{x / UNITS[unit]:,.1f}"


def times(x: float | None) -> str:
    """A ratio in three digits; a dash for None.

    >>> times(38.04), times(0.05711), times(None)
    ('38', '0.0571', '–')
    """
    return "–" if x is None else f"{x:.0f}" if x >= 10 else f"{x:.3g}"


def whole(x: float | None) -> str:
    """A mean number of rounds."""
    return "–" if x is None else f"{x:.0f}"


def percent(x: float | None) -> str:
    """A share in percent."""
    return "–" if x is None else f"{100 * x:.2f} %"


def table(body: Iterable[tuple[str, ...]]) -> str:
    """A Markdown table."""
    head, *rest = body
    ruled = [head, ("---", *("--:",) * (len(head) - 1)), *rest]
    return "\n".join("| " + " | ".join(line) + " |" for line in ruled)


def listed(what: str, names: Collection[str]) -> str:
    """A list of names, with its noun in singular or plural.

    >>> listed("seed", ["0"]), listed("seed", ["0", "1"])
    ('seed 0', 'seeds 0, 1')
    """
    return f"{what}{'s' * (len(names) > 1)} {', '.join(names)}"


def between(page: str, mark: str, pieces: Iterator[str]) -> str:
    """The page with the pieces between the marks, or a sentence that there are none."""
    first, last = f"<!-- {mark} -->", f"<!-- end of {mark} -->"
    before, _, rest = page.partition(first)
    _, _, after = rest.partition(last)
    content = "\n\n".join(pieces) or NO_RESULTS
    return f"{before}{first}\n\n{content}\n\n{last}{after}"
