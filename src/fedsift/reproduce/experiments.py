"""The paper's table and figures as experiments, read from the TOML files in ``pinned/``.

This module imports no torch, so the command line lists the experiments quickly.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

PINNED = Path(__file__).parent / "pinned"
EXPERIMENTS = ("table1", *(f"fig{n}" for n in range(1, 9)), "sift", "rivals")
"""Command-line names of all experiments. The last two are not from the paper."""


@cache
def read_pinned(name: str) -> dict[str, Any]:
    """Return the contents of a pinned TOML file.

    >>> sorted(read_pinned("paper"))
    ['cnn-fashion-mnist', 'resnet18-svhn', 'vgg11-cifar10']
    """
    return tomllib.loads((PINNED / f"{name}.toml").read_text(encoding="utf-8"))


def task_names() -> tuple[str, ...]:
    """Return the names of all tasks."""
    return tuple(read_pinned("tasks")["tasks"])


@dataclass(frozen=True)
class Experiment:
    """A table or figure: its title, and the lines it has for each task and setting.

    A line is one method with its settings. ``kind`` says which files are made from the runs.
    """

    name: str
    title: str
    kind: str
    x: str
    tasks: tuple[str, ...]
    settings: tuple[str, ...]
    lines: tuple[Mapping[str, Any], ...]

    @classmethod
    def load(cls, name: str) -> Experiment:
        """Return the experiment of this name.

        >>> Experiment.load("fig7").lines[0]
        {'algorithm': 'fedadam-ssm', 'lr': 0.0001}
        """
        if name not in EXPERIMENTS:
            raise ValueError(
                f"unknown table or figure {name!r}; choose one of: {', '.join(EXPERIMENTS)}"
            )
        values = read_pinned(name)
        lists = {key: tuple(values[key]) for key in ("tasks", "settings", "lines")}
        return cls(name, values["title"], values["kind"], values["x"], **lists)


def split_names(text: str) -> tuple[str, ...]:
    """Return the names in a comma-separated list.

    >>> split_names("iid, noniid")
    ('iid', 'noniid')
    """
    return tuple(name for part in text.split(",") if (name := part.strip()))
