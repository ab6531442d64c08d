"""Merge command-line options and a TOML file into the settings of a run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from fedsift.cli.options import path
from fedsift.data.folder import use_existing_data_folder
from fedsift.errors import ConfigError
from fedsift.runs.config import check_type, read_values


def merge_config_file(file: Path | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a config file overridden by the given options.

    The data folder, if there is one, is used from here on.
    """
    given = {key: value for key, value in given.items() if value is not None}
    values = {**(read_values(file) if file else {}), **given}
    for key in values.keys() & {"out", "data_dir"}:
        values[key] = path_setting(key, values[key])
    if "theta" in given and values.get("partition") != "dirichlet":
        raise ConfigError("theta requires --partition dirichlet")
    use_existing_data_folder(values.get("data_dir"))
    return values


def command_text(command: str, values: Mapping[str, Any]) -> str:
    """Return a command with its options, to paste into a shell.

    >>> command_text("compare", {"lr": "cosine(0.1, 0)", "tensorboard": True, "seed": None})
    "fedsift compare --lr 'cosine(0.1, 0)' --tensorboard"
    """
    words = ["fedsift", *command.split()]
    for key, value in values.items():
        flag = f"--{key.replace('_', '-')}"
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        elif value is not None:
            words += [flag, str(value)]
    return shlex.join(words)


def path_setting(key: str, value: Any) -> Path:
    """Return the path that a setting names; settings from a config file are strings."""
    if isinstance(value, Path):
        return value
    check_type(key, value, "str")
    if not value:
        raise ConfigError(f"{key.replace('_', '-')} is empty: leave it out, or name a path")
    return path(value)


def new_folder(name: str) -> Path:
    """Return an unused path under ``runs/``, which consists of the name and the time."""
    stem = f"runs/{folder_name(name)}-{datetime.now():%Y%m%d-%H%M%S}"
    candidate, number = Path(stem), 2
    while candidate.exists():
        candidate, number = Path(f"{stem}-{number}"), number + 1
    return candidate


def folder_name(name: str) -> str:
    """Return the name of a run or a method as the name of a folder.

    >>> folder_name("digits-my_module:fedprox")
    'digits-my_module-fedprox'
    """
    return name.replace(":", "-").replace("/", "-")
